"""What a kind of data asks of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from lbopt import types
from lbopt.data.arrays import Dataset
from lbopt.data.batches import EvalBatches
from lbopt.data.damaged import DAMAGED
from lbopt.evaluation import evaluate
from lbopt.parallel import step as steps
from lbopt.parallel.state import TrainState


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The evaluation of whole data sets: call it with (state, data set, global batch size) for its metrics.

    Attributes:
      step: what is compiled.
      run: (step, state, data set, global batch size) -> metrics.
      arguments: (step, state, data set, global batch size) -> what one call of the step takes, as shapes.
    """

    step: steps.Step
    run: Callable[[Any, Any, Any, int], dict[str, float]]
    arguments: Callable[[Any, Any, Any, int], tuple[Any, ...]]

    def __call__(self, state: TrainState, dataset: Any, global_batch_size: int) -> dict[str, float]:
        return self.run(self.step, state, dataset, global_batch_size)

    def lower(self, state: TrainState, dataset: Any, global_batch_size: int) -> Any:
        """Lower the step for these shapes; nothing is compiled or run."""
        return self.step.lower(*self.arguments(self.step, state, dataset, global_batch_size))


Evaluator = Callable[[Mesh, str], Evaluation]
"""(mesh, backend) -> `Evaluation`."""


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

    def make(mesh: Mesh, backend: str) -> Evaluation:
        return Evaluation(steps.make_eval_step(metric_fn, mesh, backend), evaluate, batch_arguments)  # type: ignore[arg-type]

    return make


def batch_arguments(
    step: steps.Step, state: TrainState, dataset: Dataset, size: int
) -> tuple[Any, ...]:
    """Return the arguments, as shapes, of a step that takes one batch of `lbopt.data.batches.EvalBatches`."""
    batches = EvalBatches(dataset, size, step.mesh.size)
    one = batches.piece(0, 0, 1)
    one.pop(DAMAGED, None)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((batches.part_size, *x.shape[1:]), x.dtype), one
    )
    return state.params, state.model_state, shapes
