"""The layerwise trust ratio that LAMB and LARS share."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import tree, types
from lbopt.transforms import arguments

Denominator = Literal["norm_of_sum", "sum_of_norms"]
DENOMINATORS = ("norm_of_sum", "sum_of_norms")


class TrustRatioState(NamedTuple):
    """The ratio each adapted leaf got at the last update.

    Attributes:
      trust_ratio: a pytree shaped like the parameters; an fp32 scalar per adapted leaf (1 before the first update),
        `optax.MaskedNode()` where the leaf is not adapted.
    """

    trust_ratio: types.PyTree


def scale_by_layerwise_trust_ratio(
    trust_ratio_mask: types.Mask | types.Unset = types.UNSET,
    trust_coefficient: float = 1.0,
    eps: float = 0.0,
    trust_ratio_bounds: tuple[float, float] | None = None,
    weight_norm_bounds: tuple[float, float] | None = None,
    weight_decay: float | jax.Array = 0.0,
    weight_decay_mask: types.Mask | types.Unset = types.UNSET,
    denominator: Denominator = "norm_of_sum",
) -> optax.GradientTransformation:
    r"""Add the weight decay, then scale each layer's update by a ratio of norms.

    For a leaf w with incoming update g and weight decay wd (0 where `weight_decay_mask` is False):

        d     = g + wd w
        ratio = trust_coefficient * phi(||w||) / (||d|| + eps)               norm_of_sum  (LAMB, optax.lars)
        ratio = trust_coefficient * phi(||w||) / (||g|| + wd ||w|| + eps)    sum_of_norms (LARS)
        ratio = 1 where phi(||w||) or the update's norm (||d||, for sum_of_norms ||g||) is 0
        out   = clip(ratio, *trust_ratio_bounds) * d       on leaves in `trust_ratio_mask`;   out = d on the others

    The decay is part of this transform because the two denominators differ in exactly where it enters. All arithmetic
    is in fp32 (or wider, for wider leaves); the output has the dtype of the incoming update.

    Args:
      trust_ratio_mask: the leaves that are adapted (see `lbopt.types.Mask`); if not given, `lbopt.weights_only`: weights, not
        biases or normalization leaves.
      trust_coefficient: factor on the ratio, > 0; LAMB 1, LARS 0.001.
      eps: added to the denominator, >= 0.
      trust_ratio_bounds: (low, high) for the ratio, or None. (0, 1) on LARS is timm's trust_clip.
      weight_norm_bounds: phi of the LAMB paper, (low, high) for ||w||, or None for the identity.
      weight_decay: coefficient >= 0; may be a traced scalar.
      weight_decay_mask: the leaves that are decayed; default as `trust_ratio_mask`.
      denominator: "norm_of_sum" or "sum_of_norms".

    Returns:
      A transform whose state is `TrustRatioState`.

    Raises:
      ValueError: naming the argument, if it is out of range, if a mask selects nothing or does not fit the parameters,
        or if `params` is missing from `update`.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_layerwise_trust_ratio(trust_ratio_mask=None)
    >>> params = {"kernel": jnp.full((2, 2), 3.0)}
    >>> state = tx.init(params)
    >>> updates, state = tx.update({"kernel": jnp.full((2, 2), 0.5)}, state, params)
    >>> float(state.trust_ratio["kernel"]), float(updates["kernel"][0, 0])
    (6.0, 3.0)

    References:
      You et al., Large Batch Optimization for Deep Learning (LAMB), arXiv 1904.00962, Algorithm 2.
      You et al., Large Batch Training of Convolutional Networks (LARS), arXiv 1708.03888, Algorithm 1.

    Note:
      `optax.scale_by_trust_ratio` takes norms in the parameter dtype, keeps no record of the ratios and offers only
      norm_of_sum.
    """
    _check(trust_coefficient, eps, trust_ratio_bounds, weight_norm_bounds, weight_decay, denominator)

    def init_fn(params: types.Params) -> TrustRatioState:
        adapted = tree.resolve_mask(trust_ratio_mask, params, "trust_ratio_mask")
        tree.resolve_mask(weight_decay_mask, params, "weight_decay_mask")
        ones = jax.tree.map(
            lambda p, chosen: jnp.ones((), tree.wide_dtype(p.dtype)) if chosen else optax.MaskedNode(), params, adapted
        )
        return TrustRatioState(ones)

    def adapt(
        update: jax.Array, param: jax.Array, adapted: bool, decayed: bool
    ) -> tuple[jax.Array, jax.Array | optax.MaskedNode]:
        wide = tree.wide_dtype(param.dtype)
        g, w = update.astype(wide), param.astype(wide)
        decay = jnp.asarray(weight_decay, wide)
        d = g + decay * w if decayed else g
        if not adapted:
            return d.astype(update.dtype), optax.MaskedNode()
        weight_norm = _clip(tree.l2_norm(w), weight_norm_bounds)
        if denominator == "norm_of_sum":
            update_norm = total = tree.l2_norm(d)
        else:
            update_norm = tree.l2_norm(g)
            total = update_norm + decay * tree.l2_norm(w) if decayed else update_norm
        defined = (weight_norm > 0) & (update_norm > 0)
        ratio = trust_coefficient * weight_norm / jnp.where(defined, total + eps, 1)
        ratio = _clip(jnp.where(defined, ratio, 1), trust_ratio_bounds).astype(wide)
        return (ratio * d).astype(update.dtype), ratio

    def update_fn(
        updates: optax.Updates, state: TrustRatioState, params: types.Params | None = None
    ) -> tuple[optax.Updates, TrustRatioState]:
        del state
        arguments.require_params(params, "scale_by_layerwise_trust_ratio")
        adapted = tree.resolve_mask(trust_ratio_mask, params, "trust_ratio_mask")
        decayed = tree.resolve_mask(weight_decay_mask, params, "weight_decay_mask")
        pairs = jax.tree.map(adapt, updates, params, adapted, decayed)
        updates, ratios = tree.unzip_pairs(updates, pairs)
        return updates, TrustRatioState(ratios)

    return optax.GradientTransformation(init_fn, update_fn)


def _clip(x: jax.Array, bounds: tuple[float, float] | None) -> jax.Array:
    return x if bounds is None else jnp.clip(x, bounds[0], bounds[1])


def _check(trust_coefficient, eps, trust_ratio_bounds, weight_norm_bounds, weight_decay, denominator) -> None:
    arguments.require_above("trust_coefficient", trust_coefficient, 0)
    arguments.require_at_least("eps", eps, 0)
    arguments.require_at_least("weight_decay", weight_decay, 0)
    arguments.require_bounds("trust_ratio_bounds", trust_ratio_bounds)
    arguments.require_bounds("weight_norm_bounds", weight_norm_bounds)
    if denominator not in DENOMINATORS:
        raise ValueError(f"denominator = {denominator!r}: use one of {', '.join(DENOMINATORS)}")
