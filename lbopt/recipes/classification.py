"""Images and their classes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from lbopt import losses, metrics, types
from lbopt.config.model import ModelConfig
from lbopt.models import seam
from lbopt.recipes.sources import Source
from lbopt.recipes.task import Task


def make(network: seam.Model, source: Source, model: ModelConfig) -> Task:
    """Build the cross entropy of a batch with `image` and `label`, with top-1 accuracy; smoothed in training only."""
    del source

    def inputs(batch: types.Batch) -> Any:
        return batch["image"]

    def loss_fn(params, model_state, batch, rng):
        logits, new_model_state = network.apply(params, model_state, inputs(batch), train=True, rng=rng)
        each = losses.softmax_cross_entropy(logits, batch["label"], model.label_smoothing)
        return jnp.mean(each), (new_model_state, metrics.classification(logits, batch["label"], each))

    def metric_fn(params, model_state, batch):
        logits, _ = network.apply(params, model_state, inputs(batch), train=False)
        each = losses.softmax_cross_entropy(logits, batch["label"])
        return metrics.classification(logits, batch["label"], each, batch["mask"])

    return Task(inputs, loss_fn, metric_fn)
