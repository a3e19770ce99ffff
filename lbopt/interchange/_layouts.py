"""The axes of an array in lbopt and in PyTorch."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np

_Length = TypeVar("_Length", bound=int)


class Layout(NamedTuple):
    """A transposition between lbopt's and PyTorch's order of axes; it returns views.

    Attributes:
      axes: Lbopt's axes in PyTorch's order; None for the same order.
      ones: Number of axes of length 1 at the end of PyTorch's array.
    """

    axes: tuple[int, ...] | None = None
    ones: int = 0

    def to_theirs(self, x: np.ndarray) -> np.ndarray:
        """Return lbopt's array in PyTorch's layout."""
        x = x if self.axes is None else x.transpose(self.axes)
        return x.reshape(x.shape + (1,) * self.ones)

    def to_ours(self, x: np.ndarray) -> np.ndarray:
        """Return PyTorch's array in lbopt's layout."""
        x = x.reshape(x.shape[: x.ndim - self.ones])
        return x if self.axes is None else x.transpose(np.argsort(self.axes))

    def their_shape(self, shape: tuple[_Length, ...]) -> tuple[_Length | int, ...]:
        """Return the shape in PyTorch of an array of this shape in lbopt; no array is allocated.

        >>> CONV.their_shape((3, 3, 16, 32))
        (32, 16, 3, 3)
        """
        return (*(shape[axis] for axis in self.axes or range(len(shape))), *(1,) * self.ones)


SAME = Layout()
"""Vectors, embeddings, and matrices with the same order of axes in both."""

DENSE = Layout((1, 0))
"""[in, out] <-> [out, in]."""

CONV = Layout((3, 2, 0, 1))
"""[height, width, in, out] <-> [out, in, height, width]; depthwise kernels have in = 1."""

DENSE_AS_CONV = Layout((1, 0), ones=2)
"""[in, out] <-> [out, in, 1, 1]: a dense layer that is a 1 x 1 convolution in PyTorch."""
