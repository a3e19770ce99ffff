"""Global batches for training, and padded and masked batches for evaluation, both read ahead.

A batch is read in slices of consecutive examples, which threads or processes read side by side.
"""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import grain
import numpy as np
from absl import flags

from lbopt.data._arrays import Dataset
from lbopt.data._damaged import DAMAGED, DamagedCount
from lbopt.data._order import examples_at
from lbopt.errors import require

Batch = dict[str, np.ndarray]
_LEAST_SLICES = 4
"""Minimum number of slices that are read ahead for each thread."""


class Batches(Protocol):
    """Random access to numbered global batches, of which this process has its shards.

    Attributes:
      dataset: Data set that the examples come from.
      part_size: Number of examples of a batch that this process reads.
    """

    dataset: Dataset
    part_size: int

    def __len__(self) -> int: ...

    def slice(self, number: int, start: int, stop: int) -> Batch:
        """Return examples [start, stop) of this process's shards of a batch."""


def rows_of(parts: Sequence[int] | None, num_parts: int, global_batch_size: int) -> np.ndarray:
    """Return the places in a global batch of the examples that a process reads.

    The batch is cut into equal contiguous shards, one for each device.

    Args:
      parts: Indices of the process's shards, in the order in which their examples are returned;
        None for all.
      num_parts: Number of shards, a divisor of the batch size.
      global_batch_size: Number of examples in the batch.

    Returns:
      [examples] int64.

    >>> rows_of([0, 2], 4, 8).tolist()
    [0, 1, 4, 5]
    """
    rows = np.arange(global_batch_size).reshape(num_parts, -1)
    return (rows if parts is None else rows[list(parts)]).ravel()


class TrainBatches:
    """Random access to the batches of a run.

    Item s holds this process's shards of the global batch of step s.

    Args:
      dataset: Training set.
      seed: Seed of the shuffle and of the augmentation.
      global_batch_size: Examples per step over all processes.
      num_steps: Number of steps of the run.
      num_parts: Number of equal contiguous shards of a global batch, one for each device.
      parts: Indices of this process's shards; None for all.
      first_example: Position in the stream of examples where step 0 begins.

    Raises:
      ValueError: If the number of shards does not divide the batch.

    >>> import numpy as np
    >>> from lbopt.data import ArrayDataset
    >>> dataset = ArrayDataset({"x": np.arange(6)})
    >>> batches = TrainBatches(dataset, seed=0, global_batch_size=3, num_steps=4)
    >>> sorted([*batches[0]["x"].tolist(), *batches[1]["x"].tolist()])  # an epoch is two steps
    [0, 1, 2, 3, 4, 5]
    """

    def __init__(
        self,
        dataset: Dataset,
        seed: int,
        global_batch_size: int,
        num_steps: int,
        num_parts: int = 1,
        parts: Sequence[int] | None = None,
        first_example: int = 0,
    ):
        fix = f"give a multiple of {num_parts}, the number of devices"
        require(global_batch_size % num_parts == 0, "global_batch_size", global_batch_size, fix)
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.first_example = first_example
        self._seed = seed
        self._num_steps = num_steps
        self._rows = rows_of(parts, num_parts, global_batch_size)
        self.part_size = len(self._rows)

    def moved(self, first_example: int, num_steps: int) -> TrainBatches:
        """Return the batches of another part of the stream, of the same size.

        Args:
          first_example: Position in the stream of examples where step 0 begins.
          num_steps: Number of steps.
        """
        found = copy.copy(self)
        found.first_example = first_example
        found._num_steps = num_steps
        return found

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> Batch:
        return _joined([self.slice(int(step), 0, self.part_size)], self.part_size, self.dataset)

    def slice(self, number: int, start: int, stop: int) -> Batch:
        """Return examples [start, stop) of this process's shards of the batch of step `number`."""
        positions = self.first_example + number * self.global_batch_size + self._rows[start:stop]
        epochs, indices = np.divmod(positions, len(self.dataset))
        if not self.dataset.reading.in_order:
            indices = examples_at(len(self.dataset), self._seed, positions)
        return self.dataset.draw(indices, epochs, self._seed)


def train_iterator(batches: TrainBatches, start_step: int = 0) -> Iterator[Batch]:
    """Return the batches from a step to the end of the run, read ahead.

    A batch is a function of its step, so the step in a checkpoint is the whole data position.

    Args:
      batches: The batches of the run.
      start_step: Step of the first batch.

    >>> import numpy as np
    >>> from lbopt.data import ArrayDataset
    >>> dataset = ArrayDataset({"x": np.arange(6)})
    >>> batches = TrainBatches(dataset, seed=0, global_batch_size=3, num_steps=4)
    >>> len(list(train_iterator(batches, start_step=1)))
    3
    """
    return read_batches(batches, start_step)


class EvalBatches:
    """Every example exactly once, in order, in batches of one shape.

    A process has its shards of each batch. A batch has the data set's arrays and `mask` [part_size]
    bool: False on padding, which repeats the last example, and on damaged records.

    Args:
      dataset: Data set of any size.
      global_batch_size: Examples of a batch over all processes, >= 1. It is cut to the size of the
        data set, and then rounded up to a multiple of `multiple_of`.
      multiple_of: Number of devices that share a batch; each has an equal contiguous shard.
      parts: Indices of this process's shards; None for all.

    Raises:
      UserError: If the batch size is below 1.

    >>> import numpy as np
    >>> from lbopt.data import ArrayDataset
    >>> batches = EvalBatches(ArrayDataset({"x": np.arange(5)}), global_batch_size=3)
    >>> len(batches), batches.slice(1, 0, 3)
    (2, {'x': array([3, 4, 4]), 'mask': array([ True,  True, False])})
    """

    def __init__(
        self,
        dataset: Dataset,
        global_batch_size: int,
        multiple_of: int = 1,
        parts: Sequence[int] | None = None,
    ):
        fix = "give a number >= 1"
        require(global_batch_size >= 1, "global_batch_size", global_batch_size, fix)
        self.dataset = dataset
        self._size = -(-min(global_batch_size, len(dataset)) // multiple_of) * multiple_of
        self._rows = rows_of(parts, multiple_of, self._size)
        self.part_size = len(self._rows)

    def __len__(self) -> int:
        return -(-len(self.dataset) // self._size)

    def slice(self, number: int, start: int, stop: int) -> Batch:
        """Return examples [start, stop) of this process's shards of batch `number`."""
        positions = number * self._size + self._rows[start:stop]
        batch = self.dataset.take(np.minimum(positions, len(self.dataset) - 1))
        return {**batch, "mask": (positions < len(self.dataset)) & batch.get("mask", True)}


def eval_batches(
    dataset: Dataset,
    global_batch_size: int,
    multiple_of: int = 1,
    parts: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """Return the batches of `EvalBatches`, read ahead.

    Args:
      dataset: Data set of any size.
      global_batch_size: Examples of a batch over all processes, >= 1.
      multiple_of: Number of devices that share a batch.
      parts: Indices of this process's shards; None for all.

    >>> import numpy as np
    >>> from lbopt.data import ArrayDataset
    >>> [batch["mask"].tolist() for batch in eval_batches(ArrayDataset({"x": np.arange(5)}), 3)]
    [[True, True, True], [True, True, False]]
    """
    return read_batches(EvalBatches(dataset, global_batch_size, multiple_of, parts))


def read_batches(batches: Batches, start: int = 0) -> Iterator[Batch]:
    """Yield batches from number `start` on, while Grain reads the slices of the next ones.

    Memory is bounded. Beside the batch that is being joined, one more batch or four slices for each
    thread are held, whichever is larger. Reading processes share that number; each has a few slices
    more in its threads and on the way to this process.

    Args:
      batches: `TrainBatches`, `EvalBatches` or another object with their methods.
      start: Number of the first batch.

    >>> import numpy as np
    >>> from lbopt.data import ArrayDataset
    >>> batches = EvalBatches(ArrayDataset({"x": np.arange(5)}), global_batch_size=3)
    >>> [batch["x"].tolist() for batch in read_batches(batches)]
    [[0, 1, 2], [3, 4, 4]]
    """
    reading = batches.dataset.reading
    edges = [*range(0, batches.part_size, reading.examples_per_slice), batches.part_size]
    slices = _Slices(batches, list(itertools.pairwise(edges)))

    # At least one whole batch, and enough slices to keep all threads busy at its end.
    slices_ahead = max(len(slices.bounds), _LEAST_SLICES * reading.threads)
    per_process = max(reading.threads, slices_ahead // max(reading.processes, 1))
    options = grain.ReadOptions(num_threads=reading.threads, prefetch_buffer_size=per_process)
    source = grain.MapDataset.source(slices)[start * len(slices.bounds) :].to_iter_dataset(options)

    if reading.processes:
        _let_grain_read_its_flags()
        workers = grain.MultiprocessingOptions(reading.processes, per_worker_buffer_size=1)
        source = source.mp_prefetch(workers, worker_init_fn=_start_worker)

    iterator = iter(source)
    for _ in range(start, len(batches)):
        yield _joined((next(iterator) for _ in slices.bounds), batches.part_size, batches.dataset)


def _let_grain_read_its_flags() -> None:
    """Mark Grain's absl flags as read, for a program that parses none. Others stay unparsed."""
    if not flags.FLAGS.is_parsed():
        for name in flags.FLAGS:
            if name.startswith("grain_"):
                flags.FLAGS[name].present = True


class _Slices:
    """The slices of all batches, numbered, as a data source of Grain.

    Args:
      batches: Batches that are cut.
      bounds: (start, stop) of each slice of a batch, in examples.
    """

    def __init__(self, batches: Batches, bounds: Sequence[tuple[int, int]]):
        self._batches = batches
        self.bounds = bounds

    def __len__(self) -> int:
        return len(self._batches) * len(self.bounds)

    def __getitem__(self, number: Any) -> Batch:
        batch, index = divmod(int(number), len(self.bounds))
        return self._batches.slice(batch, *self.bounds[index])


def _start_worker(index: int, count: int) -> None:
    """Make a reading process outlive SIGTERM, and end with the training process.

    On SIGTERM the training process saves its state and ends by itself.
    """
    del index, count
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="lbopt parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)  # `sys.exit` would end this thread alone


def _joined(slices: Iterable[Batch], size: int, dataset: Dataset) -> Batch:
    """Return a batch of `size` examples joined from slices, and count their damaged records.

    Each slice is copied as it arrives and then released, so at most one is held twice.
    """
    count: DamagedCount | None = getattr(dataset, "damaged", None)
    batch: Batch = {}
    filled = 0
    for arrays in slices:
        for index, reason in arrays.pop(DAMAGED, ()):
            if count is not None:
                count.add(index, reason)

        stop = filled + len(next(iter(arrays.values())))
        if stop - filled == size:
            return arrays  # the whole batch: nothing to copy

        if not batch:
            batch = {
                name: np.empty((size, *array.shape[1:]), array.dtype)
                for name, array in arrays.items()
            }
        for name, array in arrays.items():
            batch[name][filled:stop] = array
        filled = stop
    return batch
