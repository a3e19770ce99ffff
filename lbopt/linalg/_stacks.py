"""Factorizations of stacks of matrices, without a deadlock on CPUs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax

_Factors = TypeVar("_Factors")


def of_each(factor: Callable[..., _Factors], *stacks: jax.Array) -> _Factors:
    """Return the factors of every matrix of a stack, or what is made of several of them.

    On a CPU one matrix follows the other. There jaxlib hands the matrices of a stack to the threads
    that run the program, and waits for them on such a thread: where a program factors as many
    stacks at once as it has threads, all of them wait for ever (seen with jaxlib 0.10.2 on 2 cores
    for eigh, QR and Cholesky; an issue on the same code is jax-ml/jax#39292). `jax.vmap` makes a
    stack again, which this function does not see.

    Args:
      factor: Takes matrices [..., m, n] of each stack, and returns arrays with their leading axes.
      *stacks: Matrices [..., m, n], with the same leading axes.

    >>> import jax.numpy as jnp
    >>> of_each(jnp.linalg.cholesky, jnp.full((3, 1, 1), 4.0)).ravel().tolist()
    [2.0, 2.0, 2.0]
    """
    leading = stacks[0].shape[:-2]
    count = math.prod(leading)
    if count <= 1:
        return factor(*stacks)

    def in_turn(*stacks: jax.Array) -> Any:
        flat = [stack.reshape(count, *stack.shape[-2:]) for stack in stacks]
        each = jax.lax.map(lambda matrices: factor(*matrices), flat)
        return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), each)

    return jax.lax.platform_dependent(*stacks, cpu=in_turn, default=factor)
