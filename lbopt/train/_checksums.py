"""Checksums of arrays, the same in every layout over devices; they tell a damaged checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lbopt import tree, types

_UINTS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
# Any odd numbers do. These are from Knuth's multiplicative hash and MurmurHash3's finaliser.
_MULTIPLIERS = (0x9E3779B1, 0x85EBCA6B)
_MIXER = 0xC2B2AE35


def checksums(state: types.PyTree) -> dict[str, str]:
    """Return the checksum of each leaf by its name: 64 bits in hexadecimal.

    The words of an array, as unsigned integers, are summed modulo 2^32 with weights that depend on
    their position; twice, with different weights. Weights are odd, so a single flipped bit always
    changes the checksum, and any other damage does except with a probability of about 2^-64. A sum
    needs no order: each device and process adds up its own shards.

    Args:
      state: Arrays of 1, 2 or 4 bytes per element.

    >>> checksums({"a": np.zeros(3, np.float32), "b": np.ones(1, np.int32)})
    {'a': '0000000000000000', 'b': '9e3779b175ffe3ed'}
    """
    return named(tree.leaf_names(state), sums_of(jax.tree.leaves(state)))


def named(names: Sequence[str], sums: Sequence[jax.Array]) -> dict[str, str]:
    """Return the checksums of leaves by name from the result of `sums_of`, when it is ready."""
    return {
        name: f"{first:08x}{second:08x}"
        for name, (first, second) in zip(names, jax.device_get(sums), strict=True)
    }


@jax.jit
def copies_of(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Return copies of arrays on their devices, without waiting for them."""
    return [jnp.copy(leaf) for leaf in leaves]


def sums_of(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the checksums of arrays, [2] uint32 each, without waiting for them.

    Each shape has a program of its own: a state has many leaves of few shapes, and one program for
    all of them would take long to compile. Sums of arrays that are split over CPU devices are
    waited for, because many queued collectives deadlock on a few cores.
    """
    return [_ready(sum_of(leaf)) if _is_split_over_cpus(leaf) else sum_of(leaf) for leaf in leaves]


def _ready(total: jax.Array) -> jax.Array:
    return total.block_until_ready()


def _is_split_over_cpus(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_replicated:
        return False
    device: Any = next(iter(leaf.sharding.device_set))
    return device.platform == "cpu"


def all_finite(leaves: Sequence[jax.Array]) -> bool:
    """Return whether all floating-point arrays are finite; waits for them."""
    return bool(_all_finite([leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]))


@jax.jit
def _all_finite(leaves: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves] or [jnp.ones((), bool)]).all()


@jax.jit
def sum_of(leaf: jax.Array) -> jax.Array:
    """Return the two sums of an array, [2] uint32."""
    return jnp.stack([_sum(leaf, salt) for salt in range(2)])


def _sum(leaf: jax.Array, salt: int) -> jax.Array:
    bits = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
    words = lax.bitcast_convert_type(bits, _UINTS[bits.dtype.itemsize]).astype(jnp.uint32)
    return jnp.sum(words * _weights(words.shape, salt), dtype=jnp.uint32)


def _weights(shape: Sequence[int], salt: int) -> jax.Array:
    """Return an odd number for each position in an array, uint32."""
    place = jnp.zeros(shape, jnp.uint32)
    for axis, stride in enumerate(_strides(shape)):
        place += lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride % 2**32)
    mixed = (place + 1) * np.uint32(_MULTIPLIERS[salt])
    if salt:
        mixed = (mixed ^ (mixed >> 15)) * np.uint32(_MIXER)
    return mixed | np.uint32(1)


def _strides(shape: Sequence[int]) -> list[int]:
    return [int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]


def differing(found: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Return the names of leaves whose checksums differ, and of those that only one side has."""
    return sorted(name for name in {**found, **wanted} if found.get(name) != wanted.get(name))


def mismatch(state: types.PyTree, saved: Mapping[str, str]) -> str:
    """Return how a state differs from the saved checksums, for a message; "" if it does not."""
    wrong = differing(checksums(state), saved)
    return f"the checksums of {tree.some(wrong)} differ from the saved ones" if wrong else ""
