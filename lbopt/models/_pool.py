"""Max pooling over 2 x 2 tiles, by comparing slices."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from lbopt.errors import UserError


@jax.custom_vjp
def max_pool(x: jax.Array) -> jax.Array:
    """Take the maximum over 2 x 2 tiles of `x` [batch, height, width, channels].

    Elements that equal the maximum of their tile share its gradient evenly, as with `jnp.max`. They
    are found by comparison, so `x` should be the result of a convolution. A compiler may compute a
    cheaper expression twice with different rounding; then no element equals the maximum and the
    gradient is lost.
    """
    height, width = x.shape[1:3]
    if height % 2 or width % 2:
        fix = f"a {height} x {width} image cannot be halved; use fewer stages or a larger image"
        raise UserError("widths", reason=fix, code="mismatch")
    return functools.reduce(jnp.maximum, _corners(x))


def _corners(x: jax.Array) -> list[jax.Array]:
    """Return the four elements of every tile, each as [batch, height / 2, width / 2, channels].

    Comparing slices is faster than a reduction, also under scan and vmap.
    """
    return [x[:, row::2, column::2] for row in range(2) for column in range(2)]


def tiles(x: jax.Array) -> jax.Array:
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels)


def _forward(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    pooled = max_pool(x)
    return pooled, (x, pooled)


def _backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array]:
    x, pooled = kept
    has_it, share = shared(x, pooled, gradient)
    return (jnp.where(has_it, share, 0).reshape(x.shape),)


def shared(x: jax.Array, pooled: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a mask of the elements of `tiles(x)` that are a maximum, and each one's gradient."""
    sharers = sum((corner == pooled).astype(gradient.dtype) for corner in _corners(x))
    share = gradient / sharers
    has_it = tiles(x) == pooled[:, :, None, :, None]
    return has_it, share[:, :, None, :, None]


max_pool.defvjp(_forward, _backward)
