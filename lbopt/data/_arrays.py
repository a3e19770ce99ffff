"""The protocol of a data set, and data sets that fit in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from lbopt.errors import require


class Reading(NamedTuple):
    """Settings for reading the batches of a data set.

    Attributes:
      threads: Number of reading threads in each process.
      processes: Number of reading processes beside the training process; 0 to read in it.
      examples_per_slice: Number of consecutive examples of a batch that a thread reads at a time.
      in_order: Whether training reads the examples in order, epoch after epoch, not shuffled.

    >>> import numpy as np
    >>> dataset = ArrayDataset({"x": np.arange(10)})
    >>> dataset.reading = Reading(threads=4, in_order=True)
    >>> dataset.reading.examples_per_slice
    4096
    """

    threads: int = 2
    processes: int = 0
    examples_per_slice: int = 4096
    in_order: bool = False


class Dataset(Protocol):
    """Numbered examples. Both methods are pure functions, so a batch depends on its step alone.

    All batches have the names, dtypes and shapes of an example of `take(np.arange(1))`: a model is
    built for those. One that a function of the user returns needs `__len__` and `take` alone.
    A batch may have `mask`, False for examples that evaluation leaves out, and a list of damaged
    records under `lbopt.data.DAMAGED`.

    >>> import numpy as np
    >>> class Squares:
    ...     def __len__(self):
    ...         return 100
    ...     def take(self, indices):
    ...         return {"x": indices.astype(np.float32), "target": indices.astype(np.float32) ** 2}
    >>> Squares().take(np.arange(3))["target"]
    array([0., 1., 4.], dtype=float32)
    """

    reading: Reading

    def __len__(self) -> int: ...

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the examples at `indices` as one batch for evaluation, the same every time."""

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return the examples at `indices` as one batch, cropped, masked or flipped for training.

        Args:
          indices: [examples] int, the numbers of the examples.
          epochs: [examples] int, the epoch in which training sees each.
          seed: Seed of the run.
        """


class ArrayDataset:
    """Named arrays with a common leading axis. Every epoch sees the same examples.

    Args:
      arrays: Name -> [examples, ...].

    Raises:
      UserError: If there is no example, or if the arrays differ in length.

    >>> import numpy as np
    >>> dataset = ArrayDataset({"x": np.arange(10), "label": np.arange(10) % 2})
    >>> len(dataset), dataset.take(np.array([3, 4]))
    (10, {'x': array([3, 4]), 'label': array([1, 0])})
    """

    reading = Reading()
    same_in_every_epoch = True
    """Whether `draw` is `take`; False in subclasses that augment."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        lengths = {name: len(array) for name, array in arrays.items()}
        equal = len(set(lengths.values())) == 1
        fix = "these are lengths; give arrays of one length, with at least one example"
        require(equal and min(lengths.values()) >= 1, "arrays", lengths, fix)
        self.arrays = dict(arrays)

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the examples at `indices` as one batch."""
        return {name: array[indices] for name, array in self.arrays.items()}

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return the examples at `indices` as one batch, the same in every epoch."""
        del epochs, seed
        return self.take(indices)


class Splits(NamedTuple):
    """Training, validation and test set.

    Choices are made on the validation set. The test set is read once, at the end.

    Attributes:
      train: Training set.
      validation: Validation set.
      test: Test set.

    >>> import numpy as np
    >>> parts = ({"x": np.arange(n), "label": np.arange(n) % 2} for n in (80, 10, 10))
    >>> splits = Splits(*map(ArrayDataset, parts))
    >>> len(splits.train), len(splits.test)
    (80, 10)
    """

    train: Dataset
    validation: Dataset
    test: Dataset
