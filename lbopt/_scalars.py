"""Numbers of Python, NumPy or JAX, and whether their value can be looked at now."""

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
    """Return a fraction, or a concrete array of one number (0-d, NumPy's or JAX's), as a Python number, and anything else unchanged.

    Traced arrays stay what they are: nobody can look at their values yet.

    >>> known(np.array(10)), known(jnp.float32(0.5)), known(0.1), known("ten")
    (10, 0.5, 0.1, 'ten')
    """
    if isinstance(value, numbers.Rational) and not isinstance(value, numbers.Integral):
        return float(value)
    if not isinstance(value, (np.ndarray, np.generic, jax.Array)) or isinstance(
        value, jax.core.Tracer
    ):
        return value
    if (
        value.ndim
        or not jnp.issubdtype(value.dtype, jnp.number)
        or jnp.issubdtype(value.dtype, jnp.complexfloating)
    ):
        return value
    kind = int if jnp.issubdtype(value.dtype, jnp.integer) else float
    return kind(jax.device_get(value))


def is_traced(value: Any) -> bool:
    """Return whether a value is a real scalar array whose number is not known yet."""
    real = (
        isinstance(value, jax.core.Tracer)
        and value.ndim == 0
        and jnp.issubdtype(value.dtype, jnp.number)
    )
    return real and not jnp.issubdtype(value.dtype, jnp.complexfloating)


def checked(
    argument: str,
    value: Any,
    wanted: str = "a finite number >= 0",
    fits: Callable[[Any], bool] = lambda number: number >= 0,
    traced: bool = False,
) -> Any:
    """Return a number as Python's, or what is traced if it may be.

    Args:
      argument: what the message calls it.
      value: to look at; finite in fp32.
      wanted: what the message asks for.
      fits: whether a finite number is such a one.
      traced: whether a traced scalar will do, whose number nobody can look at yet.

    Raises:
      ValueError: naming the argument.

    >>> checked("power", np.float32(2)), checked("rule", 0, "0 or 1", lambda number: number in (0, 1))
    (2.0, 0)
    """
    value = known(value)
    if traced and is_traced(value):
        return value
    if not is_number(value) or not abs(value) <= LARGEST or not fits(value):
        raise UserError(argument, value, f"give {wanted}")
    return value


def whole(argument: str, value: Any, low: int = 1) -> int:
    """Return a whole number of at least `low` as Python's; raise ValueError for anything else.

    >>> whole("num_steps", np.int32(3))
    3
    """
    return checked(
        argument, value, f"a whole number >= {low}", lambda n: isinstance(n, int) and n >= low
    )


def in_fp32(value: Any) -> Any:
    """Return a number as a float, which has no dtype yet, and what is traced in fp32."""
    return jnp.asarray(value, jnp.float32) if is_traced(value) else float(value)
