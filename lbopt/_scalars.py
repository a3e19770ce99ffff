"""Numbers and flags given as arguments: whether their values are known yet, and whether they fit.

Checks are made when a thing is built. Under `optax.inject_hyperparams`, and in a sweep whose trials
share one compiled program, the same arguments are traced arrays, whose values no check can read.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lbopt.errors import UserError

LARGEST = float(np.finfo(np.float32).max)


def is_number(value: Any) -> bool:
    """Return whether a value is a real number of Python or NumPy, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def known(value: Any) -> Any:
    """Return a fraction, or a concrete 0-d array of a real number, as a Python number.

    Everything else comes back unchanged, traced arrays too.

    >>> known(np.array(10)), known(jnp.float32(0.5)), known(0.1), known("ten")
    (10, 0.5, 0.1, 'ten')
    """
    if isinstance(value, numbers.Rational) and not isinstance(value, numbers.Integral):
        return float(value)
    is_array = isinstance(value, (np.ndarray, np.generic, jax.Array))
    if not is_array or isinstance(value, jax.core.Tracer):
        return value
    if value.ndim or not _is_real(value.dtype):
        return value
    kind = int if jnp.issubdtype(value.dtype, jnp.integer) else float
    return kind(jax.device_get(value))


def is_traced(value: Any) -> bool:
    """Return whether a value is a traced real scalar, whose number is not known yet."""
    return isinstance(value, jax.core.Tracer) and value.ndim == 0 and _is_real(value.dtype)


def _is_real(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.number) and not jnp.issubdtype(dtype, jnp.complexfloating)


def checked(
    argument: str,
    value: Any,
    wanted: str = "a finite number >= 0",
    fits: Callable[[Any], bool] = lambda number: number >= 0,
    traced: bool = False,
) -> Any:
    """Return a number as a Python number; a traced one unchanged if that is allowed.

    Args:
      argument: Name of the argument, the field of the error.
      value: Number, or 0-d array of a number; must be finite in fp32.
      wanted: The number that the error asks for, as a phrase.
      fits: Predicate on a finite number, True if it is acceptable.
      traced: Whether a traced scalar is accepted without looking at its number.

    Raises:
      UserError: If the value is no such number.

    >>> checked("power", np.float32(2)), checked("rule", 0, "0 or 1", lambda n: n in (0, 1))
    (2.0, 0)
    """
    value = known(value)
    if traced and is_traced(value):
        return value
    if not is_number(value) or not abs(value) <= LARGEST or not fits(value):
        raise UserError(argument, value, f"give {wanted}")
    return value


def whole(argument: str, value: Any, low: int = 1) -> int:
    """Return a whole number of at least `low` as a Python int; raise `UserError` for anything else.

    >>> whole("num_steps", np.int32(3))
    3
    """
    return checked(
        argument, value, f"a whole number >= {low}", lambda n: isinstance(n, int) and n >= low
    )


def seed(argument: str, value: Any) -> Any:
    """Return a seed, a whole number or a traced one; raise `UserError` for anything else."""
    return value if is_traced(value) else whole(argument, value, low=0)


def in_fp32(value: Any) -> Any:
    """Return a number as a Python float, which has no dtype yet, and a traced one in fp32."""
    return jnp.asarray(value, jnp.float32) if is_traced(value) else float(value)


def require_scalar(argument: str, value: Any) -> None:
    """Raise `UserError` unless a value is a number, or a real 0-d array of fp32 or wider."""
    # Classes of scalars (np.float32) and arrays of other libraries have a dtype too.
    dtype = getattr(value, "dtype", None)
    if isinstance(value, type) or not isinstance(dtype, np.dtype):
        dtype = None
    if dtype is not None:
        _require_precise(argument, value, dtype)
    if is_number(value):
        return
    if dtype is None or not _is_real(dtype) or jnp.ndim(value):
        raise UserError(argument, value, "give a number")


def _require_precise(argument: str, value: Any, dtype: Any) -> None:
    """Refuse narrow and complex dtypes: `optax.inject_hyperparams` takes that of the parameters."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    if is_narrow or jnp.issubdtype(dtype, jnp.complexfloating):
        why = ", in which 0.999 is 1" if is_narrow else ""
        fix = (
            f"its dtype is {dtype}{why}; give a Python number or fp32, and to "
            "optax.inject_hyperparams hyperparam_dtype=jnp.float32"
        )
        raise UserError(argument, value, fix, code="type")


def require_at_least(argument: str, value: Any, low: float) -> None:
    """Raise `UserError` if a number is known not to be finite and at least `low`."""
    require_scalar(argument, value)
    value = known(value)
    if is_number(value) and not (abs(value) <= LARGEST and value >= low):
        raise UserError(argument, value, f"give a finite number >= {low:g}")


def require_above(argument: str, value: Any, low: float) -> None:
    """Raise `UserError` if a number is known not to be finite and above `low`."""
    require_scalar(argument, value)
    value = known(value)
    if is_number(value) and not (abs(value) <= LARGEST and value > low):
        raise UserError(argument, value, f"give a finite number > {low:g}")


def require_decay_rate(argument: str, value: Any) -> None:
    """Raise `UserError` if a number is known not to lie in [0, 1)."""
    require_scalar(argument, value)
    value = known(value)
    if is_number(value) and not 0 <= value < 1:
        raise UserError(argument, value, "give a number in [0, 1)")


def require_bounds(
    argument: str, bounds: tuple[float, float] | None, low: float | None = 0.0
) -> None:
    """Raise `UserError` unless bounds are None, or numbers with low <= bounds[0] <= bounds[1]."""
    if bounds is None:
        return
    if isinstance(bounds, (tuple, list)):
        bounds = tuple(known(bound) for bound in bounds)
    if _are_bounds(bounds) and (low is None or low <= bounds[0]):
        return
    least = "" if low is None else f"{low:g} <= "
    fix = f"give (low, high) with {least}low <= high, or None for no bounds"
    raise UserError(argument, bounds, fix)


def _are_bounds(bounds: Any) -> bool:
    """Return whether bounds are an ascending pair of numbers."""
    if not isinstance(bounds, tuple) or len(bounds) != 2:
        return False
    return all(is_number(bound) for bound in bounds) and bounds[0] <= bounds[1]


def require_flag(argument: str, value: Any) -> bool:
    """Return a bool; raise `UserError` for anything else, as a traced bool could not be obeyed."""
    if not isinstance(value, (bool, np.bool_)):
        raise UserError(argument, value, "give True or False")
    return bool(value)
