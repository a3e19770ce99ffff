"""Classification: loss and metrics of a batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from lbopt import errors, losses, metrics, replicas, types
from lbopt.config import LossConfig
from lbopt.data.from_config import Source
from lbopt.errors import require
from lbopt.models import Model
from lbopt.recipes._supervised import inputs_of
from lbopt.recipes._task import Task, of_equal_odds

_MANY_CLASSES = 100
"""Number of classes from which top-5 accuracy is a metric too."""
_MIXUP = 0x6D69
"""Folded into the step's key for the weights of mixtures."""


def make(network: Model, source: Source, loss: LossConfig) -> Task:
    """Build the cross entropy of a batch of features and labels, with top-1 accuracy.

    Pixels in uint8 are normalised here, on the device. Label smoothing and mixup apply to
    training only.
    """

    def inputs(batch: types.Batch) -> Any:
        image = inputs_of(source, batch)
        if source.pixel_scale is None or image.dtype != jnp.uint8:
            return image
        mean, std = (jnp.asarray(part, jnp.float32) * 255 for part in source.pixel_scale)
        # With space_to_depth the channels are those of four pixels.
        folded = image.shape[-1] // 3 if image.ndim == 4 and mean.size > 1 else 1
        return (image.astype(jnp.float32) - jnp.tile(mean, folded)) / jnp.tile(std, folded)

    def scored(logits: jax.Array, labels: jax.Array) -> jax.Array:
        if not loss.label_smoothing:
            return losses.softmax_cross_entropy(logits, labels)
        smoothing = (loss.label_smoothing, loss.label_smoothing_rule)
        return losses.softmax_cross_entropy(logits, labels, *smoothing)

    def loss_fn(params, model_state, batch, rng):
        images = inputs(batch)
        labels = batch[source.target]
        weights = None
        if loss.mixup_alpha:
            with errors.about("loss.mixup_alpha", loss.mixup_alpha):
                key = jax.random.fold_in(rng, _MIXUP)
                weights = mixup_weights(key, len(labels), loss.mixup_alpha)
            images = jax.tree.map(lambda x: mixed(x, weights), images)
        logits, new_model_state = network.apply(params, model_state, images, train=True, rng=rng)
        each = scored(logits, labels)
        if weights is not None:
            each = weights * each + (1 - weights) * scored(logits, swapped(labels))
        return jnp.mean(each), (new_model_state, _measures(logits, labels, each, None))

    def metric_fn(params, model_state, batch):
        logits, _ = network.apply(params, model_state, inputs(batch), train=False)
        labels = batch[source.target]
        each = losses.softmax_cross_entropy(logits, labels)
        return _measures(logits, labels, each, batch["mask"])

    task = Task(inputs, loss_fn, metric_fn)
    trivial = of_equal_odds(source.outputs)
    return task._replace(main_metric="accuracy", trivial_loss=trivial)


def _measures(
    logits: jax.Array, labels: jax.Array, each: jax.Array, mask: jax.Array | None
) -> types.Metrics:
    found = metrics.classification(logits, labels, each, mask)
    if logits.shape[-1] >= _MANY_CLASSES:
        right = jnp.take_along_axis(logits, labels[:, None], 1)
        found["top_5_accuracy"] = metrics.summed(jnp.sum(logits > right, -1) < 5, mask)
    return found


def swapped(x: jax.Array) -> jax.Array:
    """Exchange neighbours, 0 with 1, 2 with 3, ... along the leading axis."""
    return x.reshape(-1, 2, *x.shape[1:])[:, ::-1].reshape(x.shape)


def mixed(images: jax.Array, weights: jax.Array) -> jax.Array:
    """Mix every image with its neighbour (Zhang et al., arXiv 1710.09412v2).

    Args:
      images: Floating-point images [batch, ...].
      weights: Weight of each image itself [batch]; its neighbour has 1 minus it.

    Note:
      The paper's code mixes a batch with a permutation of itself by one weight. Here neighbours
      are on one device and each pair has its own weight, so that the result depends on neither
      devices nor backend.
    """
    weights = weights.reshape(-1, *[1] * (images.ndim - 1))
    return weights * images + (1 - weights) * swapped(images)


def check_pairs(num_examples: int) -> None:
    """Raise `UserError` unless every example has a neighbour that mixup mixes it with."""
    fix = "mixup mixes pairs of examples; give each device an even number"
    require(num_examples % 2 == 0, "num_examples", num_examples, fix)


def mixup_weights(key: jax.Array, num_examples: int, alpha: float) -> jax.Array:
    """Return the weights of mixup [num_examples], fp32.

    Each pair of neighbours has a sample from Beta(alpha, alpha) and 1 minus it.

    Raises:
      UserError: If the number of examples is odd.
    """
    check_pairs(num_examples)
    pairs = replicas.example_numbers(num_examples)[::2]
    keys = jax.vmap(lambda pair: jax.random.fold_in(key, pair))(pairs)
    drawn = jax.vmap(lambda one: jax.random.beta(one, alpha, alpha))(keys)
    return jnp.stack([drawn, 1 - drawn], 1).reshape(num_examples)
