"""Exact scaling by powers of two."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_LARGEST = 252
"""Largest exponent of a factor that is the product of two normal numbers of fp32."""


def ceil_log2(x: jax.Array) -> jax.Array:
    """Return the least e with x <= 2^e, int32, for positive numbers of fp32, from their bits.

    It is 0 for 0 and for numbers that are not finite.

    >>> print(ceil_log2(jnp.array([1.0, 1.5, 4.0, 5.0, 0.0, 2.0**-140])))
    [   0    1    2    3    0 -140]
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) & np.uint32(0x7FFFFFFF)
    field = (bits >> 23).astype(jnp.int32)
    # The bits of a subnormal number, read as an integer, are its multiple of 2^-149.
    leading = 31 - jax.lax.clz(bits).astype(jnp.int32)
    is_power = jnp.where(field > 0, (bits & np.uint32(0x7FFFFF)) == 0, (bits & (bits - 1)) == 0)
    exponent = jnp.where(field > 0, field - 127, leading - 149) + jnp.where(is_power, 0, 1)
    return jnp.where((bits == 0) | (field == 255), 0, exponent)


def ldexp(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Return x 2^exponent, exact where neither x nor the result is a subnormal number.

    Args:
      x: fp32 array.
      exponent: int32 array that broadcasts against x; it is clipped to [-252, 252].
    """
    exponent = jax.lax.broadcast_to_rank(jnp.clip(exponent, -_LARGEST, _LARGEST), x.ndim)
    half = exponent // 2
    return x * _power(half) * _power(exponent - half)


def _power(exponent: jax.Array) -> jax.Array:
    bits = (exponent + 127).astype(jnp.uint32) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
