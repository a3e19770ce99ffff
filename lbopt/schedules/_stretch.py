"""Rescaling of a schedule to a run of another length."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars


def stretch_schedule(
    schedule: optax.Schedule, total_steps: int, num_steps: int | jax.Array, first_step: int = 0
) -> optax.Schedule:
    r"""Rescale a schedule made for `total_steps` updates to `num_steps`.

    With f = first_step, update c of the new run gets the learning rate of the fractional update

        (c + f) (total_steps + f) / (num_steps + f) - f

    of the given schedule. Warmup, decay and stairs are stretched alike, and the decay is complete
    one step after the last update in both. With equal lengths the rates are bitwise the same.

    Args:
      schedule: Count of updates so far -> learning rate; must accept fractional counts.
      total_steps: Number of updates for which the schedule was made.
      num_steps: Number of updates of the new run; may be traced.
      first_step: Number of the first update, 0 or 1, as given to `warmup_schedule`.

    Returns:
      A schedule: count of updates so far (0 at the first) -> learning rate.

    Raises:
      UserError: If an argument is out of range; names the argument.

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
