"""Dropout and stochastic depth that do not depend on how the batch is spread over devices.

The random numbers of an example depend on the step's key and on the example's number in the global
batch. One device and eight, `jit` and `pmap` therefore drop the same elements.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.extend import random

from lbopt import replicas
from lbopt.errors import require

_LEVELS = 2**16
"""Number of values of a random integer of 16 bits.

A rate is rounded by at most 2^-17, and the output is scaled by the rounded rate.
"""


class Dropout(nn.Module):
    """Zero each element with probability `rate` and scale the others up to keep the mean.

    The random numbers come from the module's stream "example" (see `lbopt.models._seam`).

    Attributes:
      rate: Probability of dropping an element, in [0, 1), rounded to a multiple of 2^-16.
    """

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Apply dropout to `x` [batch, ...] if `train`; return it unchanged otherwise."""
        keep, share = self.keep(x.shape[0], x.shape[1:], train)
        return x if keep is None else _scaled(x, keep, share)

    def keep(
        self, num_examples: int, shape: tuple[int, ...], train: bool
    ) -> tuple[jax.Array | None, float]:
        """Return a mask of the elements to keep, and the share to divide them by.

        Args:
          num_examples: Number of examples on this replica (under `jit`, in the whole batch).
          shape: Shape of one example.
          train: True drops elements.

        Returns:
          bool [num_examples, *shape], or None to keep all, and the expected share that is kept.
        """
        return _draw_kept(self, "dropout_rate", num_examples, shape, train)


class StochasticDepth(nn.Module):
    """Zero whole examples with probability `rate` and scale the others up; for residual branches.

    Attributes:
      rate: Probability of dropping an example, in [0, 1), rounded to a multiple of 2^-16.
      examples: Number of examples folded into the last axis, see `lbopt.models._fold`.

    References:
      Huang et al., Deep Networks with Stochastic Depth, arXiv 1603.09382v3.
    """

    rate: float
    examples: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Drop examples of `x` if `train`; return it unchanged otherwise.

        `x` is [batch / examples, ..., examples * channels].
        """
        rows = x.shape[0]
        channels = x.shape[-1] // self.examples
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
    if not train or not module.rate:
        return None, 1.0
    dropped = round(require_drop_rate(name, module.rate) * _LEVELS)
    # The first parameters do not depend on dropout, so `init` needs no random stream for it.
    if module.is_initializing():
        return None, 1.0
    keep = draw(module.make_rng("example"), num_examples, shape) >= dropped
    return keep, 1 - dropped / _LEVELS


def require_drop_rate(field: str, rate: float) -> float:
    """Return a rate of dropout or stochastic depth; raise `UserError` if it would drop all."""
    fits = 0 <= rate < 1 and round(rate * _LEVELS) < _LEVELS
    require(fits, field, rate, f"give a number in [0, {1 - 1 / _LEVELS:.6f}]")
    return rate


def _scaled(x: jax.Array, keep: jax.Array, share: float) -> jax.Array:
    return jnp.where(keep, x * jnp.asarray(1 / share, x.dtype), jnp.zeros((), x.dtype))


def draw(key: jax.Array, num_examples: int, shape: tuple[int, ...]) -> jax.Array:
    """Return uniform 16-bit random integers for the examples on this replica.

    One Threefry block, whose counter is (element, example), gives four integers; `jax.random.bits`
    would use a block for each.

    Args:
      key: Random key, the same on every replica.
      num_examples: Number of examples on this replica (under `jit`, in the whole batch).
      shape: Shape of one example's integers.

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
    """Return the two words of a key, broadcast to `shape`.

    A key of another kind first seeds a Threefry key.
    """
    if jax.random.key_impl(key) != "threefry2x32":
        key = jax.random.wrap_key_data(jax.random.bits(key, (2,), jnp.uint32), impl="threefry2x32")
    return [jnp.broadcast_to(word, shape) for word in jax.random.key_data(key)]


def _positions(shape: tuple[int, ...]) -> jax.Array:
    """Return the number of each element within its example, uint32 [num_examples, ...]."""
    position = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape[1:], 1):
        position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return position
