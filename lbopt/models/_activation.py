"""Activations whose backward pass keeps no array that the layers beside them do not keep anyway."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def relu(x: jax.Array, dtype: Any) -> jax.Array:
    """Return max(x, 0) in `dtype`.

    The backward pass keeps the result instead of `x`, which may be of a wider dtype.
    """
    return jnp.maximum(x, 0).astype(dtype)


def _relu_forward(x, dtype):
    y = relu(x, dtype)
    return y, (y, jnp.zeros((), x.dtype))


def _relu_backward(dtype, kept, gradient):
    del dtype
    y, like = kept
    return (jnp.where(y > 0, gradient, 0).astype(like.dtype),)


relu.defvjp(_relu_forward, _relu_backward)


def swish(x: jax.Array) -> jax.Array:
    """Return x sigmoid(x) in the dtype of `x`, computed in fp32 or wider."""
    return jax.nn.silu(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """Return x Phi(x) in the dtype of `x`, where Phi is the normal distribution function.

    It is computed in fp32 or wider; the backward pass keeps only `x`.

    References:
      Hendrycks and Gimpel, arXiv 1606.08415v5.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * _normal_cdf(wide)).astype(x.dtype)


def _gelu_forward(x):
    return gelu(x), x


def _gelu_backward(x, gradient):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    density = jnp.exp(-0.5 * jnp.square(wide)) * 0.3989422804014327  # 1 / sqrt(2 pi)
    return ((gradient * (_normal_cdf(wide) + wide * density)).astype(x.dtype),)


gelu.defvjp(_gelu_forward, _gelu_backward)


@jax.custom_vjp
def gelu_tanh(x: jax.Array) -> jax.Array:
    """Return the tanh approximation of `gelu`, which the published BERT code uses.

    It is computed in fp32 or wider; the backward pass keeps only `x`.

    References:
      google-research/bert@eedf5716ce1268e56f0a50264a88cafad334ac61:modeling.py, gelu.
    """
    return _gelu_tanh(x)


def _gelu_tanh(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jax.nn.gelu(wide, approximate=True).astype(x.dtype)


def _gelu_tanh_forward(x):
    return _gelu_tanh(x), x


def _gelu_tanh_backward(x, gradient):
    return jax.vjp(_gelu_tanh, x)[1](gradient)


gelu_tanh.defvjp(_gelu_tanh_forward, _gelu_tanh_backward)


def _normal_cdf(x: jax.Array) -> jax.Array:
    return 0.5 * (1 + jax.lax.erf(x * 0.7071067811865476))  # 1 / sqrt(2)
