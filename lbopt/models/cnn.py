"""A small convolutional classifier with batch normalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lbopt.models import conv, norm
from lbopt.models.head import Head


class CNN(nn.Module):
    """Convolution, batch norm, ReLU and 2 x 2 max pooling per stage, then one hidden layer.

    Initialised with He-normal kernels, a LeCun-normal head and zero biases.

    Attributes:
      num_classes: size of the output.
      widths: channels of each stage; every stage halves the image.
      hidden: width of the hidden layer.
      batch_norm_scope: see `lbopt.BatchNorm`.
      batch_norm_momentum: of the running statistics.
      dtype: of the computation; parameters and statistics are fp32.
    """

    num_classes: int = 10
    widths: Sequence[int] = (16, 32)
    hidden: int = 64
    batch_norm_scope: str = "global"
    batch_norm_momentum: float = 0.9
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Map [batch, height, width] or [batch, height, width, channels] to fp32 logits [batch, num_classes]."""
        x = images.astype(self.dtype)
        x = x[..., None] if x.ndim == 3 else x
        for width in self.widths:
            x = conv.PatchConv(width, dtype=self.dtype)(x)
            x = norm.BatchNorm(self.batch_norm_scope, self.batch_norm_momentum)(x, use_running_average=not train)
            x = _max_pool(nn.relu(x))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(self.hidden, dtype=self.dtype, kernel_init=nn.initializers.he_normal())(x))
        return Head(self.num_classes, name="Dense_1")(x)


@jax.custom_vjp
def _max_pool(x: jax.Array) -> jax.Array:
    """Take the maximum over 2 x 2 tiles by a reshape, which stays fast under scan and vmap.

    Its gradient is shared evenly by the elements that have the maximum, as that of `jnp.max` is; but where a compiler that
    computes the input twice rounds it in two ways, so that no element has it, there is none, and not 0 / 0.
    """
    return _tiles(x).max(axis=(2, 4))


def _tiles(x: jax.Array) -> jax.Array:
    batch, height, width, channels = x.shape
    if height % 2 or width % 2:
        raise ValueError(
            f"widths: a {height} x {width} image cannot be halved again: use fewer stages or a larger image"
        )
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels)


def _max_pool_forward(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    pooled = _max_pool(x)
    return pooled, (x, pooled)


def _max_pool_backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array]:
    x, pooled = kept
    has_it = (_tiles(x) == pooled[:, :, None, :, None]).astype(gradient.dtype)
    shared = gradient / jnp.maximum(has_it.sum(axis=(2, 4)), 1)
    return ((shared[:, :, None, :, None] * has_it).reshape(x.shape),)


_max_pool.defvjp(_max_pool_forward, _max_pool_backward)
