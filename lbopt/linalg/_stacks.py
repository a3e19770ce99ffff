"""Factorizations of stacks of matrices, without a deadlock on CPUs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import jax

_Factors = TypeVar("_Factors")


def of_each(factor: Callable[[jax.Array], _Factors], a: jax.Array) -> _Factors:
    """Return the factors of every matrix of a stack.

    On a CPU one matrix follows the other. There jaxlib hands the matrices of a stack to the threads
    that run the program, and waits for them on such a thread: where a program factors as many
    stacks at once as it has threads, all of them wait for ever (seen with jaxlib 0.10.2 on 2 cores
    for eigh, QR and Cholesky; an issue on the same code is jax-ml/jax#39292).

    Args:
      factor: Returns the factors of [..., m, n] as arrays with the same leading axes.
      a: Matrices [..., m, n].

    >>> import jax.numpy as jnp
    >>> of_each(jnp.linalg.cholesky, jnp.full((3, 1, 1), 4.0)).ravel().tolist()
    [2.0, 2.0, 2.0]
    """
    leading = a.shape[:-2]
    if math.prod(leading) <= 1:
        return factor(a)

    def in_turn(a: jax.Array) -> _Factors:
        each = jax.lax.map(factor, a.reshape(-1, *a.shape[-2:]))
        return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), each)

    return jax.lax.platform_dependent(a, cpu=in_turn, default=factor)
