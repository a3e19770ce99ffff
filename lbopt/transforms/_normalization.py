"""Gradients divided by their own norm."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import optax

from lbopt import masks, stacks, tree, types
from lbopt.errors import require_choice
from lbopt.transforms import _clipping

Per = Literal["layer", "global"]
PER = ("layer", "global")


def normalize_gradients(
    per: Per = "layer",
    *,
    stacked: types.Stacked = None,
    axis_name: types.AxisName = None,
    sharded_mask: types.Mask = None,
) -> optax.GradientTransformation:
    """Divide updates by their L2 norm; zeros stay zeros.

    Args:
      per: "layer" divides each leaf, or each layer of a stack, by its own norm, as LANS does;
        "global" divides all by one norm.
      stacked: Leaves that are stacks of layers (see `scale_by_layerwise_trust_ratio`).
      axis_name: Inside `shard_map`, the axis over which leaves are split; norms are summed over it.
      sharded_mask: Mask of the leaves that are split over `axis_name`; None for all.

    Returns:
      A stateless transform; its output keeps the dtype of the updates.

    Raises:
      UserError: For another value of `per`.

    >>> import jax.numpy as jnp
    >>> tx = normalize_gradients()
    >>> updates, _ = tx.update({"a": jnp.array([3.0, 4.0]), "b": jnp.zeros(2)}, tx.init({}))
    >>> {name: [round(float(x), 6) for x in leaf] for name, leaf in updates.items()}
    {'a': [0.6, 0.8], 'b': [0.0, 0.0]}

    Note:
      `optax.normalize_by_update_norm` knows the global norm only, which in fp32 is infinite from
      1.8e19 on and 0 below 1e-23; here norms are right from 1e-33 to 1e34.
    """
    require_choice("per", per, PER)

    def init_fn(params: types.Params) -> optax.EmptyState:
        if per == "layer":
            masks.record_choice("stacked", stacks.resolve_stacked(stacked, params))
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates, state: optax.EmptyState, params: types.Params | None = None
    ):
        del params
        tree.check_inexact(updates, "updates")
        if per == "global":
            norm = _clipping.global_norm(updates, axis_name, sharded_mask)
            return jax.tree.map(lambda u: _divided(u, norm), updates), state

        layers = stacks.resolve_stacked(stacked, updates)
        split = masks.resolve_split(sharded_mask, axis_name, updates)

        def normalize(u: jax.Array, layer_axes: stacks.LayerAxes, is_split: bool) -> jax.Array:
            return _divided(u, tree.l2_norm(u, layer_axes.axes, split.axis_of(is_split)))

        return jax.tree.map(normalize, updates, layers, split.leaves), state

    return optax.GradientTransformation(init_fn, update_fn)


def _divided(u: jax.Array, norm: jax.Array) -> jax.Array:
    """Return u / norm in the dtype of u, and u where the norm is 0."""
    wide = u.astype(tree.wide_dtype(u.dtype))
    return tree.map_parts(lambda x: x / jnp.where(norm > 0, norm, 1), wide).astype(u.dtype)
