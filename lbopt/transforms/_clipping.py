"""Clipping by the global norm, taken in fp32 and kept for the log."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, masks, tree, types


class ClipState(NamedTuple):
    """The global norm of the last update.

    Attributes:
      global_norm: fp32 scalar, norm before clipping; 0 before the first update.
    """

    global_norm: jax.Array


def clip_by_global_norm(
    max_norm: float | jax.Array,
    eps: float | jax.Array = 0.0,
    *,
    axis_name: types.AxisName = None,
    sharded_mask: types.Mask = None,
) -> optax.GradientTransformation:
    """Scale all updates by min(1, max_norm / (G + eps)), G the L2 norm over every leaf together.

    Args:
      max_norm: Largest global norm that passes unchanged, > 0.
      eps: Constant >= 0 added to the norm before the division. It is 1e-6 in PyTorch's
        clip_grad_norm_, pytorch/pytorch@01a57d87bd4826d1f528b2dc47360a8087b34f5a:
        torch/nn/utils/clip_grad.py.
      axis_name: Inside `shard_map`, the mapped axis over which leaves are split; squares are
        summed over it.
      sharded_mask: Mask of the leaves that are split over `axis_name`; None for all.

    Returns:
      A transform whose state is `ClipState`; its output keeps the dtype of the updates.

    Raises:
      UserError: If `max_norm` is not above 0, or `eps` is below 0.

    >>> import jax.numpy as jnp
    >>> tx = clip_by_global_norm(1.0)
    >>> updates, state = tx.update({"a": jnp.array([3.0]), "b": jnp.array([4.0])}, tx.init(None))
    >>> [round(float(leaf[0]), 6) for leaf in updates.values()], float(state.global_norm)
    ([0.6, 0.8], 5.0)

    Note:
      `optax.clip_by_global_norm`, with the norm and the division in fp32 (or wider) whatever the
      dtype of the updates, right on the shards inside `shard_map`, and with the norm kept in the
      state. In fp32 the norm is right from 1e-33 to 1e34; that of Optax is infinite from 1.8e19 on,
      and its update 0.
    """
    _scalars.require_above("max_norm", max_norm, 0)
    _scalars.require_at_least("eps", eps, 0)

    def init_fn(params: types.Params) -> ClipState:
        del params
        return ClipState(jnp.zeros((), jnp.float32))

    def update_fn(
        updates: optax.Updates, state: ClipState, params: types.Params | None = None
    ) -> tuple[optax.Updates, ClipState]:
        del state, params
        total = global_norm(updates, axis_name, sharded_mask)
        clipped = scale_to_norm(updates, total, max_norm, eps)
        return clipped, ClipState(total.astype(jnp.float32))

    return optax.GradientTransformation(init_fn, update_fn)


def global_norm(
    updates: optax.Updates, axis_name: types.AxisName = None, sharded_mask: types.Mask = None
) -> jax.Array:
    """Return the L2 norm over every leaf together, a scalar in fp32 or wider.

    Args:
      updates: Floating-point or complex arrays.
      axis_name: Inside `shard_map`, the mapped axis over which leaves are split.
      sharded_mask: Mask of the leaves that are split over `axis_name`; None for all.

    >>> import jax.numpy as jnp
    >>> print(global_norm({"a": jnp.array([3.0]), "b": jnp.array([4.0])}))
    5.0
    """
    tree.check_inexact(updates, "updates")
    split = masks.resolve_split(sharded_mask, axis_name, updates)
    # Leaves that every shard holds whole are counted once, not once per shard.
    pairs = list(zip(jax.tree.leaves(updates), jax.tree.leaves(split.leaves), strict=True))
    whole = tree.squares(leaf for leaf, is_split in pairs if not is_split)
    if not any(is_split for _, is_split in pairs):
        return whole.norm()
    shards = tree.squares(leaf for leaf, is_split in pairs if is_split).over(axis_name)
    return tree.Squares(*map(jnp.add, whole, shards)).norm()


def scale_to_norm(
    updates: optax.Updates,
    norm: jax.Array,
    max_norm: float | jax.Array,
    eps: float | jax.Array = 0.0,
) -> optax.Updates:
    """Return the updates times min(1, max_norm / (norm + eps)), in their own dtypes."""
    # Equal to min(1, ...), without a division by a norm of 0.
    scale = max_norm / jnp.maximum(norm + eps, max_norm)

    def scaled(u: jax.Array) -> jax.Array:
        return tree.scaled(u.astype(tree.wide_dtype(u.dtype)), scale).astype(u.dtype)

    return jax.tree.map(scaled, updates)
