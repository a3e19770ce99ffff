"""Arrays on disk, joined without a copy, and columns that are not arrays of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class JoinedArrays:
    """Arrays joined along their leading axis, which are read where they lie.

    It has what `load_arrays` needs of an array: dtype, shape, and indexing of examples.

    Args:
      parts: Arrays [examples, ...] of one dtype and one shape of an example.
    """

    def __init__(self, parts: Sequence[np.ndarray]):
        self._parts = tuple(parts)
        self._starts = np.cumsum([0, *(len(part) for part in parts)])
        self.dtype = parts[0].dtype
        self.shape = (int(self._starts[-1]), *parts[0].shape[1:])
        self.ndim = len(self.shape)
        self.size = int(np.prod(self.shape))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Return the example at a number, or a new array of those at several, or of a mask."""
        if isinstance(index, slice):
            index = np.arange(*index.indices(len(self)))
        rows = np.asarray(index)
        if rows.dtype == bool:
            rows = np.flatnonzero(rows)
        if not rows.ndim:
            return self[rows[None]][0]

        # The rows of each part together: there may be thousands of parts.
        part_of = np.searchsorted(self._starts, rows, "right") - 1
        order = np.argsort(part_of, kind="stable")
        numbers, starts = np.unique(part_of[order], return_index=True)
        found = np.empty((len(rows), *self.shape[1:]), self.dtype)
        for number, places in zip(numbers, np.split(order, starts[1:]), strict=True):
            found[places] = self._parts[number][rows[places] - self._starts[number]]
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the whole as an array in memory."""
        del copy
        return np.concatenate(self._parts).astype(self.dtype if dtype is None else dtype)


class OtherColumn:
    """A column that is no array of numbers, and is refused where one is needed.

    Args:
      what: Description of its values, for errors.
      length: Number of examples.
    """

    dtype = np.dtype(object)
    ndim = 1

    def __init__(self, what: str, length: int):
        self.what = what
        self.shape = (length,)

    def __len__(self) -> int:
        return self.shape[0]


class TextColumn(OtherColumn):
    """A column of text, which is read into memory if it is needed.

    Args:
      values: Texts, as pyarrow holds them.
    """

    dtype = np.dtype(str)

    def __init__(self, values: Any):
        super().__init__("text", len(values))
        self._values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the texts as an array in memory."""
        del dtype, copy
        return np.asarray(self._values.to_pylist(), str)
