"""Gradients divided by their own norm before anything else sees them."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import optax

from lbopt import masks, stacks, tree, types
from lbopt.transforms import _arguments, _clipping

Per = Literal["layer", "global"]
PER = ("layer", "global")


def normalize_gradients(
    per: Per = "layer",
    *,
    stacked: types.Stacked = None,
    axis_name: types.AxisName = None,
    sharded_mask: types.Mask = None,
) -> optax.GradientTransformation:
    """Divide updates by their L2 norm; what is zero stays zero.

    Args:
      per: "layer" (each leaf, or each layer of a stack, by its own norm: LANS) or "global" (all by one norm).
      stacked: as in `scale_by_layerwise_trust_ratio`.
      axis_name: inside `shard_map`: the axis over which leaves are split; norms are summed over it.
      sharded_mask: with `axis_name`: which leaves are split; None for all.

    Returns:
      A stateless transform; its output keeps the dtype of the updates.

    Raises:
      ValueError: for another `per`.

    >>> import jax.numpy as jnp
    >>> tx = normalize_gradients()
    >>> updates, _ = tx.update({"a": jnp.array([3.0, 4.0]), "b": jnp.zeros(2)}, tx.init({}))
    >>> {name: [round(float(x), 6) for x in leaf] for name, leaf in updates.items()}
    {'a': [0.6, 0.8], 'b': [0.0, 0.0]}

    Note:
      `optax.normalize_by_update_norm` divides by the global norm only, which in fp32 is infinite from 1.8e19 on and 0 below 1e-23; here
      norms are right from 1e-33 to 1e34.
    """
    _arguments.require_choice("per", per, PER)

    def init_fn(params: types.Params) -> optax.EmptyState:
        if per == "layer":
            masks.record_choice("stacked", stacks.resolve_stacked(stacked, params))
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates, state: optax.EmptyState, params: types.Params | None = None
    ):
        del params
        tree.check_inexact(updates, "the gradient")
        if per == "global":
            norm = _clipping.global_norm(updates, axis_name, sharded_mask)
            return jax.tree.map(lambda u: _divided(u, norm), updates), state
        layers = stacks.resolve_stacked(stacked, updates)
        split = masks.resolve_split(sharded_mask, axis_name, updates)

        def normalize(u: jax.Array, layer_axes: stacks.LayerAxes, chosen: bool) -> jax.Array:
            return _divided(u, tree.l2_norm(u, layer_axes.axes, split.axis_of(chosen)))

        return jax.tree.map(normalize, updates, layers, split.leaves), state

    return optax.GradientTransformation(init_fn, update_fn)


def _divided(u: jax.Array, norm: jax.Array) -> jax.Array:
    wide = u.astype(tree.wide_dtype(u.dtype))
    return tree.map_parts(lambda x: x / jnp.where(norm > 0, norm, 1), wide).astype(u.dtype)
