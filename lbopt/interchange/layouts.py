"""How one array lies here and how it lies in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Layout(NamedTuple):
    """A pair of functions that undo each other; both return views.

    Attributes:
      to_theirs: our array -> PyTorch's.
      to_ours: PyTorch's array -> ours.
    """

    to_theirs: Callable[[np.ndarray], np.ndarray]
    to_ours: Callable[[np.ndarray], np.ndarray]

    def their_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in PyTorch of our array of a shape.

        >>> CONV.their_shape((3, 3, 16, 32))
        (32, 16, 3, 3)
        """
        return self.to_theirs(np.broadcast_to(np.float32(0), shape)).shape


SAME = Layout(lambda x: x, lambda x: x)
"""Vectors, embeddings, and matrices that lie here as there."""

DENSE = Layout(lambda x: x.T, lambda x: x.T)
"""[in, out] <-> [out, in]."""

CONV = Layout(lambda x: x.transpose(3, 2, 0, 1), lambda x: x.transpose(2, 3, 1, 0))
"""[height, width, in, out] <-> [out, in, height, width]; depthwise kernels have in = 1."""

DENSE_AS_CONV = Layout(lambda x: x.T[:, :, None, None], lambda x: x[:, :, 0, 0].T)
"""[in, out] <-> [out, in, 1, 1]: a dense layer that PyTorch's network writes as a 1 x 1 convolution."""
