"""The form of what a loss function and a metric function return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lbopt import tree, types
from lbopt.errors import UserError


def checked(returned: Any) -> tuple[jax.Array, tuple[types.ModelState, types.Metrics]]:
    """Return what a loss function returned, its metrics as of `checked_metrics`.

    Raises:
      UserError: it is not (loss, (model_state, metrics)), or the loss is not one floating-point number.
    """
    if not (_is_pair(returned) and _is_pair(returned[1])):
        raise UserError(
            f"loss_fn: it returns {_containers(returned)}; return (loss, (model_state, metrics))"
        )
    loss, (model_state, metrics) = returned
    dtype, shape = _dtype(loss), jnp.shape(loss) if _dtype(loss) else ()
    if dtype is None or shape or not jnp.issubdtype(dtype, jnp.floating):
        kind = f"{dtype}{list(shape)}" if dtype else type(loss).__name__
        raise UserError(
            f"loss_fn: the loss is {kind}; return one floating-point number, the mean over examples"
        )
    return loss, (model_state, checked_metrics(metrics, "loss_fn"))


def checked_metrics(metrics: Any, field: str) -> types.Metrics:
    """Return metrics in dtypes that add up: 32 bits or more.

    Args:
      metrics: what a function returned as its metrics.
      field: name of that function in a message.

    Raises:
      UserError: it is not {name: (sum, number of examples)}, both of them numbers.
    """
    if not isinstance(metrics, Mapping):
        raise UserError(
            f"{field}: the metrics are {_containers(metrics)}; return {{name: (sum, number of examples)}}"
        )
    return {name: _wide_pair(f"{field}: metrics/{name}", value) for name, value in metrics.items()}


def _wide_pair(where: str, value: Any) -> tuple[jax.Array, jax.Array]:
    if not (_is_pair(value) and all(map(_dtype, value))):
        raise UserError(
            f"{where} is {_containers(value)}; give (sum over examples, number of examples)"
        )
    total, weight = (jnp.asarray(x, _wide(jnp.asarray(x).dtype)) for x in value)
    return total, weight


def _wide(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        return tree.wide_dtype(dtype)
    return jnp.int32 if dtype.itemsize < 4 else dtype


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _dtype(value: Any) -> Any:
    """Return the dtype of a number or an array of numbers, None for anything else."""
    if not isinstance(value, jax.Array | np.ndarray | np.generic | int | float | complex):
        return None
    dtype = jnp.asarray(value).dtype if isinstance(value, int | float | complex) else value.dtype
    return dtype if jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_) else None


def _containers(value: Any) -> str:
    """Return how a message shows a value: the types in it, without the numbers."""
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(_containers, value))})"
    return "array" if isinstance(value, jax.Array) else type(value).__name__
