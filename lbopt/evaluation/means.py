"""Evaluate every example exactly once, on any number of devices."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from lbopt import metrics, types
from lbopt.data.arrays import Dataset
from lbopt.data.batches import EvalBatches, eval_batches
from lbopt.data.damaged import DAMAGED
from lbopt.evaluation.protocol import Evaluation, Evaluator
from lbopt.job import pulse
from lbopt.parallel.mesh import local_parts, put_batch
from lbopt.parallel.state import TrainState
from lbopt.parallel.step import Step, make_eval_step


def evaluate(
    eval_step: Step, state: TrainState, dataset: Dataset, global_batch_size: int
) -> dict[str, float]:
    """Return the mean of each metric over the whole data set.

    The last batch is padded and masked, numerators and denominators are summed over all devices and batches, and the
    division comes last: the result does not depend on the batch size or the device count, whatever divides what.

    Args:
      eval_step: from `make_eval_step`.
      state: parameters and model state to evaluate.
      dataset: of any size.
      global_batch_size: of any size; rounded up to a multiple of the devices.

    Returns:
      Name -> mean, for instance `{"loss": 0.13, "accuracy": 0.97}`.
    """
    mesh = eval_step.mesh
    batches = eval_batches(dataset, global_batch_size, mesh.size, local_parts(mesh))
    laid_out = (put_batch(mesh, batch) for batch in pulse.beating(batches))
    return metrics.means(eval_step(state.params, state.model_state, batch) for batch in laid_out)


def means_of(metric_fn: types.MetricFn) -> Evaluator:
    """Return the evaluation by exact means."""

    def make(mesh: Mesh, backend: str) -> Evaluation:
        return Evaluation(make_eval_step(metric_fn, mesh, backend), evaluate, batch_arguments)  # type: ignore[arg-type]

    return make


def batch_arguments(step: Step, state: TrainState, dataset: Dataset, size: int) -> tuple[Any, ...]:
    """Return the arguments, as shapes, of a step that takes one batch of `lbopt.data.batches.EvalBatches`."""
    batches = EvalBatches(dataset, size, step.mesh.size)
    one = batches.piece(0, 0, 1)
    one.pop(DAMAGED, None)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((batches.part_size, *x.shape[1:]), x.dtype), one
    )
    return state.params, state.model_state, shapes
