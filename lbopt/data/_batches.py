"""Global batches for training, padded and masked ones for evaluation, each read ahead in pieces."""

from __future__ import annotations

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

Batch = dict[str, np.ndarray]
_LEAST_PIECES = 4
"""Pieces for each thread that are read ahead, at least."""


class Batches(Protocol):
    """Random access to this process's parts of numbered global batches.

    Attributes:
      dataset: what they are made of.
      part_size: examples of a batch that are this process's.
    """

    dataset: Dataset
    part_size: int

    def __len__(self) -> int: ...

    def piece(self, number: int, start: int, stop: int) -> Batch:
        """Return examples [start, stop) of this process's part of a batch."""


def rows_of(parts: Sequence[int] | None, num_parts: int, global_batch_size: int) -> np.ndarray:
    """Return which rows of a global batch a process reads, if it is cut into equal contiguous parts, one for each device.

    Args:
      parts: the process's, in the order in which its rows are wanted; None for all.
      num_parts: how many there are; it divides the batch.
      global_batch_size: rows.

    Returns:
      [rows] int64.

    >>> rows_of([0, 2], 4, 8).tolist()
    [0, 1, 4, 5]
    """
    rows = np.arange(global_batch_size).reshape(num_parts, -1)
    return (rows if parts is None else rows[list(parts)]).ravel()


class TrainBatches:
    """Random access to the batches of a run: item s is this process's part of the global batch of step s.

    Args:
      dataset: the training set.
      seed: of the shuffle.
      global_batch_size: examples per step over all processes.
      num_steps: length of the run.
      num_parts: into how many equal contiguous parts a global batch is cut, one for each device.
      parts: which of them are this process's; None for all.
      first_example: where in the stream of examples step 0 begins.
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
        if global_batch_size % num_parts:
            raise ValueError(
                f"global_batch_size = {global_batch_size}: {num_parts} devices do not divide it"
            )
        self.dataset, self._seed, self._num_steps = dataset, seed, num_steps
        self._global_batch_size, self._first_example = global_batch_size, first_example
        self._rows = rows_of(parts, num_parts, global_batch_size)
        self.part_size = len(self._rows)

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> Batch:
        return _joined([self.piece(int(step), 0, self.part_size)], self.part_size, self.dataset)

    def piece(self, number: int, start: int, stop: int) -> Batch:
        """Return examples [start, stop) of this process's part of the batch of a step."""
        positions = self._first_example + number * self._global_batch_size + self._rows[start:stop]
        epochs, indices = np.divmod(positions, len(self.dataset))
        if not self.dataset.reading.in_order:
            indices = examples_at(len(self.dataset), self._seed, positions)
        return self.dataset.draw(indices, epochs, self._seed)


def train_iterator(batches: TrainBatches, start_step: int = 0) -> Iterator[Batch]:
    """Iterate from a step to the end of the run, reading ahead.

    A batch is a function of its step, so the step in the checkpoint is the whole data position.
    """
    return read_batches(batches, start_step)


class EvalBatches:
    """Every example exactly once, in order, in batches of one shape; this process's part of each.

    A batch has the data set's arrays and `mask` [part] bool, False on padding (which repeats the last example) and where
    the data set says so.

    Args:
      dataset: of any size.
      global_batch_size: of any size; cut to the data set's and rounded up to a multiple of `multiple_of`.
      multiple_of: the number of devices that share a batch, each an equal contiguous part.
      parts: which of these parts are this process's; None for all.
    """

    def __init__(
        self,
        dataset: Dataset,
        global_batch_size: int,
        multiple_of: int = 1,
        parts: Sequence[int] | None = None,
    ):
        if global_batch_size < 1:
            raise ValueError(f"global_batch_size = {global_batch_size}: give a number >= 1")
        self.dataset = dataset
        self._size = -(-min(global_batch_size, len(dataset)) // multiple_of) * multiple_of
        self._rows = rows_of(parts, multiple_of, self._size)
        self.part_size = len(self._rows)

    def __len__(self) -> int:
        return -(-len(self.dataset) // self._size)

    def piece(self, number: int, start: int, stop: int) -> Batch:
        """Return examples [start, stop) of this process's part of a batch."""
        positions = number * self._size + self._rows[start:stop]
        batch = self.dataset.take(np.minimum(positions, len(self.dataset) - 1))
        return {**batch, "mask": (positions < len(self.dataset)) & batch.get("mask", True)}


def eval_batches(
    dataset: Dataset,
    global_batch_size: int,
    multiple_of: int = 1,
    parts: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """Iterate over `EvalBatches`, reading ahead."""
    return read_batches(EvalBatches(dataset, global_batch_size, multiple_of, parts))


def read_batches(batches: Batches, start: int = 0) -> Iterator[Batch]:
    """Yield batches from number `start` on, with Grain's threads or processes at work on the pieces of the next ones.

    What is held is bounded: the batch that is being put together, and ahead of it one more or four pieces for each thread,
    whichever is larger. Processes share that among them; each has some pieces more in its threads and on the way here.
    """
    reading = batches.dataset.reading
    edges = [*range(0, batches.part_size, reading.examples_per_piece), batches.part_size]
    pieces = _Pieces(batches, list(itertools.pairwise(edges)))
    ahead = max(len(pieces.bounds), _LEAST_PIECES * reading.threads)
    each = max(reading.threads, ahead // max(reading.processes, 1))
    options = grain.ReadOptions(num_threads=reading.threads, prefetch_buffer_size=each)
    source = grain.MapDataset.source(pieces)[start * len(pieces.bounds) :].to_iter_dataset(options)
    if reading.processes:
        _let_grain_read_its_flags()
        workers = grain.MultiprocessingOptions(reading.processes, per_worker_buffer_size=1)
        source = source.mp_prefetch(workers, worker_init_fn=_in_a_worker)
    iterator = iter(source)
    for _ in range(start, len(batches)):
        yield _joined((next(iterator) for _ in pieces.bounds), batches.part_size, batches.dataset)


def _let_grain_read_its_flags() -> None:
    """Let Grain read its absl flags in a program that parses no flags; all other flags stay unparsed."""
    if not flags.FLAGS.is_parsed():
        for name in flags.FLAGS:
            if name.startswith("grain_"):
                flags.FLAGS[name].present = True


class _Pieces:
    """The pieces of all batches, numbered: what Grain reads."""

    def __init__(self, batches: Batches, bounds: Sequence[tuple[int, int]]):
        self._batches, self.bounds = batches, bounds

    def __len__(self) -> int:
        return len(self._batches) * len(self.bounds)

    def __getitem__(self, number: Any) -> Batch:
        batch, piece = divmod(int(number), len(self.bounds))
        return self._batches.piece(batch, *self.bounds[piece])


def _in_a_worker(index: int, count: int) -> None:
    """Leave it to the training process to end on SIGTERM, it has a state to save; and end when that has been killed."""
    del index, count
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="lbopt parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)


def _joined(pieces: Iterable[Batch], size: int, dataset: Dataset) -> Batch:
    """Put pieces of `size` examples together as they come, and count the records that were found damaged in them.

    A piece is let go as soon as it is copied, so of the batch that is being put together no more than one is held twice.
    """
    count: DamagedCount | None = getattr(dataset, "damaged", None)
    batch: Batch = {}
    filled = 0
    for piece in pieces:
        for index, reason in piece.pop(DAMAGED, ()):
            if count is not None:
                count.add(index, reason)
        stop = filled + len(next(iter(piece.values())))
        if stop - filled == size:
            return piece
        if not batch:
            batch = {
                name: np.empty((size, *array.shape[1:]), array.dtype)
                for name, array in piece.items()
            }
        for name, array in piece.items():
            batch[name][filled:stop] = array
        filled = stop
    return batch
