"""Norms to twice the working precision, for weights whose norm must not drift."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lbopt import tree, types
from lbopt.transforms import _per_path

_MANY = 256
"""Number of rows from which on their errors average out, to less than 1e-8 of the norm."""


class Pair(NamedTuple):
    """An unevaluated sum high + low, of about twice the precision of its parts."""

    high: jax.Array
    low: jax.Array


def exact_norm(
    x: jax.Array, layer_axes: tuple[int, ...] = (), axis_name: types.AxisName = None
) -> Pair:
    """Return the L2 norm with a relative error of a few 1e-9 in fp32, whatever the size of `x`.

    Many rows are summed plainly, so that their errors, which have random signs, average out; the
    sums of the rows, and all numbers of few rows, are added in pairs of numbers.

    Args:
      x: Array of fp32 or wider whose squares fp32 can hold: norms from 1e-15 to 1e15.
      layer_axes: Axes that count layers; one norm for each layer.
      axis_name: Inside `shard_map`, the mapped axis or axes over which `x` is split.

    Returns:
      The norm; parts are scalars without `layer_axes`, else they broadcast against `x`.
    """
    own = [axis for axis in range(x.ndim) if axis not in layer_axes]
    longest = max(own, key=lambda axis: x.shape[axis]) if own else None
    if longest is None or x.shape[longest] < _MANY:
        parts = [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
        squares = [Pair(*_two_product(part, part)) for part in parts]
        total = Pair(*(sum(column[1:], column[0]) for column in zip(*squares, strict=True)))
        for axis in own:
            total = _sum_pairs(Pair(*map(_per_path.replicated, total)), axis)
    else:
        rest = [axis for axis in own if axis != longest]
        rows = jnp.sum(tree.square(x), rest, keepdims=True)
        rows = _per_path.replicated(rows)
        total = _sum_pairs(Pair(rows, jnp.zeros_like(rows)), longest)

    if axis_name is not None:
        # A plain all-reduce would round. In this one each place has one number that is not 0.
        places = jnp.arange(jax.lax.axis_size(axis_name)) == jax.lax.axis_index(axis_name)
        own_place = places.reshape(-1, *[1] * x.ndim).astype(total.high.dtype)
        gathered = Pair(*(jax.lax.psum(own_place * part, axis_name) for part in total))
        total = Pair(*(part[0] for part in _sum_pairs(gathered, 0)))
    total = Pair(*(part if layer_axes else part.reshape(()) for part in total))
    return _root(total)


def ratio(numerator: jax.Array, below: Pair) -> Pair:
    """Return numerator / below as a pair; 0 where below is 0."""
    safe = jnp.where(below.high > 0, below.high, 1)
    high = numerator / safe
    product, error = _two_product(high, safe)
    low = ((numerator - product) - error - high * below.low) / safe
    is_defined = below.high > 0
    return Pair(jnp.where(is_defined, high, 0), jnp.where(is_defined, low, 0))


def times(x: jax.Array, factor: Pair) -> jax.Array:
    """Return x * factor, rounded about once."""
    return tree.map_parts(lambda part: part * factor.high + part * factor.low, x)


def _sum_pairs(parts: Pair, axis: int) -> Pair:
    """Return the sum of pairs along an axis, which is kept with size 1."""
    zero = jnp.zeros((), parts.high.dtype)

    def add(one, other):
        high, error = _two_sum(one[0], other[0])
        return high, one[1] + other[1] + error

    high, low = jax.lax.reduce(tuple(parts), (zero, zero), add, (axis,))
    return Pair(jnp.expand_dims(high, axis), jnp.expand_dims(low, axis))


def _root(square: Pair) -> Pair:
    root = jnp.sqrt(square.high)
    product, error = _two_product(root, root)
    rest = (square.high - product) - error + square.low
    return Pair(root, jnp.where(root > 0, rest / jnp.where(root > 0, 2 * root, 1), 0))


def _two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a + b rounded, and its rounding error, exactly (Knuth)."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


def _two_product(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a b rounded, and its rounding error, exactly up to underflow (Dekker, Veltkamp)."""
    product = a * b
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(b)
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, error


def _halves(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    shift = (jnp.finfo(a.dtype).nmant + 2) // 2
    big = a * (2.0**shift + 1)
    high = big - (big - a)
    return high, a - high
