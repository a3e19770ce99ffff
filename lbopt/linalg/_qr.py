"""QR factorizations of tall matrices over a mapped axis, and of products of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from lbopt import errors, tree, types
from lbopt.errors import UserError, require_choice
from lbopt.linalg._matmul import matmul
from lbopt.linalg._stacks import of_each

_FAR = 5 / 64
"""Distance of Q^T Q from I beyond which a second pass of CholeskyQR may not mend it (Yamamoto)."""


def tsqr(a: jax.Array, axis_name: types.AxisName = None) -> tuple[jax.Array, jax.Array]:
    r"""Factor a tall matrix whose rows are split over a mapped axis: A = Q R.

        A_i = Q_i R_i on each device;  then in log2 P rounds, partners i and j (i < j):
        [R_i; R_j] = W R ;   Q_i <- Q_i W_top ,  Q_j <- Q_j W_bottom ,  R_i = R_j = R

    It is as stable as Householder's QR: the orthogonality and the backward error are a modest
    multiple of the unit roundoff for every condition number. Each device sends log2 P messages of
    n^2 words. Where the number of devices is no power of two, one all-gather of n^2 words replaces
    the rounds. The diagonal of R is >= 0, so for full rank the result does not depend on P.

    Args:
      a: Rows of this device, [m / P, n], floating point or complex, inside `shard_map`; the whole
        matrix [m, n] without an axis. A device may have fewer rows than columns.
      axis_name: The mapped axis, or axes, over which the rows are split; None for none.

    Returns:
      Q, the rows of this device, [m / P, k], and R, the same on all, [k, n], k = min(m, n), both in
      the dtype of `a`, computed in fp32 or wider. `shard_map` cannot see that R is the same: it
      needs `check_vma=False` where R leaves it as replicated.

    Raises:
      UserError: If `a` is no matrix.

    >>> import jax.numpy as jnp
    >>> q, r = tsqr(jnp.array([[3.0, 0.0], [4.0, 1.0]]))
    >>> bool(jnp.allclose(q @ r, jnp.array([[3.0, 0.0], [4.0, 1.0]]), atol=1e-6)), float(r[0, 0])
    (True, 5.0)

    References:
      Demmel, Grigori, Hoemmen, Langou, Communication-optimal Parallel and Sequential QR and LU
      Factorizations, arXiv:0808.2664, section 4. Ballard, Demmel, Grigori, Jacquelin, Knight,
      Nguyen, Reconstructing Householder Vectors from TSQR, 2015.
    """
    _require_matrix("a", a)
    q, r = jnp.linalg.qr(a.astype(tree.wide_dtype(a.dtype)))
    if axis_name is not None:
        count = jax.lax.axis_size(axis_name)
        is_power = count & (count - 1) == 0
        # The rounds exchange factors of one shape: square ones.
        if is_power and a.shape[0] >= a.shape[1]:
            q, r = _butterfly(q, r, axis_name, count)
        else:
            q, r = _gathered(q, r, axis_name)
    q, r = _with_positive_diagonal(q, r)
    return q.astype(a.dtype), r.astype(a.dtype)


def _butterfly(
    q: jax.Array, r: jax.Array, axis_name: types.AxisName, count: int
) -> tuple[jax.Array, jax.Array]:
    """Combine the factors of pairs of devices in rounds; all devices end with the same R."""
    place = jax.lax.axis_index(axis_name)
    n = r.shape[1]
    distance = 1
    while distance < count:
        partners = [(i, i ^ distance) for i in range(count)]
        other = jax.lax.ppermute(r, axis_name, partners)
        is_top = (place & distance) == 0
        pair = jnp.where(is_top, jnp.concatenate([r, other]), jnp.concatenate([other, r]))

        # Both partners factor the same pair, so their R agree bit for bit.
        joint, r = jnp.linalg.qr(pair)
        own = jnp.where(is_top, joint[:n], joint[n:])
        q = matmul(q, own)
        distance *= 2
    return q, r


def _gathered(q: jax.Array, r: jax.Array, axis_name: types.AxisName) -> tuple[jax.Array, jax.Array]:
    rows = r.shape[0]
    joint, r = jnp.linalg.qr(jax.lax.all_gather(r, axis_name, tiled=True))
    start = jax.lax.axis_index(axis_name) * rows
    own = jax.lax.dynamic_slice_in_dim(joint, start, rows)
    return matmul(q, own), r


def _with_positive_diagonal(q: jax.Array, r: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the factors with the phases of R's diagonal moved to Q."""
    diagonal = jnp.diagonal(r, axis1=-2, axis2=-1)
    size = jnp.abs(diagonal)
    phase = jnp.where(size > 0, diagonal / jnp.where(size > 0, size, 1), 1).astype(r.dtype)
    return q * phase[..., None, :], jnp.conj(phase)[..., :, None] * r


def cholesky_qr2(
    a: jax.Array,
    axis_name: types.AxisName = None,
    fallback: Literal["tsqr", "none"] = "tsqr",
) -> tuple[jax.Array, jax.Array]:
    r"""Factor a tall matrix by two passes of CholeskyQR: A = Q R.

        R_1^T R_1 = A^T A ,      Q_1 = A R_1^-1
        R_2^T R_2 = Q_1^T Q_1 ,  Q = Q_1 R_2^-1 ,  R = R_2 R_1

    All work is matrix products and triangular solves, and each pass is one all-reduce of n^2 words.
    The columns are divided by their norms first. In fp32 the result is orthogonal to roundoff for
    condition numbers up to about 1e3 of the scaled matrix. Beyond, Q_1 is far from orthogonal,
    which the second all-reduce shows, and the fallback is used.

    Args:
      a: Rows of this device, [m / P, n], inside `shard_map`; the whole matrix [m, n] without an
        axis.
      axis_name: The mapped axis, or axes, over which the rows are split; None for none.
      fallback: Factorization where CholeskyQR2 fails: "tsqr", or "none" for a Q that is not
        orthogonal or not finite.

    Returns:
      Q, the rows of this device, [m / P, n], and R, the same on all, [n, n], in the dtype of `a`,
      computed in fp32 or wider. The diagonal of R is >= 0.

    Raises:
      UserError: If `a` is no matrix, is wider than tall, or the fallback is unknown.

    >>> import jax.numpy as jnp
    >>> q, r = cholesky_qr2(jnp.array([[3.0, 0.0], [4.0, 1.0], [0.0, 2.0]]))
    >>> float(jnp.abs(q.T @ q - jnp.eye(2)).max()) < 1e-6
    True

    References:
      Yamamoto, Nakatsukasa, Yanagisawa, Fukaya, Roundoff Error Analysis of the CholeskyQR2
      Algorithm, ETNA 44, 2015, equation 3.1 and Theorem 3.1.
    """
    _require_matrix("a", a)
    require_choice("fallback", fallback, ("tsqr", "none"))
    count = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    rows = a.shape[0] * count
    if rows < a.shape[1]:
        fix = f"{rows} rows and {a.shape[1]} columns; give a tall matrix, or its transpose"
        raise UserError("a", reason=fix)

    wide = a.astype(tree.wide_dtype(a.dtype))
    # Columns of one length: bad scaling alone then needs no fallback.
    norms = tree.squares([wide], (1,)).over(axis_name).norm().reshape(1, -1)
    norms = jnp.where(norms > 0, norms, 1)
    q1, r1 = _cholesky_pass(wide / norms, _gram(wide / norms, axis_name))
    gram = _gram(q1, axis_name)
    q, r2 = _cholesky_pass(q1, gram)
    r = matmul(r2, r1) * norms
    if fallback == "tsqr":
        distance = jnp.linalg.norm(gram - jnp.eye(gram.shape[0], dtype=gram.dtype))
        # A comparison with NaN is false, which asks for the fallback too.
        is_near = distance <= _FAR
        q, r = jax.lax.cond(is_near, lambda: (q, r), lambda: tsqr(wide, axis_name))
    return q.astype(a.dtype), r.astype(a.dtype)


def _gram(x: jax.Array, axis_name: types.AxisName) -> jax.Array:
    gram = matmul(x.conj().T, x)
    return gram if axis_name is None else jax.lax.psum(gram, axis_name)


def _cholesky_pass(x: jax.Array, gram: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return X R^-1 and R of R^T R = `gram`."""
    lower = jax.lax.linalg.cholesky(gram, symmetrize_input=False)
    q = jax.lax.linalg.triangular_solve(
        lower, x, left_side=False, lower=True, transpose_a=True, conjugate_a=True
    )
    return q, lower.conj().T


def orthonormal_basis(a: jax.Array) -> jax.Array:
    r"""Return an orthonormal basis of the columns of tall matrices, by two passes of CholeskyQR.

        R_1^T R_1 = A^T A ,      Q_1 = A R_1^-1 ;      R_2^T R_2 = Q_1^T Q_1 ,  Q = Q_1 R_2^-1

    It is the Q of `cholesky_qr2` for stacks of whole matrices, with the inverses of the small
    triangles multiplied out: all work on A is matrix products. If a matrix of the stack is too
    ill-conditioned, or singular, all of them take Householder's QR.

    Args:
      a: Matrices [..., m, n], m >= n, floating point or complex.

    Returns:
      The bases, in the shape and dtype of `a`, computed in fp32 or wider. The first j columns are a
      basis of the first j columns of `a`, each up to its sign.

    Raises:
      UserError: If `a` is no matrix, or is wider than tall.

    >>> import jax.numpy as jnp
    >>> q = orthonormal_basis(jnp.array([[3.0, 0.0], [4.0, 1.0], [0.0, 2.0]]))
    >>> float(jnp.abs(q.T @ q - jnp.eye(2)).max()) < 1e-6
    True

    References:
      Yamamoto et al. (see `cholesky_qr2`), equation 3.1 and Theorem 3.1.
    """
    shape = jnp.shape(a)
    if len(shape) < 2 or shape[-2] < shape[-1]:
        raise UserError("a", reason=f"shape {shape}; give matrices [..., m, n] with m >= n")
    wide = a.astype(tree.wide_dtype(a.dtype))
    largest = jnp.max(jnp.abs(wide), (-2, -1), keepdims=True, initial=0)
    wide = wide / jnp.where(largest > 0, largest, 1)  # squares stay finite
    norms = jnp.linalg.norm(wide, axis=-2, keepdims=True)
    wide = wide / jnp.where(norms > 0, norms, 1)

    q, _ = _pass_by_inverse(wide)
    q, distance = _pass_by_inverse(q)
    # A comparison with NaN is false, which asks for the other factorization too.
    is_near = jnp.all(distance <= _FAR)
    return jax.lax.cond(is_near, lambda: q, lambda: of_each(_orthonormal, wide)).astype(a.dtype)


def _orthonormal(a: jax.Array) -> jax.Array:
    return jnp.linalg.qr(a).Q


def _pass_by_inverse(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return X R^-1 of R^T R = X^T X, and the distance of X^T X from I."""
    gram = matmul(x.conj().mT, x)
    identity = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=gram.dtype), gram.shape)
    inverse = of_each(_inverse_of_lower, gram, identity)
    return matmul(x, inverse.conj().mT), jnp.linalg.norm(gram - identity, axis=(-2, -1))


def _inverse_of_lower(gram: jax.Array, identity: jax.Array) -> jax.Array:
    """Return L^-1 of L L^H = `gram`."""
    lower = jax.lax.linalg.cholesky(gram, symmetrize_input=False)
    return jax.lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True)


class Grqr(NamedTuple):
    """A rank-revealing factorization of a product of matrices.

    Attributes:
      u: Unitary matrix [n, n].
      r: One upper triangular matrix [n, n] for each factor.
      v: Unitary matrix [n, n].
    """

    u: jax.Array
    r: tuple[jax.Array, ...]
    v: jax.Array


def grqr(
    factors: Sequence[jax.Array], inverted: Sequence[bool] | None = None, *, key: jax.Array
) -> Grqr:
    r"""Factor a product of square matrices and inverses, without the product or an inverse.

        A_1^(s_1) ... A_k^(s_k) = U R_1^(s_1) ... R_k^(s_k) V ,   s = 1 or -1

    V is Haar-distributed, drawn from `key`. With high probability the triangular product reveals
    the rank: its leading block has the large singular values of the product, up to a factor of
    about n. Each factor costs one QR or RQ factorization, which is backward stable whatever the
    condition of the factor. It has no distributed form: all matrices are whole.

    Args:
      factors: k >= 1 square matrices [n, n] of one size and dtype.
      inverted: Whether each factor stands inverted in the product; None for none.
      key: Key of `jax.random`, for V.

    Returns:
      The factors U, R_1 to R_k and V, in fp32 or wider.

    Raises:
      UserError: If the factors are no square matrices of one size, or `inverted` has another
        length.

    >>> import jax, jax.numpy as jnp
    >>> a, b = jnp.array([[2.0, 1.0], [0.0, 1.0]]), jnp.array([[1.0, 0.0], [3.0, 1.0]])
    >>> u, (ra, rb), v = grqr([a, b], [False, True], key=jax.random.key(0))
    >>> bool(jnp.allclose(u @ ra @ jnp.linalg.inv(rb) @ v, a @ jnp.linalg.inv(b), atol=1e-5))
    True

    References:
      Ballard, Demmel, Dumitriu, Rusciano, A Generalized Randomized Rank-Revealing Factorization,
      arXiv:1909.06524v1, Algorithm 3 (GRURV).
    """
    signs = [False] * len(factors) if inverted is None else list(inverted)
    _check_factors(factors, signs)
    wide = [factor.astype(tree.wide_dtype(factor.dtype)) for factor in factors]
    n = wide[0].shape[0]
    v, _ = _with_positive_diagonal(*jnp.linalg.qr(jax.random.normal(key, (n, n), wide[0].dtype)))

    # The last factor is multiplied by the random matrix; the others carry the basis to the left.
    basis = v.conj().T
    triangles = []
    for factor, is_inverted in zip(reversed(wide), reversed(signs), strict=True):
        if is_inverted:
            # basis^H A = R Q, so A^-1 basis = Q^H R^-1.
            r, q = _rq(matmul(basis.conj().T, factor))
            basis = q.conj().T
        else:
            basis, r = jnp.linalg.qr(matmul(factor, basis))
        triangles.append(r)
    return Grqr(basis, tuple(reversed(triangles)), v)


def _rq(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return R and Q of A = R Q, by the QR factorization of A with its rows reversed."""
    q, r = jnp.linalg.qr(a[::-1].conj().T)
    return r.conj().T[::-1, ::-1], q.conj().T[::-1]


def _check_factors(factors: Sequence[jax.Array], signs: Sequence[bool]) -> None:
    shapes = [jnp.shape(factor) for factor in factors]
    is_square = [len(shape) == 2 and shape == shapes[0][:1] * 2 for shape in shapes]
    if not shapes or not all(is_square):
        fix = f"shapes {shapes}; give square matrices of one size"
        raise UserError("factors", reason=fix, code="type")
    errors.require(
        len(signs) == len(shapes), "inverted", signs, f"give {len(shapes)} bools, one for a factor"
    )


def _require_matrix(argument: str, a: jax.Array) -> None:
    if jnp.ndim(a) != 2:
        fix = f"its shape is {jnp.shape(a)}; give a matrix, and use jax.vmap for several"
        raise UserError(argument, reason=fix, code="type")
