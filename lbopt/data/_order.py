"""Which example comes when: a pure function of (seed, position)."""

from __future__ import annotations

import functools
import threading

import numpy as np


def example_indices(num_examples: int, seed: int, start: int, count: int) -> np.ndarray:
    """Return the indices of the examples at stream positions [start, start + count).

    The stream is one fresh permutation of the data set after another, so every example comes once an epoch and batches
    run on across epoch ends. Step s of a run with global batch B takes the positions [s B, (s + 1) B): the global batch
    depends on (seed, step, B) only, never on devices or processes, and runs that differ in B alone see the same stream.

    Args:
      num_examples: size of the data set.
      seed: of the shuffle, >= 0.
      start: first position.
      count: how many.

    Returns:
      [count] int64.

    >>> sorted(example_indices(5, seed=0, start=5, count=5).tolist())
    [0, 1, 2, 3, 4]
    """
    return examples_at(num_examples, seed, np.arange(start, start + count))


def examples_at(num_examples: int, seed: int, positions: np.ndarray) -> np.ndarray:
    """Return the indices of the examples at any positions of the stream of `example_indices`.

    Args:
      num_examples: size of the data set.
      seed: of the shuffle, >= 0.
      positions: [count] int64.

    Returns:
      [count] int64.
    """
    epochs, places = np.divmod(positions, num_examples)
    indices = np.empty(len(positions), np.int64)
    for epoch in np.unique(epochs):
        there = epochs == epoch
        indices[there] = _permutation(num_examples, seed, int(epoch))[places[there]]
    return indices


_MAKING = threading.Lock()


def _permutation(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """Sort counter-based random words: NumPy guarantees the raw stream of a bit generator, not its `permutation`.

    Threads that read ahead ask for one epoch at the same time; the first makes it, the others wait.
    """
    with _MAKING:
        return _sorted(num_examples, seed, epoch)


@functools.lru_cache(maxsize=2)
def _sorted(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    words = np.random.Philox(key=[seed, epoch]).random_raw(num_examples)
    return np.argsort(words, kind="stable")
