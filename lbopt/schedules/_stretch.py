"""A schedule for a run of another length."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars


def stretch_schedule(
    schedule: optax.Schedule, total_steps: int, num_steps: int | jax.Array, first_step: int = 0
) -> optax.Schedule:
    r"""Rescale a schedule made for `total_steps` updates to `num_steps`: warmup, decay and stairs alike.

    With f = first_step the update c of the shorter run gets the rate of the fractional update

        (c + f) (total_steps + f) / (num_steps + f) - f

    of the longer one, so both decays are complete one step after the last update. With equal lengths nothing changes, bit for bit.

    Args:
      schedule: count of updates so far -> rate, also for fractions.
      total_steps: updates it was made for.
      num_steps: updates of the run; may be traced.
      first_step: as in `warmup_schedule`.

    Returns:
      A schedule: count of updates so far (0 at the first) -> learning rate.

    Raises:
      ValueError: naming the argument that is out of range.

    >>> from lbopt.schedules import warmup_schedule
    >>> whole = warmup_schedule(1.0, warmup_steps=4, total_steps=12)
    >>> [float(stretch_schedule(whole, 12, 6)(count)) for count in range(6)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    """
    lengths = {"total_steps": total_steps, "num_steps": num_steps}
    made_for, length = (
        _scalars.in_fp32(
            _scalars.checked(name, steps, "a number of steps >= 1", lambda n: n >= 1, traced=True)
        )
        for name, steps in lengths.items()
    )
    first_step = _scalars.checked("first_step", first_step, "0 or 1", lambda n: n in (0, 1))

    def stretched(count: jax.Array) -> jax.Array:
        factor = (made_for + first_step) / (
            jnp.maximum(jnp.asarray(length, jnp.float32), 1) + first_step
        )
        moved = jnp.asarray(count, jnp.float32) + first_step
        return schedule(jnp.where(factor == 1, moved, moved * factor) - first_step)

    return stretched
