"""Metrics as (sum, count) pairs, which add up exactly over batches and devices."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lbopt import types
from lbopt.errors import UserError

_EXPONENTIALS = ("perplexity", "perplexity_per_byte")
"""Metrics that are the exponential of a mean."""


def summed(values: jax.Array, mask: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Return (sum, count) of values, two fp32 scalars, over the examples where `mask` is True.

    Args:
      values: [batch] real values, one of each example.
      mask: [batch] bool, or None for all examples. Values where it is False do not count, even if
        they are NaN.

    Raises:
      UserError: For complex values, whose imaginary part fp32 would drop.

    >>> import jax.numpy as jnp
    >>> total, count = summed(jnp.array([1.0, 2.0, 9.0]), jnp.array([True, True, False]))
    >>> float(total), float(count)
    (3.0, 2.0)
    """
    if jnp.iscomplexobj(values):
        fix = f"its dtype is {values.dtype}; give real values, jnp.abs(values) for instance"
        raise UserError("values", reason=fix, code="type")
    values = values.astype(jnp.float32)
    if mask is None:
        return jnp.sum(values), jnp.asarray(values.size, jnp.float32)
    return jnp.sum(jnp.where(mask, values, 0)), jnp.sum(mask.astype(jnp.float32))


def classification(
    logits: jax.Array, labels: jax.Array, losses: jax.Array, mask: jax.Array | None = None
) -> types.Metrics:
    """Return the metrics `loss` and `accuracy` (top-1) of a batch.

    Args:
      logits: [batch, classes] floating-point logits.
      labels: [batch] int class indices.
      losses: [batch] losses of the examples.
      mask: [batch] bool, False on padding; None without padding.

    >>> import jax.numpy as jnp
    >>> logits = jnp.array([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    >>> found = classification(logits, jnp.array([0, 1, 1]), losses=jnp.array([0.1, 0.3, 3.0]))
    >>> means([found])["accuracy"]
    0.6666666666666666
    """
    correct = jnp.argmax(logits, axis=-1) == labels
    return {"loss": summed(losses, mask), "accuracy": summed(correct, mask)}


def of_each_example(metric_fn: types.MetricFn) -> types.MetricFn:
    """Return a function that gives the metrics of each example instead of those of the batch.

    Metrics are sums over examples, so the metrics of a batch of one are that example's own.

    Args:
      metric_fn: (params, model_state, batch) -> metrics. An example's outputs must not depend on
        the others in its batch, as holds in evaluation.

    Returns:
      (params, model_state, batch) -> metric -> (sums, counts) of each example [batch].

    >>> import jax.numpy as jnp
    >>> def metric_fn(params, model_state, batch):
    ...     return {"error": summed(jnp.abs(params * batch["x"] - batch["y"]))}
    >>> batch = {"x": jnp.array([1.0, 2.0]), "y": jnp.array([2.0, 7.0])}
    >>> sums, counts = of_each_example(metric_fn)(2.0, {}, batch)["error"]
    >>> print(sums, counts)
    [0. 3.] [1. 1.]
    """

    def each(
        params: types.Params, model_state: types.ModelState, batch: types.Batch
    ) -> types.Metrics:
        def alone(example: types.Batch) -> types.Metrics:
            return metric_fn(params, model_state, jax.tree.map(lambda x: x[None], example))

        return jax.vmap(alone)(dict(batch))

    return each


def means(batches: Iterable[types.Metrics]) -> dict[str, float]:
    """Return the mean of each metric: pairs are added up in float64 on the host, and divided once.

    A pair called `perplexity` or `perplexity_per_byte` holds negative log-likelihoods; the
    exponential is taken after the division.

    Args:
      batches: Metrics of batches, which need not have the same names.

    Raises:
      UserError: For a metric that is no pair of real numbers.

    >>> means([{"accuracy": (3.0, 4.0)}, {"accuracy": (1.0, 1.0)}])
    {'accuracy': 0.8}
    >>> means([{"perplexity": (0.0, 3.0)}])
    {'perplexity': 1.0}
    """
    totals: dict[str, np.ndarray] = {}
    for batch in batches:
        for name, pair in batch.items():
            _check_pair(name, pair)
            totals[name] = totals.get(name, np.zeros(2)) + [float(number) for number in pair]
    return {name: _finish(name, float(total / count)) for name, (total, count) in totals.items()}


def _check_pair(name: str, pair: Any) -> None:
    """Raise `UserError` unless a metric is a pair of real numbers."""
    field = f"metrics/{name}"
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        fix = f"a {type(pair).__name__}; give (sum over examples, number of examples)"
        raise UserError(field, reason=fix, code="type")
    if not all(_is_real(number) for number in pair):
        kinds = [
            f"{number.dtype}{list(number.shape)}"
            if hasattr(number, "dtype")
            else type(number).__name__
            for number in pair
        ]
        fix = f"{' and '.join(kinds)}; give two real numbers, and each metric a name of its own"
        raise UserError(field, reason=fix, code="type")


def _is_real(number: Any) -> bool:
    """Return whether a value is a number, or a 0-d array, that is real."""
    if isinstance(number, numbers.Real):
        return True
    dtype = getattr(number, "dtype", None)
    if not isinstance(dtype, np.dtype) or np.shape(number):
        return False
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return dtype == np.bool_ or (jnp.issubdtype(dtype, jnp.number) and not is_complex)


def _finish(name: str, mean: float) -> float:
    if name not in _EXPONENTIALS:
        return mean
    with np.errstate(over="ignore"):  # in a run that diverged
        return float(np.exp(mean))
