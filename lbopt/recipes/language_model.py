"""Text, token after token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from lbopt import losses, metrics, types
from lbopt.config.loss import LossConfig
from lbopt.models import seam
from lbopt.recipes.sources import Source
from lbopt.recipes.task import Task


def make(network: seam.Model, source: Source, loss: LossConfig) -> Task:
    """Build the cross entropy of a batch with `tokens` and `next_tokens` [batch, length], the mean over all tokens.

    All windows are full, so the mean over tokens is the mean over examples. The metrics are `loss` (in nats a token),
    `perplexity` (its exponential, taken after the mean over all tokens) and `accuracy`. The state that a window leaves is
    not carried to the next.
    """
    del source, loss

    def inputs(batch: types.Batch) -> Any:
        return {"tokens": batch["tokens"]}

    def score(logits: jax.Array, batch: types.Batch) -> tuple[jax.Array, types.Metrics]:
        labels = batch["next_tokens"]
        each = losses.softmax_cross_entropy(logits, labels)
        counted = None
        if "mask" in batch:
            counted = jnp.broadcast_to(batch["mask"][:, None], labels.shape)
        pairs = metrics.classification(logits, labels, each, counted)
        return each, {**pairs, "perplexity": pairs["loss"]}

    def loss_fn(params, model_state, batch, rng):
        outputs, new_model_state = network.apply(params, model_state, inputs(batch), train=True, rng=rng)
        each, found = score(outputs["logits"], batch)
        return jnp.mean(each), (new_model_state, found)

    def metric_fn(params, model_state, batch):
        outputs, _ = network.apply(params, model_state, inputs(batch), train=False)
        return score(outputs["logits"], batch)[1]

    return Task(inputs, loss_fn, metric_fn)
