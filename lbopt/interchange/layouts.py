"""How one array lies here and how it lies in PyTorch."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np

_Length = TypeVar("_Length", bound=int)


class Layout(NamedTuple):
    """An order of axes, and its inverse; arrays are turned as views.

    Attributes:
      axes: our axes in PyTorch's order; None for the same order.
      ones: axes of length 1 that PyTorch's array has at its end.
    """

    axes: tuple[int, ...] | None = None
    ones: int = 0

    def to_theirs(self, x: np.ndarray) -> np.ndarray:
        """Turn our array into PyTorch's."""
        x = x if self.axes is None else x.transpose(self.axes)
        return x.reshape(x.shape + (1,) * self.ones)

    def to_ours(self, x: np.ndarray) -> np.ndarray:
        """Turn PyTorch's array into ours."""
        x = x.reshape(x.shape[: x.ndim - self.ones])
        return x if self.axes is None else x.transpose(np.argsort(self.axes))

    def their_shape(self, shape: tuple[_Length, ...]) -> tuple[_Length | int, ...]:
        """Return the shape in PyTorch of our array of a shape, which may be too large to exist.

        >>> CONV.their_shape((3, 3, 16, 32))
        (32, 16, 3, 3)
        """
        return (*(shape[axis] for axis in self.axes or range(len(shape))), *(1,) * self.ones)


SAME = Layout()
"""Vectors, embeddings, and matrices that lie here as there."""

DENSE = Layout((1, 0))
"""[in, out] <-> [out, in]."""

CONV = Layout((3, 2, 0, 1))
"""[height, width, in, out] <-> [out, in, height, width]; depthwise kernels have in = 1."""

DENSE_AS_CONV = Layout((1, 0), ones=2)
"""[in, out] <-> [out, in, 1, 1]: a dense layer that PyTorch's network writes as a 1 x 1 convolution."""
