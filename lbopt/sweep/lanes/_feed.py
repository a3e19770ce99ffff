"""What the steps of a trial see: indices into a training set that lies on the device, or batches drawn on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lbopt import types
from lbopt.data import ArrayDataset, Dataset, TrainBatches, example_indices
from lbopt.sweep._trials import Cell

_EXAMPLES = 2**17
"""Of one call at most, so that it is soon over: a process that is asked to end waits for it."""
_BYTES = 2**28
"""That one call is fed with at most, of all its trials."""
_LOOKS = 8
"""At the losses of trials side by side, at least, in the longest of them: the lane of one that has diverged is soon free."""


class Feed:
    """The batches of a cell's trials.

    A trial's batch is that of `lbopt train` with the same seed: a function of (seed, step, batch size) alone.

    Args:
      cell: whose batches.
      width: trials that are fed at a time.
      arrays: those of `resident_arrays`, on the device; None to put them there.

    Attributes:
      shared: name -> array [examples, ...] on the device that all steps see; {} if batches are drawn on the host.
      num_steps: that one call is fed, at most.
    """

    def __init__(self, cell: Cell, width: int, arrays: Mapping[str, jax.Array] | None = None):
        self._cell, self._train = cell, cell.problem.splits.train
        kept = resident_arrays(self._train)
        self._indexed = bool(kept)
        self.shared = jax.tree.map(jnp.asarray, kept) if arrays is None else dict(arrays)
        blank = self._take(0, 0, 1)
        of_a_step = width * sum(array.nbytes for array in jax.tree.leaves(blank))
        longest = math.ceil(cell.resolved.num_steps / (1 if width == 1 else _LOOKS))
        fitting = min(_BYTES // of_a_step, _EXAMPLES // cell.global_batch_size, longest)
        self.num_steps = max(1, fitting)

    def take(self, seed: int, start: int, count: int) -> Any:
        """Return what steps [start, start + count) of a trial see, filled up with zeros to `num_steps`.

        Args:
          seed: of the trial.
          start: steps it has taken.
          count: in [0, `num_steps`]; 0 gives what 1 does.

        Returns:
          Indices of examples, int32 [num_steps, batch], if there are `shared` arrays; else name -> [num_steps, batch, ...].
        """
        found = self._take(seed, start, max(count, 1))
        missing = self.num_steps - max(count, 1)
        return jax.tree.map(
            lambda x: np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)]), found
        )

    def _take(self, seed: int, start: int, count: int) -> Any:
        size, examples = self._cell.global_batch_size, len(self._train)
        if self._indexed:
            order = example_indices(examples, seed, start * size, count * size)
            return order.reshape(count, size).astype(np.int32)
        batches = TrainBatches(self._train, seed, size, start + count)
        found = [batches[start + step] for step in range(count)]
        return {name: np.stack([batch[name] for batch in found]) for name in found[0]}

    def batch(self, shared: Mapping[str, jax.Array], fed: Any, step: jax.Array) -> types.Batch:
        """Return one step's batch; traced.

        Args:
          shared: the attribute.
          fed: from `take`.
          step: int32 scalar, place in `fed`.

        Returns:
          Name -> [batch, ...].
        """
        mine = jax.tree.map(lambda x: x[step], fed)
        return {name: array[mine] for name, array in shared.items()} if self._indexed else mine


def resident_arrays(dataset: Dataset) -> dict[str, np.ndarray]:
    """Return the arrays, name -> [examples, ...], of a data set that is the same in every epoch and fits beside the program.

    Args:
      dataset: of training.

    Returns:
      {} of any other one.
    """
    if not isinstance(dataset, ArrayDataset) or not dataset.same_in_every_epoch:
        return {}
    total = sum(math.prod(array.shape) * array.dtype.itemsize for array in dataset.arrays.values())
    return dict(dataset.arrays) if total < 2**31 else {}
