"""Metrics as (sum, count) pairs: the only form that adds up exactly over batches and devices."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from lbopt import types
from lbopt.errors import UserError


def summed(values: jax.Array, mask: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Return (sum, count) of per-example values in fp32, over the examples where `mask` is True.

    Masked-out values do not count even where they are NaN.

    Raises:
      UserError: for complex values, whose imaginary part fp32 would drop.
    """
    if jnp.iscomplexobj(values):
        raise UserError(f"values = {values.dtype}: give real ones, jnp.abs(values) for instance")
    values = values.astype(jnp.float32)
    if mask is None:
        return jnp.sum(values), jnp.asarray(values.size, jnp.float32)
    return jnp.sum(jnp.where(mask, values, 0)), jnp.sum(mask.astype(jnp.float32))


def classification(
    logits: jax.Array, labels: jax.Array, losses: jax.Array, mask: jax.Array | None = None
) -> types.Metrics:
    """Return loss and top-1 accuracy.

    Args:
      logits: [batch, classes].
      labels: [batch] int.
      losses: [batch] the loss of each example.
      mask: [batch] bool, False on padding; None if there is none.
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
    """

    def each(
        params: types.Params, model_state: types.ModelState, batch: types.Batch
    ) -> types.Metrics:
        def alone(example: types.Batch) -> types.Metrics:
            return metric_fn(params, model_state, jax.tree.map(lambda x: x[None], example))

        return jax.vmap(alone)(dict(batch))

    return each


def means(batches: Iterable[types.Metrics]) -> dict[str, float]:
    """Add up the pairs of many batches in float64 on the host and divide once.

    A pair called `perplexity` is of negative log-likelihoods, and the exponential comes after the division.

    >>> means([{"accuracy": (3.0, 4.0)}, {"accuracy": (1.0, 1.0)}])
    {'accuracy': 0.8}
    >>> means([{"perplexity": (0.0, 3.0)}])
    {'perplexity': 1.0}
    """
    totals: dict[str, np.ndarray] = {}
    for batch in batches:
        for name, pair in batch.items():
            if not (isinstance(pair, tuple | list) and len(pair) == 2):
                raise UserError(
                    f"metrics/{name}: a {type(pair).__name__}; give (sum over examples, number of examples)"
                )
            if any(np.shape(part) or np.iscomplexobj(part) for part in pair):
                kind = " and ".join(
                    f"{np.asarray(part).dtype}{list(np.shape(part))}" for part in pair
                )
                raise UserError(
                    f"metrics/{name}: {kind}; give one real number each, under a name of its own"
                )
            totals[name] = totals.get(name, np.zeros(2)) + np.asarray(
                [float(part) for part in pair]
            )
    return {name: _finish(name, float(total / count)) for name, (total, count) in totals.items()}


def _finish(name: str, mean: float) -> float:
    if name != "perplexity":
        return mean
    with np.errstate(over="ignore"):  # a run that has diverged
        return float(np.exp(mean))
