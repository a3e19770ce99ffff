"""Floating-point formats of few bits, carried in fp32."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from lbopt.errors import UserError, require_choice

Overflow = Literal["inf", "saturate", "cpd"]
Rounding = Literal["nearest", "stochastic"]
OVERFLOWS = ("inf", "saturate", "cpd")
ROUNDINGS = ("nearest", "stochastic")

# Bits of fp32.
_EXPONENT = 8
_MANTISSA = 23
_BIAS = 127
_INFINITY = np.uint32(0x7F800000)
_ONE = np.uint32(1 << _MANTISSA)
"""The implicit bit of a normal fp32."""
_CARRIERS: tuple[tuple[str, int, int], ...] = (
    ("float8_e5m2", 5, 2),
    ("float8_e4m3", 4, 3),
    ("float8_e3m4", 3, 4),
    ("float16", 5, 10),
    ("bfloat16", 8, 7),
)


@dataclasses.dataclass(frozen=True)
class Format:
    """A binary floating-point format with a sign, an exponent and a mantissa.

    The exponent's bias is 2^(exponent_bits - 1) - 1. The format has gradual underflow and, like
    IEEE formats, keeps its highest exponent for infinity and NaN.

    Attributes:
      exponent_bits: Bits of the exponent, 2 to 8.
      mantissa_bits: Bits of the mantissa, 0 to 23. With 0 there is only the implicit bit, and no
        subnormal number.

    Raises:
      UserError: For an argument that is out of range.
    """

    exponent_bits: int
    mantissa_bits: int

    def __post_init__(self) -> None:
        for name, low, high in (("exponent_bits", 2, _EXPONENT), ("mantissa_bits", 0, _MANTISSA)):
            value = getattr(self, name)
            if (
                not isinstance(value, (int, np.integer))
                or isinstance(value, bool)
                or not low <= value <= high
            ):
                raise UserError(name, value, f"give a whole number from {low} to {high}")

    @property
    def bits(self) -> int:
        """All bits, the sign's included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest finite numbers, also the bias."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number."""
        return 1 - self.max_exponent

    @property
    def max(self) -> float:
        """The largest finite number."""
        return (2 - 2.0**-self.mantissa_bits) * 2.0**self.max_exponent

    @property
    def tiny(self) -> float:
        """The smallest positive number."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def is_fp32(self) -> bool:
        """Whether every fp32 number belongs to it."""
        return (self.exponent_bits, self.mantissa_bits) == (_EXPONENT, _MANTISSA)

    def carrier(self, overflow: Overflow = "inf") -> np.dtype:
        """Return the narrowest dtype that holds every number of the format, for the wire.

        Args:
          overflow: Rule for numbers beyond the largest; "cpd" needs one more exponent.

        >>> [str(Format(*bits).carrier()) for bits in ((3, 0), (4, 3), (5, 2), (6, 9), (8, 7))]
        ['float8_e5m2', 'float8_e4m3', 'float8_e5m2', 'float32', 'bfloat16']
        """
        exponent = self.exponent_bits + (overflow == "cpd")
        fitting = [
            jnp.dtype(name) for name, e, m in _CARRIERS if exponent <= e and self.mantissa_bits <= m
        ]
        return min(fitting, key=lambda dtype: dtype.itemsize, default=np.dtype(np.float32))


def float_quantize(
    x: jax.Array,
    exponent_bits: int,
    mantissa_bits: int,
    overflow: Overflow = "inf",
    rounding: Rounding = "nearest",
    key: jax.Array | None = None,
) -> jax.Array:
    """Round to the numbers of a format of few bits, element by element.

    The arithmetic is on the bits of fp32 as integers, so the subnormal numbers of the format (and
    of fp32, which XLA may flush) come out right on every backend. It reads and writes each element
    once if it stands alone, and never if it fuses.

    Args:
      x: Floating-point array of any shape; computed in fp32.
      exponent_bits: Bits of the exponent, 2 to 8.
      mantissa_bits: Bits of the mantissa, 0 to 23.
      overflow: Value of numbers that round past the largest finite one.
        "inf": infinity, as in IEEE formats.
        "saturate": the largest finite number.
        "cpd": as CPD's kernel computes it. Numbers that round up from the last finite one become
        2^(max_exponent + 1), which the format does not have; only numbers that were as large before
        become infinite. Subnormal numbers of fp32 become 0, and a subnormal result is rounded from
        a mantissa that was cut to 23 bits.
      rounding: "nearest" (ties to even), or "stochastic": up with the probability of the part that
        is cut off, so that the mean is exact; infinite where that rounds past the largest.
      key: Key of `jax.random` for stochastic rounding; None for "nearest".

    Returns:
      An array like `x` of numbers of the format. They are rounded once more if the dtype of `x`
      does not hold them, as bfloat16 does not hold those of fp16. NaN and infinities stay.

    Raises:
      UserError: For an argument that is out of range, or a missing or unused key.

    >>> print(float_quantize(jnp.array([1.1, 5.0, 2.0**-17, 7e4]), 5, 2))
    [ 1.  5.  0. inf]

    References:
      Customized-Precision Deep Learning (CPD), for "cpd":
      drcut/CPD@ddd9a67c7599214a4061ae04b28387171d29d96a:CPDtorch/quant/quant_cuda/float_kernel.cu.
      Han et al., Auto-Precision Scaling for Distributed Deep Learning, arXiv:1911.08907v3.
    """
    to = Format(exponent_bits, mantissa_bits)
    require_choice("rounding", rounding, ROUNDINGS)
    if (rounding == "stochastic") != (key is not None):
        fix = "give a key of jax.random for stochastic rounding, and None for nearest"
        raise UserError("key", key, fix)
    noise = None if key is None else jax.random.bits(key, jnp.shape(x), jnp.uint32)
    return quantize(x, to, overflow, noise)


def quantize(
    x: jax.Array, to: Format, overflow: Overflow = "inf", noise: jax.Array | None = None
) -> jax.Array:
    """Round as `float_quantize` does.

    Args:
      x: Floating-point array.
      to: The format.
      overflow: Value of numbers beyond the largest (see `float_quantize`).
      noise: Random uint32 bits of the shape of `x` for stochastic rounding; None for nearest.
    """
    require_choice("overflow", overflow, OVERFLOWS)
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        fix = f"its dtype is {x.dtype}; give a floating-point array"
        raise UserError("x", reason=fix, code="type")
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    rounded = _rounded(magnitude, to, overflow, noise)
    rounded = jnp.where(magnitude >= _INFINITY, magnitude, rounded)
    signed = rounded | (bits & np.uint32(0x80000000))
    return jax.lax.bitcast_convert_type(signed, jnp.float32).astype(x.dtype)


def _rounded(
    magnitude: jax.Array, to: Format, overflow: Overflow, noise: jax.Array | None
) -> jax.Array:
    """Return the bits of the rounded magnitudes, uint32; the caller handles infinity and NaN."""
    field = magnitude >> _MANTISSA  # the biased exponent, 0 for subnormal numbers
    exponent = jnp.maximum(field, 1)
    mantissa = (magnitude & (_ONE - 1)) | jnp.where(field > 0, _ONE, np.uint32(0))

    lowest = np.uint32(to.min_exponent + _BIAS)
    # Binades below the format's normal numbers.
    below = jnp.where(exponent < lowest, lowest - exponent, np.uint32(0))
    if overflow == "cpd":
        lost = jnp.minimum(below, 31)
        mantissa = jnp.where(field > 0, (mantissa >> lost) << lost, np.uint32(0))

    cut = np.uint32(_MANTISSA - to.mantissa_bits) + below
    # A word of 32 bits shifts by at most 31, so a longer cut is made in two steps.
    mantissa = mantissa >> jnp.minimum(jnp.maximum(cut, 31) - 31, 31)
    cut = jnp.minimum(cut, 31)
    unit = jnp.uint32(1) << cut

    # Added before the cut: just under half a unit, and one more if that makes a tie even; or random
    # bits, which carry with the probability of the part that is cut off.
    if noise is None:
        odd = (mantissa >> cut) & 1
        up = jnp.where(cut > 0, (unit >> 1) - 1 + odd, 0)
    else:
        up = noise & (unit - 1)
    kept = ((mantissa + up) >> cut) << cut

    # The leading bit, where there still is one, adds one to the exponent.
    bits = jnp.where(kept == 0, 0, ((exponent - 1) << _MANTISSA) + kept)
    far_below = (cut > _MANTISSA + 1) & (kept > 0)  # only stochastic rounding goes up from there
    bits = jnp.where(far_below, np.float32(to.tiny).view(np.uint32), bits)
    return _bounded(bits, magnitude, to, overflow)


def _bounded(bits: jax.Array, magnitude: jax.Array, to: Format, overflow: Overflow) -> jax.Array:
    beyond = np.uint32((to.max_exponent + 1 + _BIAS) << _MANTISSA)
    if overflow == "cpd":
        return jnp.where(magnitude >= beyond, _INFINITY, bits)
    top = _INFINITY if overflow == "inf" else np.float32(to.max).view(np.uint32)
    return jnp.where(bits >= beyond, top, bits)
