"""Which example comes when: a pure function of (seed, position)."""

from __future__ import annotations

import functools

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
    first, last = start // num_examples, (start + count - 1) // num_examples
    stream = np.concatenate([_permutation(num_examples, seed, epoch) for epoch in range(first, last + 1)])
    offset = start - first * num_examples
    return stream[offset : offset + count]


@functools.lru_cache(maxsize=4)
def _permutation(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """Sort counter-based random words: NumPy guarantees the raw stream of a bit generator, not its `permutation`."""
    words = np.random.Philox(key=[seed, epoch]).random_raw(num_examples)
    return np.argsort(words, kind="stable")
