"""Means over all examples of a data set, each counted exactly once."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from lbopt import metrics, types
from lbopt.data import DAMAGED, Dataset, EvalBatches, eval_batches
from lbopt.evaluation._evaluation import Evaluation, Evaluator
from lbopt.job import beating
from lbopt.parallel import Step, TrainState, local_parts, make_eval_step, put_batch


def evaluate(
    eval_step: Step, state: TrainState, dataset: Dataset, global_batch_size: int
) -> dict[str, float]:
    """Return the mean of each metric over the whole data set.

    The last batch is padded and masked. Numerators and denominators are summed over all devices and
    batches before the division, so the result does not depend on the batch size or the number of
    devices, and neither has to divide the number of examples.

    Args:
      eval_step: The compiled step, from `make_eval_step`.
      state: The parameters and model state to evaluate.
      dataset: The data set, of any size.
      global_batch_size: Number of examples in a step, rounded up to a multiple of the devices.

    Returns:
      The mean of each metric by its name, for instance `{"loss": 0.13, "accuracy": 0.97}`.

    >>> import jax.numpy as jnp, lbopt, numpy as np, optax
    >>> from lbopt.metrics import summed
    >>> from lbopt.data import ArrayDataset
    >>> def metric_fn(params, model_state, batch):
    ...     return {"error": summed(jnp.abs(params - batch["x"]), batch["mask"])}
    >>> step = lbopt.make_eval_step(metric_fn, lbopt.make_mesh(1))
    >>> state = lbopt.TrainState.create(jnp.float32(1), {}, optax.sgd(0.1), 0)
    >>> evaluate(step, state, ArrayDataset({"x": np.arange(5.0)}), global_batch_size=2)
    {'error': 1.4}
    """
    mesh = eval_step.mesh
    batches = eval_batches(dataset, global_batch_size, mesh.size, local_parts(mesh))
    on_devices = (put_batch(mesh, batch) for batch in beating(batches))
    return metrics.means(eval_step(state.params, state.model_state, batch) for batch in on_devices)


def means_of(metric_fn: types.MetricFn) -> Evaluator:
    """Return an evaluator that reports the mean of each metric; see `evaluate`."""

    def make(mesh: Mesh, backend: str) -> Evaluation:
        step = make_eval_step(metric_fn, mesh, backend)  # type: ignore[arg-type]
        return Evaluation(step, evaluate, batch_arguments)

    return make


def batch_arguments(step: Step, state: TrainState, dataset: Dataset, size: int) -> tuple[Any, ...]:
    """Return the shapes of the arguments of a step on a batch of `EvalBatches`.

    Args:
      step: The compiled step.
      state: The parameters and model state.
      dataset: The data set.
      size: The global batch size.
    """
    batches = EvalBatches(dataset, size, step.mesh.size)
    example = batches.slice(0, 0, 1)
    example.pop(DAMAGED, None)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((batches.part_size, *x.shape[1:]), x.dtype), example
    )
    return state.params, state.model_state, shapes
