"""Means over every token of a text through which a network carries its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lbopt import metrics, types
from lbopt.data.batches import rows_of
from lbopt.data.windows import EvalLanes
from lbopt.job import pulse
from lbopt.parallel.mesh import local_parts, put_batch
from lbopt.parallel.state import TrainState
from lbopt.parallel.step import Step

FirstCarry = Callable[[types.Params, int], types.ModelState]
"""(parameters, number of lanes) -> the state that the network carries into the first token."""


def evaluate_lanes(
    first_carry: FirstCarry,
    step: Step,
    state: TrainState,
    dataset: EvalLanes,
    global_batch_size: int,
) -> dict[str, float]:
    """Return the means over every token of a text, read in lanes through which the state is carried.

    Args:
      first_carry: the state before any text.
      step: (params, model_state, batch) -> (metrics, new model_state).
      state: parameters to evaluate.
      dataset: the text.
      global_batch_size: lanes, at most one a window; rounded up to a multiple of the devices.
    """
    lanes = _num_lanes(step, dataset, global_batch_size)
    mine = rows_of(local_parts(step.mesh), step.mesh.size, lanes)
    carried: Any = jax.tree.map(np.asarray, first_carry(state.params, lanes))
    found = []
    for batch in pulse.beating(dataset.batches(lanes)):
        part_of_it = put_batch(step.mesh, {name: array[mine] for name, array in batch.items()})
        pairs, carried = step(state.params, carried, part_of_it)
        found.append(jax.tree.map(np.asarray, pairs))
    return metrics.means(found)


def _num_lanes(step: Step, dataset: EvalLanes, global_batch_size: int) -> int:
    devices = step.mesh.size
    return -(-min(global_batch_size, len(dataset)) // devices) * devices


def lane_arguments(
    first_carry: FirstCarry,
    step: Step,
    state: TrainState,
    dataset: EvalLanes,
    global_batch_size: int,
) -> tuple[Any, ...]:
    """Return the arguments, as shapes, of one call of the step in `evaluate_lanes`."""
    lanes = _num_lanes(step, dataset, global_batch_size)
    carried = jax.eval_shape(lambda params: first_carry(params, lanes), state.params)
    batch = next(dataset.batches(lanes))
    return (
        state.params,
        carried,
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch),
    )
