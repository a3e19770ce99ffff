"""Small convolutions, by default as patch matmuls."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lbopt.models import _pool


class PatchConv(nn.Module):
    """A stride-1, same-padded convolution, computed as patches times a matrix.

    Equal to `flax.linen.Conv` with the same parameters. Sweeps run convolutions inside `lax.scan`
    and under `vmap`, where XLA's CPU convolution leaves its fast path and a matmul does not. Meant
    for small images, since it materialises size^2 copies of the input. On a TPU, where the compiler
    copies the patches, XLA's convolution is faster.

    With `max_pool`, a patch is what the four results of a tile of 2 x 2 depend on, and its product
    with a matrix gives all four. For a kernel of 5 x 5 that is 2.8 times less to copy, and 1.4
    times the multiplications, by the zeros of the matrix.

    Attributes:
      features: Output channels.
      size: Side of the square kernel; must be odd.
      dtype: Dtype of the computation; None for that of the input. The kernel
        [size, size, in, features] is fp32.
      by_patches: False uses XLA's convolution.
      use_bias: Whether a bias [features], zero at first, is added.
      kernel_init: Initializer of the kernel.
      max_pool: Whether the maximum over tiles of 2 x 2 is taken, before the bias, which then has
        fewer elements to be added to.
    """

    features: int
    size: int = 3
    dtype: Any = None
    by_patches: bool = True
    use_bias: bool = False
    kernel_init: nn.initializers.Initializer = nn.initializers.he_normal()
    max_pool: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, sign: jax.Array | float = 1.0) -> jax.Array:
        """Map `x` [batch, height, width, in] to [batch, height, width, features].

        With `max_pool` height and width are halved.

        Args:
          x: The input.
          sign: Factor of the output channels, a number or [features].
        """
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        kernel = kernel * (jax.lax.broadcast_to_rank(sign, kernel.ndim) if jnp.ndim(sign) else sign)
        dtype = self.dtype or x.dtype
        convolved = self._pooled if self.max_pool else self._convolved
        y = convolved(x.astype(dtype), kernel.astype(dtype))
        if self.use_bias:
            zeros = nn.initializers.zeros_init()
            bias = self.param("bias", zeros, (self.features,), jnp.float32).astype(dtype)
            y = y + jax.lax.broadcast_to_rank(bias, y.ndim)
        return y

    def _convolved(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        if not self.by_patches:
            return jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        return _product(_patches(x, self.size), kernel.reshape(-1, self.features))

    def _pooled(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        if not self.by_patches:
            return _pool.max_pool(self._convolved(x, kernel))
        tiles = _pool.tiles(x).swapaxes(2, 3)
        tiles = tiles.reshape(*tiles.shape[:3], -1)
        patches = _patches(tiles, 2 * _reach(self.size) + 1)
        corners = _product(patches, _matrix_of_tiles(kernel))
        return corners.reshape(*corners.shape[:3], 4, -1).max(-2)


def _reach(size: int) -> int:
    """Return how many tiles of 2 x 2 to each side a tile's results depend on."""
    return (size // 2 + 1) // 2


def _matrix_of_tiles(kernel: jax.Array) -> jax.Array:
    """Return the matrix from the elements of the tiles around a tile to its four results.

    Args:
      kernel: [size, size, in, features].

    Returns:
      [tiles * tiles * 4 * in, 4 * features]; rows and columns of tiles before those in a tile.
    """
    size = kernel.shape[0]
    tiles = 2 * _reach(size) + 1
    first = tiles - 1 - size // 2
    margins = [(first + place, 2 * tiles - size - first - place) for place in range(2)]
    corners = [
        jnp.pad(kernel, (rows, columns, (0, 0), (0, 0))) for rows in margins for columns in margins
    ]
    whole = jnp.stack(corners, -2).reshape(tiles, 2, tiles, 2, kernel.shape[2], -1)
    return whole.swapaxes(1, 2).reshape(tiles * tiles * 4 * kernel.shape[2], -1)


def _product(patches: jax.Array, matrix: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(patches, matrix, cpu=_flat_product, default=jnp.matmul)


def _flat_product(patches: jax.Array, matrix: jax.Array) -> jax.Array:
    """Multiply with all leading axes merged into one.

    With separate leading axes, XLA's CPU compiler transposes the gradient first. A TPU's compiler
    does better with separate axes.
    """
    return (patches.reshape(-1, patches.shape[-1]) @ matrix).reshape(
        *patches.shape[:-1], matrix.shape[-1]
    )


def _patches(x: jax.Array, size: int) -> jax.Array:
    """Return the patches [batch, height, width, size * size * channels], kernel rows slowest.

    Collecting one axis after the other takes 2 * size slices instead of size^2.
    """
    for axis in (2, 1):
        x = _neighbours(x, size, axis)
    return x


def _neighbours(x: jax.Array, size: int, axis: int) -> jax.Array:
    """Concatenate each pixel's `size` neighbours along an axis in the channels, zero-padded."""
    margins = [(size // 2, size // 2) if number == axis else (0, 0) for number in range(x.ndim)]
    padded = jnp.pad(x, margins)
    shifted = [
        jax.lax.slice_in_dim(padded, first, first + x.shape[axis], axis=axis)
        for first in range(size)
    ]
    # Without a barrier, XLA's CPU compiler computes what comes before once for each slice.
    return jax.lax.optimization_barrier(jnp.concatenate(shifted, axis=-1))
