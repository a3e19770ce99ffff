"""Data, model and loss of a config."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lbopt import losses, metrics, types
from lbopt.config.train import DataConfig, ModelConfig
from lbopt.data import digits
from lbopt.data.arrays import Splits
from lbopt.errors import UserError
from lbopt.models import norm, seam
from lbopt.recipes import networks


class Problem(NamedTuple):
    """What is learned, whatever the optimizer.

    Attributes:
      init: key -> (params, model_state).
      loss_fn: see `lbopt.types.LossFn`.
      metric_fn: see `lbopt.types.MetricFn`.
      splits: training, validation and test sets.
    """

    init: Any
    loss_fn: types.LossFn
    metric_fn: types.MetricFn
    splits: Splits


def make_problem(data: DataConfig, model: ModelConfig) -> Problem:
    """Load the data and build the model and its loss.

    Raises:
      UserError: if the model cannot take these images.
      EnvironmentProblem: if the data cannot be had.
    """
    splits = {"digits": digits.load_digits}[data.name]()
    network = seam.from_linen(networks.make_network(model, digits.NUM_CLASSES))
    example = splits.train.arrays["image"][:1]

    def init(key: jax.Array) -> tuple[types.Params, types.ModelState]:
        return network.init(key, example)

    try:
        jax.eval_shape(lambda: init(jax.random.key(0)))
    except ValueError as error:
        raise UserError(f"config.model.{error}".replace("stats_scope", "batch_norm_scope")) from error
    return Problem(init, _classification_loss(network, model.label_smoothing), _classification_metrics(network), splits)


def check_batch_norm(model: ModelConfig, num_replicas: int, num_examples: int) -> None:
    """Raise `UserError` if the groups of the model's batch norm do not fit the replicas or the batch."""
    if model.name in ("cnn", "efficientnet", "resnet"):
        try:
            norm.Scope.parse(model.batch_norm_scope).num_groups(num_replicas, num_examples)
        except ValueError as error:
            raise UserError(str(error).replace("stats_scope", "config.model.batch_norm_scope")) from error


def _classification_loss(network: seam.Model, label_smoothing: float) -> types.LossFn:
    def loss_fn(params, model_state, batch, rng):
        logits, new_model_state = network.apply(params, model_state, batch["image"], train=True, rng=rng)
        each = losses.softmax_cross_entropy(logits, batch["label"], label_smoothing)
        return jnp.mean(each), (new_model_state, metrics.classification(logits, batch["label"], each))

    return loss_fn


def _classification_metrics(network: seam.Model) -> types.MetricFn:
    def metric_fn(params, model_state, batch):
        logits, _ = network.apply(params, model_state, batch["image"], train=False)
        each = losses.softmax_cross_entropy(logits, batch["label"])
        return metrics.classification(logits, batch["label"], each, batch["mask"])

    return metric_fn
