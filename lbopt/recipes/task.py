"""What a kind of data asks of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lbopt import types


class Task(NamedTuple):
    """A loss and its measures.

    Attributes:
      inputs: batch -> what the model takes.
      loss_fn: see `lbopt.types.LossFn`; the mean over the examples of a batch, so that parts of equal size average to it.
      metric_fn: see `lbopt.types.MetricFn`.
    """

    inputs: Callable[[types.Batch], Any]
    loss_fn: types.LossFn
    metric_fn: types.MetricFn
