"""Random sketches: short matrices that keep the geometry of what they multiply."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from lbopt import _scalars, tree, types
from lbopt.errors import UserError
from lbopt.linalg._matmul import matmul


def gaussian_sketch(
    a: jax.Array, size: int, *, key: jax.Array, axis_name: types.AxisName = None
) -> jax.Array:
    """Return S A, where S [size, m] has independent normal numbers of variance 1 / size.

    It costs 2 size m n operations. Split over P devices, each draws its own columns of S, and the
    sum is one all-reduce of size x n words.

    Args:
      a: Rows of this device, [m / P, n], inside `shard_map`; the whole matrix without an axis.
      size: Number of rows of the sketch.
      key: Key of `jax.random`, the same on all devices.
      axis_name: The mapped axis over which the rows are split; None for none.

    Returns:
      The sketch [size, n], the same on all devices, in fp32 or wider.

    >>> import jax, jax.numpy as jnp
    >>> gaussian_sketch(jnp.ones((8, 3)), 5, key=jax.random.key(0)).shape
    (5, 3)
    """
    size = _scalars.whole("size", size)
    wide = a.astype(tree.wide_dtype(a.dtype))
    own = key if axis_name is None else jax.random.fold_in(key, jax.lax.axis_index(axis_name))
    normal = jax.random.normal(own, (size, a.shape[0]), wide.dtype)
    sketch = matmul(normal, wide) / math.sqrt(size)
    return sketch if axis_name is None else jax.lax.psum(sketch, axis_name)


def srht(a: jax.Array, size: int, *, key: jax.Array, axis_name: types.AxisName = None) -> jax.Array:
    r"""Return a subsampled randomized Hadamard transform of A: sqrt(p / size) R H D A.

    D are random signs, H is the normalised Hadamard matrix of order p, the smallest power of two
    that is at least m, and R takes `size` of its rows at random. It costs m n log2 p operations,
    less than a Gaussian sketch if size > log2 p. Split over devices, each transforms its own rows
    with signs and rows of its own, and the sum, divided by sqrt(P), is one all-reduce of size x n
    words.

    Args:
      a: Rows of this device, [m / P, n], inside `shard_map`; the whole matrix without an axis.
      size: Number of rows of the sketch, at most p.
      key: Key of `jax.random`, the same on all devices.
      axis_name: The mapped axis over which the rows are split; None for none.

    Returns:
      The sketch [size, n], the same on all devices, in fp32 or wider.

    Raises:
      UserError: If `size` is more than p.

    >>> import jax, jax.numpy as jnp
    >>> srht(jnp.ones((6, 3)), 4, key=jax.random.key(0)).shape
    (4, 3)

    References:
      Tropp, Improved Analysis of the Subsampled Randomized Hadamard Transform, arXiv:1011.1595v4.
      Balabanov, Beaupere, Grigori, Lederer, Block Subsampled Randomized Hadamard Transform,
      arXiv:2210.11295 (the form over devices).
    """
    size = _scalars.whole("size", size)
    rows = a.shape[0]
    order = 1 << max(rows - 1, 0).bit_length()
    if size > order:
        fix = f"the transform has {order} rows for a matrix of {rows}; give at most {order}"
        raise UserError("size", size, fix)

    wide = a.astype(tree.wide_dtype(a.dtype))
    own = key if axis_name is None else jax.random.fold_in(key, jax.lax.axis_index(axis_name))
    for_signs, for_rows, for_phases = jax.random.split(own, 3)
    signs = jax.random.rademacher(for_signs, (rows, 1), tree.real_dtype(wide.dtype))
    padded = jnp.pad(wide * signs, ((0, order - rows), (0, 0)))
    chosen = jax.random.choice(for_rows, order, (size,), replace=False)
    # The scale is sqrt(order / size) for the rows that are taken, 1 / sqrt(order) for H.
    sketch = _hadamard(padded)[chosen] / math.sqrt(size)
    if axis_name is None:
        return sketch

    # Blocks add up without bias only if the rows of each have random signs of their own.
    phases = jax.random.rademacher(for_phases, (size, 1), signs.dtype)
    return jax.lax.psum(sketch * phases, axis_name)


def _hadamard(x: jax.Array) -> jax.Array:
    """Return the unnormalised Walsh-Hadamard transform of the rows, whose number is 2^k."""
    rows, columns = x.shape
    half = 1
    while half < rows:
        pairs = x.reshape(rows // (2 * half), 2, half, columns)
        x = jnp.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
        half *= 2
    return x.reshape(rows, columns)
