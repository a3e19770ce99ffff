"""The input of trials: indices into a training set on the device, or batches made on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lbopt import types
from lbopt.data import ArrayDataset, Dataset, TrainBatches, example_indices
from lbopt.schedules import BatchPhase
from lbopt.sweep._trials import Cell

_MOST_EXAMPLES = 2**17
"""Most examples of a trial in one call, so that it ends soon when the process is asked to stop."""
_MOST_BYTES = 2**28
"""Most bytes that one call is fed, for all its trials."""
_FEWEST_CHECKS = 8
"""Minimum number of host checks per trial, so a diverged trial's lane is freed early. A trial that
runs alone needs none."""


class Feed:
    """The batches of a cell's trials.

    A trial's batch is that of `lbopt train` with the same seed: a function of seed, step and batch
    size alone.

    Args:
      cell: The cell.
      phase: The steps that are fed; all have one batch size.
      width: Number of trials in a call.
      arrays: The arrays of `resident_arrays` on the device; None to put them there.

    Attributes:
      shared: Arrays [examples, ...] on the device by name, which all steps share; {} if batches are
        made on the host.
      num_steps: Most steps in a call.
      first_step: Steps of a trial before the first one that is fed.
    """

    def __init__(
        self,
        cell: Cell,
        phase: BatchPhase,
        width: int,
        arrays: Mapping[str, jax.Array] | None = None,
    ):
        self._phase = phase
        self.first_step = phase.first_step
        self._train = cell.problem.splits.train
        kept = resident_arrays(self._train)
        self._indexed = bool(kept)
        self.shared = jax.tree.map(jnp.asarray, kept) if arrays is None else dict(arrays)
        blank = self._take(0, phase.first_step, 1)
        of_a_step = width * sum(array.nbytes for array in jax.tree.leaves(blank))
        # A call is short enough to hold its input, to stop in time, and to free diverged lanes.
        longest = math.ceil(self._phase.num_steps / (1 if width == 1 else _FEWEST_CHECKS))
        size = self._phase.global_batch_size
        fitting = min(_MOST_BYTES // of_a_step, _MOST_EXAMPLES // size, longest)
        self.num_steps = max(1, fitting)

    def take(self, seed: int, start: int, count: int) -> Any:
        """Return the input of steps [start, start + count) of a trial, padded with zeros.

        Args:
          seed: Seed of the trial.
          start: Number of steps that the trial has taken.
          count: Number of steps in [0, `num_steps`]; 0 is taken for 1.

        Returns:
          Indices of examples, int32 [num_steps, batch], if there are `shared` arrays; otherwise
          arrays [num_steps, batch, ...] by name.
        """
        found = self._take(seed, start, max(count, 1))
        missing = self.num_steps - max(count, 1)
        return jax.tree.map(
            lambda x: np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)]), found
        )

    def _take(self, seed: int, start: int, count: int) -> Any:
        phase = self._phase
        size = phase.global_batch_size
        start -= phase.first_step
        if self._indexed:
            first = phase.first_example + start * size
            order = example_indices(len(self._train), seed, first, count * size)
            return order.reshape(count, size).astype(np.int32)
        first = phase.first_example
        batches = TrainBatches(self._train, seed, size, start + count, first_example=first)
        found = [batches[start + step] for step in range(count)]
        return {name: np.stack([batch[name] for batch in found]) for name in found[0]}

    def batch(self, shared: Mapping[str, jax.Array], fed: Any, step: jax.Array) -> types.Batch:
        """Return one step's batch, arrays [batch, ...] by name; traceable.

        Args:
          shared: The arrays of the attribute `shared`.
          fed: Input of several steps, from `take`.
          step: Index of the step in `fed`, int32 scalar.
        """
        of_step = jax.tree.map(lambda x: x[step], fed)
        if not self._indexed:
            return of_step
        return {name: array[of_step] for name, array in shared.items()}


def resident_arrays(dataset: Dataset) -> dict[str, np.ndarray]:
    """Return the arrays of a data set that can stay on the device; {} if it cannot.

    It can if its examples are the same in every epoch, and take less than 2 GiB.

    Args:
      dataset: The training set.

    Returns:
      Arrays [examples, ...] by name.
    """
    if not isinstance(dataset, ArrayDataset) or not dataset.same_in_every_epoch:
        return {}
    total = sum(math.prod(array.shape) * array.dtype.itemsize for array in dataset.arrays.values())
    return dict(dataset.arrays) if total < 2**31 else {}
