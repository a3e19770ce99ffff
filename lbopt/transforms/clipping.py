"""Clipping by the global norm, taken in fp32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from lbopt import tree, types
from lbopt.transforms import arguments


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scale all updates by min(1, max_norm / G), G the L2 norm over every leaf together.

    Args:
      max_norm: the largest global norm that passes unchanged, > 0.

    Returns:
      A stateless transform; its output keeps the dtype of the updates.

    Raises:
      ValueError: if `max_norm` is not above 0.

    >>> import jax.numpy as jnp
    >>> tx = clip_by_global_norm(1.0)
    >>> updates, _ = tx.update({"a": jnp.array([3.0]), "b": jnp.array([4.0])}, tx.init(None))
    >>> [round(float(leaf[0]), 6) for leaf in updates.values()]
    [0.6, 0.8]

    Note:
      `optax.clip_by_global_norm` with the norm and the division in fp32 (or wider) whatever the dtype of the updates.
    """
    arguments.require_above("max_grad_norm", max_norm, 0)

    def update_fn(updates: optax.Updates, state: optax.EmptyState, params: types.Params | None = None):
        del params
        norms = [tree.l2_norm(leaf) for leaf in jax.tree.leaves(updates)]
        total = jnp.sqrt(sum(jnp.square(norm) for norm in norms)) if norms else jnp.zeros(())
        scale = max_norm / jnp.maximum(total, max_norm)
        return jax.tree.map(lambda u: (u.astype(tree.wide_dtype(u.dtype)) * scale).astype(u.dtype), updates), state

    return optax.GradientTransformation(optax.init_empty_state, update_fn)
