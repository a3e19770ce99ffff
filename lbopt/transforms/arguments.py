"""Checks of transform arguments, made when the transform is built and only on plain numbers.

Under `optax.inject_hyperparams`, and in a sweep that shares one compiled program, the same arguments are traced arrays
whose values nobody can look at yet.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from lbopt import tree, types


def is_number(value: Any) -> bool:
    """Return whether a value is a Python or NumPy number that can be checked now."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def require_scalar(argument: str, value: Any) -> None:
    """Raise ValueError unless the value is a number or a (traced) scalar array."""
    if not is_number(value) and not (
        hasattr(value, "dtype") and getattr(value, "ndim", 0) == 0 and value.dtype != bool
    ):
        raise ValueError(f"{argument} = {value!r}: give a number")


def require_flag(argument: str, value: Any) -> bool:
    """Return a bool, or raise ValueError for anything else: what a flag says must be known when the transform is built."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{argument} = {value!r}: give True or False")
    return bool(value)


def require_at_least(argument: str, value: Any, low: float) -> None:
    """Raise ValueError unless a plain number is finite and at least `low`."""
    require_scalar(argument, value)
    if is_number(value) and not (math.isfinite(value) and value >= low):
        raise ValueError(f"{argument} = {value!r}: give a finite number >= {low:g}")


def require_whole(argument: str, value: Any, low: int) -> None:
    """Raise ValueError unless the value is a whole number, known now, of at least `low`."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < low:
        raise ValueError(f"{argument} = {value!r}: give a whole number >= {low}")


def require_above(argument: str, value: Any, low: float) -> None:
    """Raise ValueError unless a plain number is finite and above `low`."""
    require_scalar(argument, value)
    if is_number(value) and not (math.isfinite(value) and value > low):
        raise ValueError(f"{argument} = {value!r}: give a finite number > {low:g}")


def require_decay_rate(argument: str, value: Any) -> None:
    """Raise ValueError unless a plain number lies in [0, 1)."""
    require_scalar(argument, value)
    if is_number(value) and not 0 <= value < 1:
        raise ValueError(f"{argument} = {value!r}: give a number in [0, 1)")


def require_bounds(argument: str, bounds: tuple[float, float] | None, low: float | None = 0.0) -> None:
    """Raise ValueError unless bounds are None or a pair, the first at least `low` and not above the second."""
    if bounds is None:
        return
    least = "" if low is None else f"{low:g} <= "
    if (
        not isinstance(bounds, (tuple, list))
        or len(bounds) != 2
        or not all(is_number(bound) for bound in bounds)
        or not bounds[0] <= bounds[1]
        or (low is not None and not low <= bounds[0])
    ):
        raise ValueError(f"{argument} = {bounds!r}: give (low, high) with {least}low <= high, or None for no bounds")


def require_choice(argument: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{argument} = {value!r}: use one of {', '.join(str(choice) for choice in choices)}")


def require_float_dtype(argument: str, dtype: Any) -> None:
    """Raise ValueError unless the value is None or names a floating-point dtype."""
    try:
        known = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        known = False
    if not known:
        raise ValueError(f"{argument} = {dtype!r}: give a floating-point dtype (float32, bfloat16), or None for fp32")


def require_float_leaves(params: types.Params, transform: str) -> None:
    """Raise ValueError if a leaf is not a floating-point array."""

    def check(name: str, leaf: Any) -> None:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"{transform}: the parameter at {name!r} is {dtype or type(leaf).__name__}, not a floating-point array: "
                "take it out with optax.masked"
            )

    tree.map_with_name(check, params)


def require_params(params: Any, transform: str) -> None:
    """Raise ValueError if `params` was not given to an update that needs it."""
    if params is None:
        raise ValueError(f"{transform} needs the parameters: call tx.update(grads, opt_state, params)")
