"""Blocks of numbers in 8 bits: the maps of bitsandbytes, without look-ups in memory.

A map is a sorted table of 256 numbers in [-1, 1]. It is piecewise linear up to its last bits, so
both directions are arithmetic on each number alone, which XLA fuses into the update. A gather from
the table would be a pass over memory of its own on TPU v3 and v5p.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

MapName = Literal["dynamic", "linear"]
MAPS: tuple[MapName, ...] = ("dynamic", "linear")
_EXACT_BITS = 14  # so many bits of a slope, times an index of 8 bits, are exact in fp32
_DECADES = 7


@functools.cache
def table(name: MapName, signed: bool) -> np.ndarray:
    """Return the 256 numbers of a map, fp32, sorted, bit for bit those of bitsandbytes.

    Args:
      name: "dynamic": seven decades, the larger with more numbers; or "linear".
      signed: Whether the numbers lie in [-1, 1] or in [0, 1].

    References:
      Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.
      bitsandbytes-foundation/bitsandbytes@95f9af30:bitsandbytes/functional.py.
    """
    if name == "linear":
        if not signed:
            return _linspace(0, 1, 256)
        values = _linspace(-1, 1, 255)
        return np.insert(values, 127, np.float32(0))

    magnitudes = [np.array([0, 1], np.float32)]
    for decade in range(_DECADES):
        ends = _linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        means = (ends[:-1] + ends[1:]) / np.float32(2)
        magnitudes.append(np.float32(10.0 ** (decade - _DECADES + 1)) * means)
    values = np.concatenate(magnitudes)
    if signed:
        values = np.concatenate([values, -np.concatenate(magnitudes[1:])])
    return np.sort(values.astype(np.float32))


def encode(
    x: jax.Array, name: MapName, signed: bool, block_size: int
) -> tuple[jax.Array, jax.Array]:
    """Return the codes of an array and the largest magnitude of each block.

    Args:
      x: fp32 array, at least one axis.
      name: The map.
      signed: Whether the map has negative numbers; without them, negative numbers become 0.
      block_size: Longest block along the last axis, which may end with a shorter one.

    Returns:
      uint8 codes of the shape of `x`: those of the nearest number of the map to x / largest. And
      the largest magnitudes, fp32, shaped like `x` without its last axis if that is one block, else
      with one number for each block in it.
    """
    blocks = _blocks(x, block_size)
    largest = jnp.max(jnp.abs(blocks), -1)
    # As bitsandbytes: times the reciprocal, and a block of zeros stays zero.
    inverse = 1.0 / jnp.maximum(largest, jnp.finfo(jnp.float32).tiny)
    relative = jnp.clip(blocks * inverse[..., None], -1, 1)
    return _unblocked(_map(name, signed).code_of(relative).astype(jnp.uint8), x.shape), largest


def decode(
    codes: jax.Array, largest: jax.Array, name: MapName, signed: bool, block_size: int
) -> jax.Array:
    """Return the fp32 numbers of codes and largest magnitudes from `encode`."""
    values = _map(name, signed).value_of(_blocks(codes, block_size).astype(jnp.int32))
    return _unblocked(values * largest[..., None], codes.shape)


def _blocks(x: jax.Array, block_size: int) -> jax.Array:
    """Return the blocks in the last axis, the last one padded with zeros.

    One block is left as it is: on TPU another shape would move all numbers.
    """
    length = x.shape[-1]
    if length <= block_size:
        return x
    short = -length % block_size
    if short:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)])
    return x.reshape(*x.shape[:-1], -1, block_size)


def _unblocked(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if blocks.ndim == len(shape):
        return blocks
    return blocks.reshape(*shape[:-1], -1)[..., : shape[-1]]


def _linspace(first: float, last: float, number: int) -> np.ndarray:
    """Return `torch.linspace` in fp32: from both ends, each number rounded once."""
    ends = np.array([first, last], np.float32)
    step = np.float64((ends[1] - ends[0]) / np.float32(number - 1))
    index = np.arange(number)
    up = ends[0] + step * index
    down = ends[1] - step * (number - 1 - index)
    return np.where(index < number // 2, up, down).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class _Lines:
    """A table of fp32 numbers as straight lines with corrections of the last bits.

    Attributes:
      starts: Index of the first number of each line.
      lines: fp32 (4, lines): slope, offset, and what fp32 leaves out of both.
      words: uint32 words of 16 corrections, each -1 to 2 units in the last place, plus 1.
    """

    starts: tuple[int, ...]
    lines: np.ndarray
    words: np.ndarray

    @classmethod
    def through(cls, numbers: np.ndarray, starts: tuple[int, ...], inner: bool = False) -> _Lines:
        """Return lines through a table.

        Args:
          numbers: fp32 table.
          starts: Index of the first number of each line.
          inner: Whether the last number of each line may be wrong.
        """
        lines = np.zeros((4, len(starts)))
        corrections = np.ones(-(-len(numbers) // 16) * 16, np.int64)
        for at, (start, end) in enumerate(zip(starts, (*starts[1:], len(numbers)), strict=True)):
            index = np.arange(start, end - 1 if inner and end - start > 1 else end)
            here = numbers[index]
            slope, offset = np.polyfit(index, here, 1) if len(index) > 1 else (0.0, here[0])
            lines[:, at] = _split(slope, offset)
            on_line = _on(lines[:, at], index).view(np.int32)
            corrections[index] += here.view(np.int32).astype(np.int64) - on_line

        if corrections.min() < 0 or corrections.max() > 3:
            raise AssertionError("a number lies more than 2 units in the last place off its line")
        shifted = corrections.reshape(-1, 16) << (2 * np.arange(16))
        words = np.bitwise_or.reduce(shifted, 1).astype(np.uint32)
        return cls(starts, lines.astype(np.float32), words)

    def reached(self, index: jax.Array) -> list[jax.Array]:
        """Return for each line but the first whether int32 indices lie on it or beyond."""
        return [index >= start for start in self.starts[1:]]

    def bits_at(self, index: jax.Array, reached: list[jax.Array]) -> jax.Array:
        """Return the bits of the numbers at int32 indices, as int32."""
        slope, offset, small_slope, small_offset = (_chosen(line, reached) for line in self.lines)
        n = index.astype(jnp.float32)
        # The products and the first sum are exact, with or without fused multiplication.
        value = (slope * n + offset) + (small_slope * n + small_offset)
        word = _looked_up(self.words, index // 16)
        correction = (word >> (index % 16 * 2).astype(jnp.uint32)) & jnp.uint32(3)
        return jax.lax.bitcast_convert_type(value, jnp.int32) + (correction.astype(jnp.int32) - 1)


def _split(slope: float, offset: float) -> tuple[float, float, float, float]:
    """Return (slope, offset) with few bits each, and the rest of both."""
    if slope == 0:
        return 0.0, offset, 0.0, 0.0
    unit = 2.0 ** (np.frexp(slope)[1] - _EXACT_BITS)
    high = np.round(slope / unit) * unit
    high_offset = np.round(offset / unit) * unit
    rest = slope - high
    small_unit = 2.0 ** (np.frexp(rest)[1] - _EXACT_BITS) if rest else 1.0
    return high, high_offset, np.round(rest / small_unit) * small_unit, offset - high_offset


def _on(line: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the fp32 numbers of a line as `_Lines.at` computes them."""
    slope, offset, small_slope, small_offset = (np.float32(part) for part in line)
    n = index.astype(np.float32)
    return (slope * n + offset) + (small_slope * n + small_offset)


def _chosen(values: np.ndarray, reached: list[jax.Array]) -> jax.Array:
    """Return the value of the last condition that holds, the first value if none does."""
    found = jnp.asarray(values[0])
    for value, holds in zip(values[1:], reached, strict=True):
        found = jnp.where(holds, value, found)
    return found


def _looked_up(values: np.ndarray, index: jax.Array) -> jax.Array:
    """Return values[index] by selections, a bit of the index each."""
    level = [jnp.asarray(value) for value in values]
    while len(level) > 1:
        odd = index % 2 == 1
        pairs = zip(level[::2], level[1::2], strict=False)
        chosen = [jnp.where(odd, right, left) for left, right in pairs]
        level = chosen + level[2 * len(chosen) :]
        index = index // 2
    return level[0]


@dataclasses.dataclass(frozen=True)
class _Map:
    """Both directions of a map.

    Attributes:
      middle: Code of the number 0 if the map of negative numbers is the mirror image of that of
        positive ones, which then is all that is kept; None if all numbers are kept.
      length: How many numbers are kept.
      numbers: The kept numbers.
      bounds: The middle between each number and the next; wrong for the last of each line.
      edges: fp32 (lines - 1,): the middle between each line and the next.
      inverse: fp32 (2, lines): factor and summand that make a fractional index of a number, such
        that the index sought is the next whole number.
    """

    middle: int | None
    length: int
    numbers: _Lines
    bounds: _Lines
    edges: np.ndarray
    inverse: np.ndarray

    def value_of(self, code: jax.Array) -> jax.Array:
        """Return the fp32 numbers of int32 codes."""
        index = code if self.middle is None else jnp.abs(code - self.middle)
        bits = self.numbers.bits_at(index, self.numbers.reached(index))
        values = jax.lax.bitcast_convert_type(bits, jnp.float32)
        return values if self.middle is None else jnp.where(code < self.middle, -values, values)

    def code_of(self, x: jax.Array) -> jax.Array:
        """Return the int32 codes of the nearest numbers; in the middle of two, of the smaller."""
        negative = x < 0
        if self.middle is not None:
            x = jnp.abs(x)
        # Positive numbers are ordered like their bits. In the middle of two, negative numbers take
        # the one further from 0: x >= bound, which is bits + 1 > those of the bound.
        ranks = jax.lax.bitcast_convert_type(x, jnp.int32) + negative.astype(jnp.int32)

        def above(bits: Any) -> jax.Array:
            if self.middle is not None:
                return ranks > bits
            return x > jax.lax.bitcast_convert_type(bits, jnp.float32)

        reached = [above(jnp.asarray(bits)) for bits in self.edges.view(np.int32)]
        starts = np.array(self.numbers.starts, np.int32)
        lasts = np.append(starts[1:], np.int32(self.length)) - np.int32(1)
        start, last, factor, summand = (
            _chosen(values, reached) for values in (starts, lasts, *self.inverse)
        )
        # The guess is right or one too low, and the exact bound decides.
        guess = jnp.floor(x * factor + summand).astype(jnp.int32)
        guess = jnp.clip(guess, start, last)
        is_above = above(self.bounds.bits_at(guess, reached))
        index = jnp.minimum(guess + is_above.astype(jnp.int32), last)
        if self.middle is None:
            return index
        return jnp.where(negative, jnp.maximum(self.middle - index, 0), self.middle + index)


@functools.cache
def _map(name: MapName, signed: bool) -> _Map:
    """Return a map's lines."""
    numbers = table(name, signed)
    mirrored = name == "dynamic" and signed
    if mirrored:
        numbers = numbers[127:]
    starts = _STARTS[name, signed]
    bounds = (numbers[:-1] + numbers[1:]) / np.float32(2)
    edges = bounds[np.array(starts[1:]) - 1]
    lines = _Lines.through(np.append(bounds, bounds[-1]), starts, inner=True)
    slopes, offsets = (np.float64(lines.lines[at]) + lines.lines[at + 2] for at in (0, 1))
    flat = slopes == 0
    factors = np.where(flat, 0, 1 / np.where(flat, 1, slopes))
    summands = np.where(flat, starts, _MARGIN - offsets * factors)
    inverse = np.stack([factors, summands]).astype(np.float32)
    middle = 127 if mirrored else None
    kept = _Lines.through(numbers, starts)
    return _Map(middle, len(numbers), kept, lines, edges, inverse)


_MARGIN = 1 / 64  # far above the error of a fractional index, far below 1
_STARTS: dict[tuple[MapName, bool], tuple[int, ...]] = {
    ("dynamic", True): (0, *(1 << n for n in range(_DECADES + 1))),
    ("dynamic", False): (0, *((2 << n) - 1 for n in range(_DECADES + 1))),
    ("linear", True): (0, 127, 128, 129),
    ("linear", False): (0, 1, 16, 128),
}
"""Indices at which the lines begin; a number apart from the rest is a line of its own."""
