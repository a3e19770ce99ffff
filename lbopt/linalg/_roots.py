"""Inverse roots of symmetric positive semidefinite matrices."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from lbopt import _scalars, tree
from lbopt.errors import require_choice
from lbopt.linalg._matmul import matmul
from lbopt.linalg._stacks import of_each


def inverse_root(
    a: jax.Array,
    root: float,
    *,
    eps: float | jax.Array = 1e-12,
    method: Literal["eigh", "newton"] = "eigh",
    steps: int = 30,
) -> jax.Array:
    r"""Return (A + eps I)^(-1 / root) of each symmetric matrix A.

    If the least eigenvalue l is below 0, A - l I takes the place of A.

    "eigh" takes the roots of the eigenvalues. "newton" iterates products alone, which suits
    accelerators, where eigenvalues are slow: with p = root and the largest eigenvalue m of A,

        M_0 = z (A + eps m I) ,  z = (1 + p) / (2 ||A + eps m I||) ,  X_0 = z^(1/p) I
        W = (1 + 1/p) I - M / p ;   X <- X W ,  M <- W^p M

    until M is I; eps is then relative to m.

    Args:
      a: Symmetric matrices [..., n, n], floating point.
      root: The root p > 0; a whole number for "newton".
      eps: Ridge >= 0; may be traced.
      method: "eigh" or "newton".
      steps: Largest number of Newton steps.

    Returns:
      Symmetric matrices of the shape of `a`, in fp32 or wider. A zero matrix gives
      eps^(-1 / root) I by "eigh", and zero by "newton".

    Raises:
      UserError: For a root that is not above 0, or that Newton's iteration does not have.

    >>> import jax.numpy as jnp
    >>> root = inverse_root(jnp.diag(jnp.array([16.0, 1.0])), 4, eps=0.0)
    >>> [round(float(number), 4) for number in jnp.diag(root)]
    [0.5, 1.0]

    References:
      Gupta, Koren, Singer, Shampoo, arXiv:1802.09568v2, Algorithm 1 (the roots).
      Guo, Higham, A Schur-Newton Method for the Matrix p-th Root and its Inverse, 2006; Anil et
      al., Scalable Second Order Optimization for Deep Learning, arXiv:2002.09018v2, section 5
      (the coupled iteration).
    """
    require_choice("method", method, ("eigh", "newton"))
    _scalars.require_above("root", root, 0)
    wide = a.astype(tree.wide_dtype(a.dtype))
    if method == "newton":
        return _newton(wide, _scalars.whole("root", root), eps, _scalars.whole("steps", steps))

    values, vectors = of_each(lambda each: tuple(jnp.linalg.eigh(each)), wide)
    values = values - jnp.minimum(values[..., :1], 0) + eps
    powers = jnp.where(values > 0, jnp.where(values > 0, values, 1) ** (-1 / root), 0)
    scaled = vectors * powers[..., None, :]
    return matmul(scaled, vectors.mT)


def _newton(a: jax.Array, root: int, eps: float | jax.Array, steps: int) -> jax.Array:
    n = a.shape[-1]
    eye = jnp.eye(n, dtype=a.dtype)
    # The Frobenius norm bounds the largest eigenvalue, within a factor of sqrt(n).
    norm = tree.l2_norm(a, tuple(range(a.ndim - 2)))
    below = jnp.where(norm > 0, norm, 1)
    ridged = a / below + eps * eye
    z = (1 + root) / (2 * tree.l2_norm(ridged, tuple(range(a.ndim - 2))))

    def step(pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, m = pair
        w = (1 + 1 / root) * eye - m / root
        power = w
        for _ in range(root - 1):
            power = matmul(power, w)
        return matmul(x, w), matmul(power, m)

    def goes_on(loop: tuple[jax.Array, tuple[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        count, (_, m), before = loop
        error = jnp.max(jnp.abs(m - eye))
        # Roundoff ends the fall of the error; beyond, the iteration drifts.
        return (count < steps) & (error > 1e-6) & (error < before)

    def body(loop: tuple[jax.Array, tuple[jax.Array, jax.Array], jax.Array]):
        count, pair, _ = loop
        return count + 1, step(pair), jnp.max(jnp.abs(pair[1] - eye)) * 1.2

    first = (z ** (1 / root) * eye, z * ridged)
    loop = (jnp.zeros((), jnp.int32), first, jnp.full((), jnp.inf, a.dtype))
    _, (x, _), _ = jax.lax.while_loop(goes_on, body, loop)
    return jnp.where(norm > 0, x * below ** (-1 / root), 0)
