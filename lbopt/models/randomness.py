"""Dropout and stochastic depth that do not depend on how the batch is spread over devices.

Every example draws from a key of its own, made from the step's key and the example's number in the global batch. So one
device, eight, `jit` and `pmap` drop the same things.
"""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from lbopt import replicas

_LEVELS = 2**16
"""A draw is 16 bits: a rate is met to within 2^-17, and the output is scaled by the rate that was met."""


class Dropout(nn.Module):
    """Zero each element with probability `rate` and scale the others up to keep the mean.

    Draws from the stream "example" of the module (see `lbopt.models.seam`).

    Attributes:
      rate: in [0, 1), rounded to a multiple of 2^-16.
    """

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Drop from `x` [batch, ...]; the identity unless `train`."""
        return _drop(self, x, x.shape[1:], self.rate) if train and self.rate else x


class StochasticDepth(nn.Module):
    """Zero a whole example with probability `rate` and scale the others up: put it on a residual branch.

    Attributes:
      rate: in [0, 1), rounded to a multiple of 2^-16.

    References:
      Huang et al., Deep Networks with Stochastic Depth, arXiv 1603.09382.
    """

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Drop examples of `x` [batch, ...]; the identity unless `train`."""
        return _drop(self, x, (1,) * (x.ndim - 1), self.rate) if train and self.rate else x


def _drop(module: nn.Module, x: jax.Array, shape: tuple[int, ...], rate: float) -> jax.Array:
    dropped = round(rate * _LEVELS)
    if not 0 <= dropped < _LEVELS:
        raise ValueError(f"dropout rate = {rate!r}: give a number in [0, 1)")
    if module.is_initializing():
        return x
    keep = draw(module.make_rng("example"), x.shape[0], shape) >= dropped
    scale = jnp.asarray(_LEVELS / (_LEVELS - dropped), x.dtype)
    return jnp.where(keep, x * scale, jnp.zeros((), x.dtype))


def draw(key: jax.Array, num_examples: int, shape: tuple[int, ...]) -> jax.Array:
    """Return uniform 16-bit draws for the examples that are seen here.

    Args:
      key: the same on every replica.
      num_examples: on this replica (under `jit` in the whole batch).
      shape: of one example's draws.

    Returns:
      [num_examples, *shape] int32 in [0, 2^16).
    """
    numbers = replicas.example_numbers(num_examples)
    size = math.prod(shape)

    def one(number: jax.Array) -> jax.Array:
        return jax.random.bits(jax.random.fold_in(key, number), (-(-size // 2),), jnp.uint32)

    words = jax.vmap(one)(numbers)
    halves = jnp.concatenate([words & 0xFFFF, words >> 16], axis=1)[:, :size]
    return halves.astype(jnp.int32).reshape(num_examples, *shape)
