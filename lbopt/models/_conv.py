"""Small convolutions, by default as patch matmuls."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class PatchConv(nn.Module):
    """A stride-1, same-padded, odd-sized convolution without bias, written as patches times a matrix.

    Equal to `flax.linen.Conv` with the same kernel. XLA's CPU convolution leaves its fast path inside `lax.scan` and
    under `vmap`, where a sweep puts it; a matmul does not. Meant for small images: it materialises size^2 copies of the
    input. A TPU's compiler copies the patches, so there XLA's convolution is the faster one. The product is written in one way for
    CPUs and in another for all else.

    Attributes:
      features: output channels.
      size: side of the square kernel, odd.
      dtype: of the computation; None for the input's. The kernel [size, size, in, features] is fp32.
      by_patches: False for XLA's convolution.
    """

    features: int
    size: int = 3
    dtype: Any = None
    by_patches: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, sign: jax.Array | float = 1.0) -> jax.Array:
        """Map [batch, height, width, in] to [batch, height, width, features], multiplied by `sign`, [features] or a number."""
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.he_normal(), shape, jnp.float32)
        kernel = kernel * (jax.lax.broadcast_to_rank(sign, kernel.ndim) if jnp.ndim(sign) else sign)
        dtype = self.dtype or x.dtype
        x, kernel = x.astype(dtype), kernel.astype(dtype)
        if not self.by_patches:
            return jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        patches, matrix = _patches(x, self.size), kernel.reshape(-1, self.features)
        return jax.lax.platform_dependent(patches, matrix, cpu=_flat_product, default=jnp.matmul)


def _flat_product(patches: jax.Array, matrix: jax.Array) -> jax.Array:
    """Multiply as one matrix: of a stack of them XLA's CPU compiler transposes the gradient first. A TPU's does better with the stack."""
    return (patches.reshape(-1, patches.shape[-1]) @ matrix).reshape(
        *patches.shape[:-1], matrix.shape[-1]
    )


def _patches(x: jax.Array, size: int) -> jax.Array:
    """Return [batch, height, width, size * size * channels], kernel rows slowest: 2 * size slices, not size^2."""
    for axis in (2, 1):
        x = _neighbours(x, size, axis)
    return x


def _neighbours(x: jax.Array, size: int, axis: int) -> jax.Array:
    """Put beside each other, in the channels, what lies within size // 2 along an axis; zeros beyond the edges."""
    margins = [(size // 2, size // 2) if number == axis else (0, 0) for number in range(x.ndim)]
    padded = jnp.pad(x, margins)
    shifted = [
        jax.lax.slice_in_dim(padded, first, first + x.shape[axis], axis=axis)
        for first in range(size)
    ]
    return jnp.concatenate(shifted, axis=-1)
