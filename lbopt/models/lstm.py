"""An LSTM that reads an image row by row."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class LSTMClassifier(nn.Module):
    """One LSTM layer over the rows of an image; the last state is classified.

    The form of LEGW's MNIST-LSTM (arXiv 1901.08256): each row is a time step. Flax's cell and initialisation
    (LeCun-normal input kernels, orthogonal recurrent kernels, zero biases).

    Attributes:
      num_classes: size of the output.
      hidden: width of the LSTM.
      dtype: of the computation; parameters are fp32.
    """

    num_classes: int = 10
    hidden: int = 64
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Map [batch, rows, columns] to fp32 logits [batch, num_classes]."""
        del train
        rows = images.astype(self.dtype).reshape(images.shape[0], images.shape[1], -1)
        cell = nn.OptimizedLSTMCell(self.hidden, dtype=self.dtype)
        states = nn.RNN(cell, unroll=rows.shape[1])(rows)
        return nn.Dense(self.num_classes, dtype=self.dtype)(states[:, -1]).astype(jnp.float32)
