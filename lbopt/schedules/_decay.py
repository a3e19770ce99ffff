"""Decays: functions that give the learning rate after warmup as a factor of its peak."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from lbopt import _scalars
from lbopt.errors import UserError, require_choice

DecayFn = Callable[[jax.Array], jax.Array]
"""Progress after warmup, in [0, 1] -> factor of the peak learning rate.

The functions that `exponential_factor` and `step_factor` return take optimizer steps instead.
"""

DECAYS = ("polynomial", "cosine", "constant")


def make_decay(decay: str = "polynomial", power: float = 1.0, end_factor: float = 0.0) -> DecayFn:
    r"""Build a decay from 1 at progress 0 to `end_factor` at progress 1.

        polynomial: end + (1 - end) (1 - s)^power       (power 1 is linear)
        cosine:     end + (1 - end) (1 + cos(pi s)) / 2
        constant:   1

    Args:
      decay: "polynomial", "cosine" or "constant".
      power: Exponent of the polynomial, > 0. Must be 1 for the other decays.
      end_factor: Final value as a factor of the peak, in [0, 1]. Must be 0 for "constant".

    Returns:
      A function of progress s, clipped to [0, 1].

    Raises:
      UserError: If an argument is out of range or has no effect; names the argument.

    >>> [float(make_decay("polynomial", power=2.0)(s)) for s in (0.0, 0.5, 1.0)]
    [1.0, 0.25, 0.0]
    """
    require_choice("decay", decay, DECAYS)
    power = _scalars.checked("power", power, "a finite number > 0", lambda n: n > 0)
    end_factor = _scalars.checked(
        "end_factor", end_factor, "a number in [0, 1]", lambda n: 0 <= n <= 1
    )
    # An argument without effect is refused, as a search over it would show nothing.
    if power != 1 and decay != "polynomial":
        fix = f"only a polynomial has a power, not {{decay}} = {decay!r}; leave it 1"
        raise UserError("power", power, fix, code="unused", also=["decay"])
    if end_factor != 0 and decay == "constant":
        fix = "{decay} = 'constant' does not fall; leave it 0"
        raise UserError("end_factor", end_factor, fix, code="unused", also=["decay"])

    def factor(progress: jax.Array) -> jax.Array:
        s = jnp.clip(progress, 0.0, 1.0)
        if decay == "constant":
            return jnp.ones_like(s)
        shape = (1 - s) ** power if decay == "polynomial" else (1 + jnp.cos(jnp.pi * s)) / 2
        return end_factor + (1 - end_factor) * shape

    return factor


def exponential_factor(
    decay_rate: float, steps_per_decay: float, staircase: bool = True
) -> DecayFn:
    """Return steps -> decay_rate^(steps / steps_per_decay).

    Args:
      decay_rate: Factor of one decay.
      steps_per_decay: Steps of one decay, > 0; need not be whole.
      staircase: Whether the exponent is rounded down to a whole number.

    >>> [float(exponential_factor(0.5, 2.5)(t)) for t in (0, 2, 3, 5)]
    [1.0, 1.0, 0.5, 0.25]
    """
    steps_per_decay = float(
        _scalars.checked("steps_per_decay", steps_per_decay, "a finite number > 0", lambda n: n > 0)
    )
    decay_rate = float(
        _scalars.checked("decay_rate", decay_rate, "a number in (0, 1]", lambda n: 0 < n <= 1)
    )
    if not isinstance(staircase, (bool, np.bool_)):
        raise UserError("staircase", staircase, "give True or False")

    def factor(steps: jax.Array) -> jax.Array:
        # Add a small slack before rounding down: in fp32 a quotient that should be a whole number
        # may come out just below it.
        flights = jnp.asarray(steps, jnp.float32) / steps_per_decay
        return decay_rate ** (jnp.floor(flights + 1e-6 * (1 + flights)) if staircase else flights)

    return factor


def step_factor(factor: float, boundaries: tuple[float, ...]) -> DecayFn:
    """Return steps -> factor^(number of boundaries passed).

    Args:
      factor: Factor at each boundary.
      boundaries: Steps at which the factor is applied once more.

    >>> [round(float(step_factor(0.1, (2, 4))(t)), 4) for t in range(6)]
    [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    """
    wanted = "one or more ascending numbers > 0"
    given = (
        boundaries
        if isinstance(boundaries, (tuple, list)) or getattr(boundaries, "ndim", 0) == 1
        else ()
    )
    steps = [
        float(_scalars.checked("boundaries", boundary, wanted, lambda n: n > 0))
        for boundary in given
    ]
    if not steps or steps != sorted(steps):
        raise UserError("boundaries", boundaries, f"give {wanted}")
    factor = _scalars.checked("factor", factor, "a number in (0, 1]", lambda n: 0 < n <= 1)

    def passed(t: jax.Array) -> jax.Array:
        count = sum(
            (jnp.asarray(t, jnp.float32) >= boundary).astype(jnp.float32) for boundary in steps
        )
        return jnp.asarray(factor, jnp.float32) ** count

    return passed
