"""Checks of the values that loss functions and metric functions return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lbopt import tree, types
from lbopt.errors import UserError


class CheckedLoss(NamedTuple):
    """The checked value of a loss function.

    Attributes:
      mean: Mean loss of the batch, scalar; its gradient updates the parameters.
      weight: Divisor of that mean, fp32 scalar; None if the function returned a mean.
      model_state: The model's state after the batch.
      metrics: Metrics in dtypes of at least 32 bits.
    """

    mean: jax.Array
    weight: jax.Array | None
    model_state: types.ModelState
    metrics: types.Metrics


def checked(returned: Any) -> CheckedLoss:
    """Check the value that a loss function returned.

    Raises:
      UserError: If it is not (loss, (model_state, metrics)), or the loss is neither one
        floating-point number nor a pair (sum, weight) of such.
    """
    if not (_is_pair(returned) and _is_pair(returned[1])):
        reason = f"it returns {_containers(returned)}; return (loss, (model_state, metrics))"
        raise UserError("loss_fn", reason=reason, code="type")
    loss, (model_state, metrics) = returned
    mean, weight = mean_and_weight(loss)
    return CheckedLoss(mean, weight, model_state, checked_metrics(metrics, "loss_fn"))


def mean_and_weight(loss: Any) -> tuple[jax.Array, jax.Array | None]:
    """Return a loss's mean and its weight, None for a loss that is a mean already.

    Args:
      loss: A `lbopt.types.Loss`, not checked yet.

    Raises:
      UserError: If it is neither one floating-point number nor a pair of such.
    """
    total, weight = loss if _is_pair(loss) else (loss, None)
    _require_number(total, jnp.floating, "the loss", "the mean over examples, or (sum, weight)")
    if weight is None:
        return total, None

    # The weight is a constant to the gradient: a larger weight would lower the mean, not the sum.
    _require_number(weight, jnp.number, "the weight of the loss", "a number of examples or tokens")
    weight = jax.lax.stop_gradient(jnp.asarray(weight, jnp.float32))
    return total / jnp.where(weight == 0, jnp.ones_like(weight), weight), weight


def _require_number(value: Any, kind: Any, what: str, fix: str) -> None:
    dtype = _dtype(value)
    shape = jnp.shape(value) if dtype else ()
    is_real = dtype is not None and not jnp.issubdtype(dtype, jnp.complexfloating)
    if not is_real or shape or not jnp.issubdtype(dtype, kind):
        found = f"{dtype}{list(shape)}" if dtype else type(value).__name__
        reason = f"{what} is {found}; return one real number, {fix}"
        raise UserError("loss_fn", reason=reason, code="type")


def checked_metrics(metrics: Any, field: str) -> types.Metrics:
    """Return metrics in dtypes that add up: 32 bits or more.

    Args:
      metrics: The metrics that a function returned.
      field: Name of that function in a message.

    Raises:
      UserError: If they are not {name: (sum, number of examples)}, both of them numbers.
    """
    if not isinstance(metrics, Mapping):
        reason = f"the metrics are {_containers(metrics)}; return "
        reason += "{name: (sum, number of examples)}"
        raise UserError(field, reason=reason, code="type")
    return {name: _wide_pair(field, name, value) for name, value in metrics.items()}


def _wide_pair(field: str, name: str, value: Any) -> tuple[jax.Array, jax.Array]:
    if not (_is_pair(value) and all(map(_dtype, value))):
        reason = f"metrics/{name} is {_containers(value)}; give (sum over examples, number of them)"
        raise UserError(field, reason=reason, code="type")
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
    """Return a value as a message shows it: the types in it, without the numbers."""
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(_containers, value))})"
    return "array" if isinstance(value, jax.Array) else type(value).__name__
