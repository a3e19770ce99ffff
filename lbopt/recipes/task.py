"""What a kind of data asks of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jax.sharding import Mesh

from lbopt import types
from lbopt.evaluation import evaluate
from lbopt.parallel import step as steps

Evaluate = Callable[[Any, Any, int], dict[str, float]]
"""(state, data set, global batch size) -> metrics of the whole data set."""
Evaluator = Callable[[Mesh, str], Evaluate]
"""(mesh, backend) -> `Evaluate`."""


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


def means_of(metric_fn: types.MetricFn) -> Evaluator:
    """Return the evaluation by exact means."""

    def make(mesh: Mesh, backend: str) -> Evaluate:
        step = steps.make_eval_step(metric_fn, mesh, backend)  # type: ignore[arg-type]
        return lambda state, dataset, size: evaluate(step, state, dataset, size)

    return make
