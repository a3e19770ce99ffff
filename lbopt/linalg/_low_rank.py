"""Low-rank approximations from sketches: a randomized range finder and generalised LU."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from lbopt import _scalars, tree, types
from lbopt.errors import UserError, require_choice
from lbopt.linalg import _qr, _sketch
from lbopt.linalg._matmul import matmul

Sketch = Literal["gaussian", "srht"]
_SKETCHES = {"gaussian": _sketch.gaussian_sketch, "srht": _sketch.srht}


class LowRank(NamedTuple):
    """A matrix of low rank, left @ right.

    Attributes:
      left: The rows of this device, [m / P, k].
      right: [k, n], the same on all devices.
    """

    left: jax.Array
    right: jax.Array


def range_finder(
    a: jax.Array,
    rank: int,
    *,
    key: jax.Array,
    sketch: Sketch = "gaussian",
    oversampling: int = 8,
    power_iterations: int = 0,
    axis_name: types.AxisName = None,
) -> jax.Array:
    r"""Return an orthonormal basis Q of nearly the range of A, so that A is nearly Q Q^T A.

        Q = orth(A S^T) ;   once an iteration: Q = orth(A orth(A^T Q))

    The expected error of rank + oversampling columns is close to that of the best approximation of
    this rank, and closer with iterations where the singular values fall slowly. Over P devices each
    iteration is one all-reduce of n (rank + oversampling) words and one TSQR.

    Args:
      a: Rows of this device, [m / P, n], inside `shard_map`; the whole matrix without an axis.
      rank: Rank r >= 1 of the approximation.
      key: Key of `jax.random`, the same on all devices.
      sketch: Random matrix S: "gaussian", or "srht" (see `lbopt.linalg.srht`).
      oversampling: Number of columns beyond the rank.
      power_iterations: Number of iterations.
      axis_name: The mapped axis over which the rows are split; None for none.

    Returns:
      Q, the rows of this device, [m / P, min(r + oversampling, m, n)], in fp32 or wider.

    Raises:
      UserError: If the rank is above the smaller side of the matrix.

    >>> import jax, jax.numpy as jnp
    >>> a = jnp.outer(jnp.arange(4.0), jnp.ones(3))
    >>> q = range_finder(a, 1, key=jax.random.key(0), oversampling=0)
    >>> bool(jnp.allclose(q @ (q.T @ a), a, atol=1e-5))
    True

    References:
      Halko, Martinsson, Tropp, Finding Structure with Randomness, arXiv:0909.4061v2, Algorithms 4.1
      and 4.4, Theorem 10.5.
    """
    width = _width(a, rank, oversampling, axis_name)
    require_choice("sketch", sketch, _SKETCHES)
    wide = a.astype(tree.wide_dtype(a.dtype))
    adjoint = wide.conj().T
    # A S^T = (S A^T)^T: the columns of A are whole on each device.
    q, _ = _qr.tsqr(_SKETCHES[sketch](adjoint, width, key=key).conj().T, axis_name)

    for _ in range(_scalars.whole("power_iterations", power_iterations, low=0)):
        back = matmul(adjoint, q)
        back = back if axis_name is None else jax.lax.psum(back, axis_name)
        across, _ = _qr.tsqr(back)
        q, _ = _qr.tsqr(matmul(wide, across), axis_name)
    return q


def glu(
    a: jax.Array,
    rank: int,
    *,
    key: jax.Array,
    sketch: Sketch = "gaussian",
    oversampling: int = 8,
    axis_name: types.AxisName = None,
) -> LowRank:
    r"""Approximate A by a generalised LU factorization of two sketches.

        A ~ [U^+ (I - (U A V)(U A V)^+) + (A V)(U A V)^+] (U A) ,   U [l', m], V [n, l], l' >= l

    Both sketches are linear in A: over P devices one all-reduce of l' (n + l) words is all. With
    l' = l it is A V (U A V)^-1 U A, the generalised Nystrom form, which is unstable; so l' is twice
    l here. Its error is a few times that of the best approximation; a range finder with one power
    iteration is nearer to it for a second pass over A.

    Args:
      a: Rows of this device, [m / P, n], inside `shard_map`; the whole matrix without an axis.
      rank: Rank r >= 1 of the approximation; l = r + oversampling.
      key: Key of `jax.random`, the same on all devices.
      sketch: Random matrix on the left: "gaussian", or "srht". The right one is Gaussian.
      oversampling: Number of columns beyond the rank.
      axis_name: The mapped axis over which the rows are split; None for none.

    Returns:
      The factors, in fp32 or wider. Without an axis the rank is at most 2 l, and l over an axis,
      where the part outside of the range of A V, which needs U^+, is left out.

    Raises:
      UserError: If the rank is above the smaller side of the matrix.

    >>> import jax, jax.numpy as jnp
    >>> a = jnp.outer(jnp.arange(8.0), jnp.ones(6))
    >>> left, right = glu(a, 1, key=jax.random.key(0), oversampling=2)
    >>> bool(jnp.allclose(left @ right, a, atol=1e-4))
    True

    References:
      Demmel, Grigori, Rusciano, An Improved Analysis and Unified Perspective on Deterministic and
      Randomized Low Rank Matrix Approximations, arXiv:1910.00223v1, equation 1.2.
    """
    width = _width(a, rank, oversampling, axis_name)
    require_choice("sketch", sketch, _SKETCHES)
    wide = a.astype(tree.wide_dtype(a.dtype))
    for_left, for_right = jax.random.split(key)
    rows = a.shape[0] if axis_name is None else a.shape[0] * jax.lax.axis_size(axis_name)
    tall = min(2 * width, rows)

    # A V is local; one sketch of [A, A V] gives U A and U A V.
    normal = jax.random.normal(for_right, (a.shape[1], width), wide.dtype)
    right_sketch = matmul(wide, normal)
    both = jnp.concatenate([wide, right_sketch], axis=1)
    if axis_name is None:
        # U itself is needed for its pseudo-inverse.
        u = _SKETCHES[sketch](jnp.eye(rows, dtype=wide.dtype), tall, key=for_left)
        sketched = matmul(u, both)
    else:
        u = None
        sketched = _SKETCHES[sketch](both, tall, key=for_left, axis_name=axis_name)
    left_sketch, core = jnp.split(sketched, [a.shape[1]], axis=1)

    q, r = _qr.tsqr(core)
    # R may be singular, where A has a lower rank.
    through = jnp.linalg.pinv(r)
    left = matmul(matmul(right_sketch, through), q.conj().T)
    if u is not None:
        rest = jnp.eye(tall, dtype=wide.dtype) - matmul(q, q.conj().T)
        left = left + matmul(jnp.linalg.pinv(u), rest)
    return LowRank(left, left_sketch)


def _width(a: jax.Array, rank: int, oversampling: int, axis_name: types.AxisName) -> int:
    """Return rank + oversampling, at most the smaller side of the matrix."""
    _qr._require_matrix("a", a)
    rank = _scalars.whole("rank", rank)
    count = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    smaller = min(a.shape[0] * count, a.shape[1])
    if rank > smaller:
        fix = f"the smaller side of the matrix is {smaller}; give at most that"
        raise UserError("rank", rank, fix)
    return min(rank + _scalars.whole("oversampling", oversampling, low=0), smaller)
