"""The order of examples: a pure function of (seed, position)."""

from __future__ import annotations

import functools
import threading

import numpy as np


def example_indices(num_examples: int, seed: int, start: int, count: int) -> np.ndarray:
    """Return the indices of the examples at stream positions [start, start + count).

    The stream is a sequence of fresh permutations of the data set, so every example comes once in
    an epoch, and a batch may span the end of one. Step s of a run with global batch B takes the
    positions [s B, (s + 1) B). The global batch thus depends on (seed, step, B) only, never on
    devices or processes, and runs that differ in B alone see the same stream.

    Args:
      num_examples: Size of the data set.
      seed: Seed of the shuffle, >= 0.
      start: First position.
      count: Number of positions.

    Returns:
      [count] int64.

    >>> sorted(example_indices(5, seed=0, start=5, count=5).tolist())
    [0, 1, 2, 3, 4]
    """
    return examples_at(num_examples, seed, np.arange(start, start + count))


def examples_at(num_examples: int, seed: int, positions: np.ndarray) -> np.ndarray:
    """Return the indices of the examples at any positions of the stream of `example_indices`.

    Args:
      num_examples: Size of the data set.
      seed: Seed of the shuffle, >= 0.
      positions: [count] int64, in any order.

    Returns:
      [count] int64.
    """
    epochs, places = np.divmod(positions, num_examples)
    indices = np.empty(len(positions), np.int64)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        indices[in_epoch] = _permutation(num_examples, seed, int(epoch))[places[in_epoch]]
    return indices


_PERMUTATION_LOCK = threading.Lock()


def _permutation(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """Return the permutation of an epoch, made once for all threads that read ahead."""
    with _PERMUTATION_LOCK:
        return _cached_permutation(num_examples, seed, epoch)


@functools.lru_cache(maxsize=2)  # a batch may span two epochs
def _cached_permutation(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    # NumPy guarantees the raw words of a bit generator, not the result of `permutation`.
    words = np.random.Philox(key=[seed, epoch]).random_raw(num_examples)
    return np.argsort(words, kind="stable")
