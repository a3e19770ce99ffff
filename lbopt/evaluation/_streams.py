"""Means over every token of a text, for networks that carry a state through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lbopt import metrics, types
from lbopt.data import rows_of
from lbopt.data.text import EvalTextStreams
from lbopt.job import beating
from lbopt.parallel import Step, TrainState, local_parts, put_batch

FirstCarry = Callable[[types.Params, int], types.ModelState]
"""Function of (parameters, number of streams) that returns the state before the first token."""


def evaluate_streams(
    first_carry: FirstCarry,
    step: Step,
    state: TrainState,
    dataset: EvalTextStreams,
    global_batch_size: int,
) -> dict[str, float]:
    """Return the mean of each metric over every token of a text.

    The text is cut into parallel streams, and the network carries its state through each of them.

    Args:
      first_carry: Function that returns the state before any text.
      step: Compiled function of (params, model_state, batch) that returns the metrics and the new
        model state.
      state: The parameters to evaluate.
      dataset: The text.
      global_batch_size: Number of streams, at most one per window; rounded up to a multiple of the
        devices.
    """
    num_streams = _num_streams(step, dataset, global_batch_size)
    local = rows_of(local_parts(step.mesh), step.mesh.size, num_streams)
    carried: Any = jax.tree.map(np.asarray, first_carry(state.params, num_streams))

    found = []
    for batch in beating(dataset.batches(num_streams)):
        local_batch = {name: array[local] for name, array in batch.items()}
        pairs, carried = step(state.params, carried, put_batch(step.mesh, local_batch))
        found.append(jax.tree.map(np.asarray, pairs))
    return metrics.means(found)


def _num_streams(step: Step, dataset: EvalTextStreams, global_batch_size: int) -> int:
    devices = step.mesh.size
    return -(-min(global_batch_size, len(dataset)) // devices) * devices


def stream_arguments(
    first_carry: FirstCarry,
    step: Step,
    state: TrainState,
    dataset: EvalTextStreams,
    global_batch_size: int,
) -> tuple[Any, ...]:
    """Return the shapes of the arguments of the step in `evaluate_streams`."""
    num_streams = _num_streams(step, dataset, global_batch_size)
    carried = jax.eval_shape(lambda params: first_carry(params, num_streams), state.params)
    batch = next(dataset.batches(num_streams))
    return (
        state.params,
        carried,
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch),
    )
