"""What a data set is, and one that fits in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np


class Reading(NamedTuple):
    """How a data set wants to be read.

    Attributes:
      threads: that read in each process.
      processes: that read, beside the training process; 0 for none.
      examples_per_piece: what one thread is given to do at a time.
      in_order: one example after another, pass after pass, instead of shuffled.
    """

    threads: int = 2
    processes: int = 0
    examples_per_piece: int = 4096
    in_order: bool = False


class Dataset(Protocol):
    """Numbered examples. Both methods are pure functions of their arguments, so a batch is one of its step.

    A batch may have `mask`, False for examples that evaluation leaves out, and, under `lbopt.data.DAMAGED`, what
    is to be counted.
    """

    reading: Reading

    def __len__(self) -> int: ...

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the examples at `indices` as one batch, the same every time: for evaluation."""

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return the examples at `indices` as one batch, each as training sees it in its epoch: cut, masked, flipped."""


class ArrayDataset:
    """Named arrays with a common leading axis; every epoch sees the same examples.

    Args:
      arrays: name -> [examples, ...].

    Raises:
      ValueError: if there is no example, or if the arrays differ in length.
    """

    reading = Reading()
    same_in_every_epoch = True
    """Whether `draw` is `take`: subclasses that draw anew say False."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) != 1 or min(lengths.values()) < 1:
            raise ValueError(
                f"arrays have lengths {lengths}: give at least one example, and equally many in each array"
            )
        self.arrays = dict(arrays)

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the examples at `indices` as one batch."""
        return {name: array[indices] for name, array in self.arrays.items()}

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return the examples at `indices` as one batch, whatever the epoch."""
        del epochs, seed
        return self.take(indices)


class Splits(NamedTuple):
    """The three parts of a data set. Choices are made on validation; test is read once, at the end."""

    train: Dataset
    validation: Dataset
    test: Dataset
