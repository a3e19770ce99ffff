"""Dropout and stochastic depth that do not depend on how the batch is spread over devices.

Every example draws from a key of its own, made from the step's key and the example's number in the global batch. So one
device, eight, `jit` and `pmap` drop the same things.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.extend import random

from lbopt import replicas
from lbopt.errors import UserError

_LEVELS = 2**16
"""A draw is 16 bits: a rate is met to within 2^-17, and the output is scaled by the rate that was met."""


class Dropout(nn.Module):
    """Zero each element with probability `rate` and scale the others up to keep the mean.

    Draws from the stream "example" of the module (see `lbopt.models._seam`).

    Attributes:
      rate: in [0, 1), rounded to a multiple of 2^-16.
    """

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Drop from `x` [batch, ...]; the identity unless `train`."""
        keep, share = self.keep(x.shape[0], x.shape[1:], train)
        return x if keep is None else _scaled(x, keep, share)

    def keep(
        self, num_examples: int, shape: tuple[int, ...], train: bool
    ) -> tuple[jax.Array | None, float]:
        """Return what to keep, bool [num_examples, *shape] (None for all), and by what to divide it.

        Args:
          num_examples: that are seen here.
          shape: of one example.
          train: drop.
        """
        return _draw_kept(self, "dropout_rate", num_examples, shape, train)


class StochasticDepth(nn.Module):
    """Zero a whole example with probability `rate` and scale the others up: put it on a residual branch.

    Attributes:
      rate: in [0, 1), rounded to a multiple of 2^-16.
      examples: how many are folded into the last axis, see `lbopt.models._fold`.

    References:
      Huang et al., Deep Networks with Stochastic Depth, arXiv 1603.09382.
    """

    rate: float
    examples: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Drop examples of `x` [batch / examples, ..., examples * channels]; the identity unless `train`."""
        rows, channels = x.shape[0], x.shape[-1] // self.examples
        keep, share = _draw_kept(self, "stochastic_depth_rate", rows * self.examples, (), train)
        if keep is None:
            return x
        keep = keep.reshape(rows, *[1] * (x.ndim - 2), self.examples)
        return _scaled(x, jnp.repeat(keep, channels, axis=-1), share)


def _draw_kept(
    module: Dropout | StochasticDepth,
    name: str,
    num_examples: int,
    shape: tuple[int, ...],
    train: bool,
) -> tuple[jax.Array | None, float]:
    dropped = round(module.rate * _LEVELS)
    if not train or not module.rate:
        return None, 1.0
    if not 0 <= dropped < _LEVELS:
        raise UserError(name, module.rate, f"give a number in [0, {1 - 1 / _LEVELS:.6f}]")
    if module.is_initializing():
        return None, 1.0
    keep = draw(module.make_rng("example"), num_examples, shape) >= dropped
    return keep, 1 - dropped / _LEVELS


def _scaled(x: jax.Array, keep: jax.Array, share: float) -> jax.Array:
    return jnp.where(keep, x * jnp.asarray(1 / share, x.dtype), jnp.zeros((), x.dtype))


def draw(key: jax.Array, num_examples: int, shape: tuple[int, ...]) -> jax.Array:
    """Return uniform 16-bit draws for the examples that are seen here.

    One Threefry block, counted by (element, example), gives four draws: `jax.random.bits` would spend a block on each.

    Args:
      key: the same on every replica.
      num_examples: on this replica (under `jit` in the whole batch).
      shape: of one example's draws.

    Returns:
      [num_examples, *shape] int32 in [0, 2^16).
    """
    first, *rest = shape or (1,)
    blocks = (num_examples, -(-first // 4), *rest)
    example = replicas.example_numbers(num_examples).astype(jnp.uint32)
    example = jnp.broadcast_to(example.reshape(-1, *[1] * (len(blocks) - 1)), blocks)
    words = random.threefry2x32_p.bind(*_key_words(key, blocks), _positions(blocks), example)
    quarters = [part for word in words for part in (word & 0xFFFF, word >> 16)]
    return (
        jnp.concatenate(quarters, axis=1)[:, :first].astype(jnp.int32).reshape(num_examples, *shape)
    )


def _key_words(key: jax.Array, shape: tuple[int, ...]) -> list[jax.Array]:
    """Return the two words of a key, whatever its kind, as arrays of one shape."""
    if jax.random.key_impl(key) != "threefry2x32":
        key = jax.random.wrap_key_data(jax.random.bits(key, (2,), jnp.uint32), impl="threefry2x32")
    return [jnp.broadcast_to(word, shape) for word in jax.random.key_data(key)]


def _positions(shape: tuple[int, ...]) -> jax.Array:
    """Number the elements of each example: [num_examples, ...] uint32."""
    position = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape[1:], 1):
        position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return position
