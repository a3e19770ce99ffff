"""The task that a kind of data sets a model: its loss and its metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lbopt import types
from lbopt.evaluation import Evaluator
from lbopt.models import Model


class Task(NamedTuple):
    """The loss and the metrics of a task.

    Attributes:
      inputs: Function of a batch that returns the model's input.
      loss_fn: Loss as in `lbopt.types.LossFn`. It is the mean over the examples of a batch, so that
        slices of equal size average to it.
      metric_fn: Metrics as in `lbopt.types.MetricFn`.
      evaluator: Function that makes the evaluation; None for the means of `metric_fn`.
      metric_names: Names of the evaluation's metrics, where `evaluator` is given.
      first_state: Function of the parameters that returns entries of the model's initial state
        beside the network's own.
      main_metric: Name of the metric by which a study judges a model.
      trivial_loss: Loss of outputs that do not look at the input: equal odds for all classes, or
        the mean of the training targets. None if it is not known.
    """

    inputs: Callable[[types.Batch], Any]
    loss_fn: types.LossFn
    metric_fn: types.MetricFn
    evaluator: Evaluator | None = None
    metric_names: tuple[str, ...] = ()
    first_state: Callable[[types.Params], types.ModelState] | None = None
    main_metric: str = "loss"
    trivial_loss: float | None = None


Score = Callable[[Any, types.Batch], tuple[jax.Array, types.Metrics]]
"""(outputs, batch) -> (loss of each example, or of each token; all metrics of the batch)."""


def scored_task(
    network: Model,
    inputs: Callable[[types.Batch], Any],
    score: Score,
    main_metric: str,
    trivial_loss: float | None,
) -> Task:
    """Build a task whose loss is the mean of a score's losses; see `Task`."""

    def loss_fn(params, model_state, batch, rng):
        outputs, new_model_state = network.apply(
            params, model_state, inputs(batch), train=True, rng=rng
        )
        each, found = score(outputs, batch)
        return jnp.mean(each), (new_model_state, found)

    def metric_fn(params, model_state, batch):
        outputs, _ = network.apply(params, model_state, inputs(batch), train=False)
        return score(outputs, batch)[1]

    return Task(inputs, loss_fn, metric_fn, main_metric=main_metric, trivial_loss=trivial_loss)


def of_equal_odds(outputs: int) -> float | None:
    """Return the cross entropy of equal odds for all classes or tokens; None if unknown."""
    return math.log(outputs) if outputs > 1 else None
