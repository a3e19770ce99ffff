"""Numbers of Python, NumPy or JAX, and whether their value can be looked at now."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_number(value: Any) -> bool:
    """Return whether a value is a real number of Python or NumPy, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def known(value: Any) -> Any:
    """Return a concrete array of one number (0-d, NumPy's or JAX's) as a Python number, and anything else unchanged.

    Traced arrays stay what they are: nobody can look at their values yet.

    >>> known(np.array(10)), known(jnp.float32(0.5)), known(0.1), known("ten")
    (10, 0.5, 0.1, 'ten')
    """
    if not isinstance(value, (np.ndarray, np.generic, jax.Array)) or isinstance(value, jax.core.Tracer):
        return value
    if value.ndim or not jnp.issubdtype(value.dtype, jnp.number) or jnp.issubdtype(value.dtype, jnp.complexfloating):
        return value
    kind = int if jnp.issubdtype(value.dtype, jnp.integer) else float
    return kind(jax.device_get(value))


def is_traced(value: Any) -> bool:
    """Return whether a value is a real scalar array whose number is not known yet."""
    real = isinstance(value, jax.core.Tracer) and value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.number)
    return real and not jnp.issubdtype(value.dtype, jnp.complexfloating)
