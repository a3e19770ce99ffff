"""A small convolutional classifier with batch normalization."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lbopt.models import conv, norm
from lbopt.models.head import Head


class CNN(nn.Module):
    """Convolution, batch norm, ReLU and 2 x 2 max pooling per stage, then one hidden layer.

    Maxima are taken of the convolution itself and normalized then, see `lbopt.BatchNorm`: a quarter of the work.

    Initialised with He-normal kernels, a LeCun-normal head and zero biases.

    Attributes:
      num_classes: size of the output.
      widths: channels of each stage; every stage halves the image.
      hidden: width of the hidden layer.
      batch_norm_scope: see `lbopt.BatchNorm`.
      batch_norm_momentum: of the running statistics.
      dtype: of the computation; parameters and statistics are fp32.
      by_patches: see `PatchConv`.
    """

    num_classes: int = 10
    widths: Sequence[int] = (16, 32)
    hidden: int = 64
    batch_norm_scope: str = "global"
    batch_norm_momentum: float = 0.9
    dtype: Any = jnp.float32
    by_patches: bool = True

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Map [batch, height, width] or [batch, height, width, channels] to fp32 logits [batch, num_classes]."""
        x = images.astype(self.dtype)
        x = x[..., None] if x.ndim == 3 else x
        for width in self.widths:
            batch_norm = norm.BatchNorm(self.batch_norm_scope, self.batch_norm_momentum)
            x = conv.PatchConv(width, dtype=self.dtype, by_patches=self.by_patches)(x, batch_norm.sign())
            x = nn.relu(batch_norm(x, use_running_average=not train, then=_max_pool))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(self.hidden, dtype=self.dtype, kernel_init=nn.initializers.he_normal())(x))
        return Head(self.num_classes, name="Dense_1")(x)


@jax.custom_vjp
def _max_pool(x: jax.Array) -> jax.Array:
    """Take the maximum over 2 x 2 tiles of `x` [batch, height, width, channels].

    Its gradient is shared evenly by the elements that have the maximum, as that of `jnp.max` is. They are found by
    comparing, so `x` should be the result of a convolution: what is cheap, a compiler may compute twice and round in two
    ways, and then no element has the maximum and none a gradient.
    """
    height, width = x.shape[1:3]
    if height % 2 or width % 2:
        raise ValueError(
            f"widths: a {height} x {width} image cannot be halved again: use fewer stages or a larger image"
        )
    return functools.reduce(jnp.maximum, _corners(x))


def _corners(x: jax.Array) -> list[jax.Array]:
    """Return the four elements of every tile: comparing slices is faster than a reduction, also under scan and vmap."""
    return [x[:, row::2, column::2] for row in range(2) for column in range(2)]


def _tiles(x: jax.Array) -> jax.Array:
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels)


def _max_pool_forward(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    pooled = _max_pool(x)
    return pooled, (x, pooled)


def _max_pool_backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array]:
    x, pooled = kept
    sharers = sum((corner == pooled).astype(gradient.dtype) for corner in _corners(x))
    share = gradient / sharers
    has_it = _tiles(x) == pooled[:, :, None, :, None]
    return (jnp.where(has_it, share[:, :, None, :, None], 0).reshape(x.shape),)


_max_pool.defvjp(_max_pool_forward, _max_pool_backward)
