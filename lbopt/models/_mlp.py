"""A multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lbopt.models._head import Head


class MLP(nn.Module):
    """Dense layers with ReLU, then the logits; the smallest network for a study.

    Kernels are He-normal (arXiv 1502.01852v1), the head is LeCun-normal and biases are zero.

    Attributes:
      num_classes: Size of the output.
      widths: Widths of the hidden layers.
      dtype: Dtype of the computation; parameters are fp32.

    >>> import jax, jax.numpy as jnp
    >>> images = jnp.zeros((2, 8, 8))
    >>> logits, variables = jax.eval_shape(
    ...     lambda: MLP(10, widths=(64,)).init_with_output(jax.random.key(0), images, train=False)
    ... )
    >>> logits.shape, sorted(variables["params"])
    ((2, 10), ['Dense_0', 'head'])
    """

    num_classes: int = 10
    widths: Sequence[int] = (128,)
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Map [batch, ...] to fp32 logits [batch, num_classes].

        Args:
          images: [batch, ...] of any dtype; all axes but the first are flattened.
          train: Ignored.
        """
        del train
        x = images.astype(self.dtype).reshape(images.shape[0], -1)
        for width in self.widths:
            x = nn.relu(
                nn.Dense(width, dtype=self.dtype, kernel_init=nn.initializers.he_normal())(x)
            )
        return Head(self.num_classes, name="head")(x)
