"""A data set that fits in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class ArrayDataset:
    """Named arrays with a common leading axis.

    Args:
      arrays: name -> [examples, ...].

    Raises:
      ValueError: if there is no example, or if the arrays differ in length.
    """

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


class Splits(NamedTuple):
    """The three parts of a data set. Choices are made on validation; test is read once, at the end."""

    train: ArrayDataset
    validation: ArrayDataset
    test: ArrayDataset
