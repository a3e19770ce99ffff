"""Global batches for training, padded and masked ones for evaluation."""

from __future__ import annotations

from collections.abc import Iterator

import grain
import numpy as np

from lbopt.data.arrays import Dataset
from lbopt.data.order import example_indices

_PREFETCHED_BATCHES = 8
_READER_THREADS = 2


class TrainBatches:
    """Random access to the batches of a run: item s is this process's part of the global batch of step s.

    Args:
      dataset: the training set.
      seed: of the shuffle.
      global_batch_size: examples per step over all processes.
      num_steps: length of the run.
      process_index: which contiguous part of each global batch is this process's.
      process_count: how many parts there are; it divides the global batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        seed: int,
        global_batch_size: int,
        num_steps: int,
        process_index: int = 0,
        process_count: int = 1,
    ):
        if global_batch_size % process_count:
            raise ValueError(f"global_batch_size = {global_batch_size}: {process_count} processes do not divide it")
        self._dataset, self._seed, self._num_steps = dataset, seed, num_steps
        self._global_batch_size, self._part = global_batch_size, global_batch_size // process_count
        self._offset = process_index * self._part

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        start = int(step) * self._global_batch_size + self._offset
        epochs = np.arange(start, start + self._part) // len(self._dataset)
        indices = example_indices(len(self._dataset), self._seed, start, self._part)
        return self._dataset.draw(indices, epochs, self._seed)


def train_iterator(batches: TrainBatches, start_step: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Iterate from a step to the end of the run, reading ahead with Grain.

    A batch is a function of its step, so the step in the checkpoint is the whole data position.
    """
    dataset = grain.MapDataset.source(batches)[start_step:]
    options = grain.ReadOptions(num_threads=_READER_THREADS, prefetch_buffer_size=_PREFETCHED_BATCHES)
    return iter(dataset.to_iter_dataset(options))


def eval_batches(dataset: Dataset, global_batch_size: int, multiple_of: int = 1) -> Iterator[dict[str, np.ndarray]]:
    """Yield every example exactly once, in order, in batches of one shape.

    Args:
      dataset: of any size.
      global_batch_size: of any size; cut to the data set's and rounded up to a multiple of `multiple_of`.
      multiple_of: the number of devices that share a batch.

    Yields:
      The data set's arrays and `mask` [batch] bool, False on padding (which repeats the last example).
    """
    if global_batch_size < 1:
        raise ValueError(f"global_batch_size = {global_batch_size}: give a number >= 1")
    size = -(-min(global_batch_size, len(dataset)) // multiple_of) * multiple_of
    for start in range(0, len(dataset), size):
        positions = np.arange(start, start + size)
        mask = positions < len(dataset)
        yield {**dataset.take(np.minimum(positions, len(dataset) - 1)), "mask": mask}
