"""Weight decay as a transform that may stand anywhere in a chain."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, masks, stacks, tree, types
from lbopt.transforms import _arguments


def add_weight_decay(
    weight_decay: float | jax.Array,
    weight_decay_mask: types.Mask = types.default(masks.weights_only),
    stacked: types.Stacked = None,
    cautious: bool = False,
) -> optax.GradientTransformation:
    """Add weight_decay * w to the updates of the chosen leaves, in fp32 (or wider).

    `optax.add_decayed_weights` with lbopt's masks and the addition in fp32.

    Args:
      weight_decay: Coefficient >= 0; may be traced.
      weight_decay_mask: The leaves that are decayed (see `lbopt.types.Mask`).
      stacked: Leaves that are stacks of layers (see `scale_by_layerwise_trust_ratio`); a mask that
        is a function gets one layer of each.
      cautious: Whether a component is decayed only where the update, which is to be subtracted, has
        the sign of the weight (Chen et al., Cautious Weight Decay, arXiv:2510.12402, Algorithm 1).

    Raises:
      UserError: If `weight_decay` is below 0, or a mask does not fit the parameters.
    """
    _scalars.require_at_least("weight_decay", weight_decay, 0)

    def chosen(params: types.Params) -> types.PyTree:
        layers = stacks.resolve_stacked(stacked, params)
        return masks.resolve_mask(weight_decay_mask, params, "weight_decay_mask", layers)

    def init_fn(params: types.Params) -> optax.EmptyState:
        masks.record_choice("weight_decay_mask", chosen(params))
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates, state: optax.EmptyState, params: types.Params | None = None
    ):
        _arguments.require_params(params, "add_weight_decay")
        tree.check_updates(updates, params)

        def add(u: jax.Array, w: jax.Array, decayed: bool) -> jax.Array:
            if not decayed:
                return u
            # In bf16 a small decay may vanish beside the update.
            wide = tree.wide_dtype(u.dtype)
            decay = jnp.asarray(weight_decay, wide) * w.astype(wide)
            if cautious:
                decay = tree.scaled(decay, ~_opposed(u, w))
            return (u.astype(wide) + decay).astype(u.dtype)

        return jax.tree.map(add, updates, params, chosen(params)), state

    return optax.GradientTransformation(init_fn, update_fn)


def _opposed(u: jax.Array, w: jax.Array) -> jax.Array:
    """Return where u w < 0, of complex numbers Re(u conj(w)) < 0; products could underflow."""
    if jnp.iscomplexobj(u):
        return u.real * w.real + u.imag * w.imag < 0
    return ((u > 0) & (w < 0)) | ((u < 0) & (w > 0))
