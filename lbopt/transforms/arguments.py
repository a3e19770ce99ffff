"""Checks of transform arguments, made when the transform is built and only on plain numbers.

Under `optax.inject_hyperparams`, and in a sweep that shares one compiled program, the same arguments are traced arrays
whose values nobody can look at yet.
"""

from __future__ import annotations

import math
import numbers
from typing import Any


def is_number(value: Any) -> bool:
    """Return whether a value is a Python or NumPy number that can be checked now."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def require_at_least(argument: str, value: Any, low: float) -> None:
    """Raise ValueError unless a plain number is finite and at least `low`."""
    if is_number(value) and not (math.isfinite(value) and value >= low):
        raise ValueError(f"{argument} = {value!r}: give a finite number >= {low:g}")


def require_above(argument: str, value: Any, low: float) -> None:
    """Raise ValueError unless a plain number is finite and above `low`."""
    if is_number(value) and not (math.isfinite(value) and value > low):
        raise ValueError(f"{argument} = {value!r}: give a finite number > {low:g}")


def require_decay_rate(argument: str, value: Any) -> None:
    """Raise ValueError unless a plain number lies in [0, 1)."""
    if is_number(value) and not 0 <= value < 1:
        raise ValueError(f"{argument} = {value!r}: give a number in [0, 1)")


def require_bounds(argument: str, bounds: tuple[float, float] | None) -> None:
    """Raise ValueError unless bounds are None or a pair 0 <= low <= high."""
    if bounds is None:
        return
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1]:
        raise ValueError(f"{argument} = {bounds!r}: give (low, high) with 0 <= low <= high, or None for no bounds")


def require_params(params: Any, transform: str) -> None:
    """Raise ValueError if `params` was not given to an update that needs it."""
    if params is None:
        raise ValueError(f"{transform} needs the parameters: call tx.update(grads, opt_state, params)")
