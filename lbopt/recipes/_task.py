"""What a kind of data asks of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lbopt import types
from lbopt.evaluation import Evaluator


class Task(NamedTuple):
    """A loss and its measures.

    Attributes:
      inputs: batch -> what the model takes.
      loss_fn: see `lbopt.types.LossFn`; the mean over the examples of a batch, so that parts of equal size average to it.
      metric_fn: see `lbopt.types.MetricFn`.
      evaluator: what makes evaluation; None for the means of `metric_fn`.
      metric_names: of the evaluation, where `evaluator` is given.
      first_state: parameters -> what the model's state has from the start, beside the network's own.
    """

    inputs: Callable[[types.Batch], Any]
    loss_fn: types.LossFn
    metric_fn: types.MetricFn
    evaluator: Evaluator | None = None
    metric_names: tuple[str, ...] = ()
    first_state: Callable[[types.Params], types.ModelState] | None = None
