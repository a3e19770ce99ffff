"""LAMB as a chain."""

from __future__ import annotations

from typing import Any

import optax

from lbopt import types
from lbopt.transforms import (
    arguments,
    clipping,
    decay,
    learning_rate as lr_transform,
    moments,
    normalization,
    precision,
    trust_ratio,
    variants,
)

WEIGHT_DECAY_PLACEMENTS = ("inside", "outside", "decoupled", "gradient")


def lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: Any = types.UNSET,
    b2: Any = types.UNSET,
    eps: Any = types.UNSET,
    weight_decay: Any = types.UNSET,
    weight_decay_mask: types.Mask | types.Unset = types.UNSET,
    trust_ratio_mask: types.Mask | types.Unset = types.UNSET,
    trust_ratio_bounds: tuple[float, float] | types.Unset | None = types.UNSET,
    max_grad_norm: Any = types.UNSET,
    variant: str = "paper",
    weight_norm_bounds: tuple[float, float] | types.Unset | None = types.UNSET,
    debias: Any = types.UNSET,
    *,
    eps_root: Any = types.UNSET,
    weight_decay_placement: Any = types.UNSET,
    adapt_undecayed: Any = types.UNSET,
    zero_norm_ratio: Any = types.UNSET,
    grad_averaging: Any = types.UNSET,
    max_grad_norm_eps: Any = types.UNSET,
    gradient_normalization: Any = types.UNSET,
    gradient_normalization_stage: Any = types.UNSET,
    stacked: types.Stacked = None,
    axis_name: types.AxisName = None,
    sharded_mask: types.Mask = None,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
) -> optax.GradientTransformation:
    r"""Build LAMB: Adam's direction plus decay, each layer scaled to a step of lr * ||w||.

        r = m' / (sqrt(v') + eps) ;   u = r + wd w ;   w <- w - lr * phi(||w||) / ||u|| * u

    A chain of `clip_by_global_norm`, `normalize_gradients` and decay added to the gradient (if asked), `scale_by_lamb_moments`,
    `scale_by_layerwise_trust_ratio` and `scale_by_learning_rate`, and no more. Between the links updates are fp32 (or wider); they leave in the dtype of the gradients.

    Args:
      learning_rate: a number or a schedule.
      b1: decay rate of the first moment; as every option below up to `gradient_normalization_stage`, the variant's if not given.
      b2: decay rate of the second moment.
      eps: outside the root.
      weight_decay: wd >= 0. There is no good common default: .01 for BERT, 1.5 for You's ResNet-50.
      weight_decay_mask: which leaves are decayed (see `lbopt.types.Mask`).
      trust_ratio_mask: which leaves are adapted; "as_weight_decay" for those that `weight_decay_mask` selects.
      trust_ratio_bounds: (low, high) for the ratio, or None; (0, 1) is LAMBC.
      max_grad_norm: clip the global norm of the incoming gradients to this first; None for no clipping.
      variant: which public LAMB; `lbopt.describe()` lists them, `lbopt.describe("albert")` prints one.
      weight_norm_bounds: the paper's phi, bounds on ||w||; None for the identity.
      debias: bias correction of both moments: True, False, or "in_state" (see `scale_by_lamb_moments`).
      eps_root: inside the root.
      weight_decay_placement: "inside" (the direction and its norm), "outside" (added after the ratio), "decoupled" (timm:
        shrinks w by lr wd before its norm is taken), "gradient" (L2: added to the gradient before the moments).
      adapt_undecayed: False gives ratio 1 to leaves that are not decayed, and to all if `weight_decay` is 0.
      zero_norm_ratio: the ratio where a norm is zero; None divides all the same (see `scale_by_layerwise_trust_ratio`).
      grad_averaging: False: m = b1 m + g.
      max_grad_norm_eps: added to the global norm before the division by it.
      gradient_normalization: "layer" or "global": divide the gradients by their norms before the moments; None does not.
      gradient_normalization_stage: "after_clip" or "before_clip".
      stacked: which leaves are stacks of layers, each with a ratio of its own (see `scale_by_layerwise_trust_ratio`).
      axis_name: inside `shard_map`: the axis over which leaves are split; norms are summed over it.
      sharded_mask: with `axis_name`: which leaves are split; None for all.
      mu_dtype: of the kept first moment; None for fp32.
      nu_dtype: of the kept second moment; None for fp32.

    Returns:
      An `optax.GradientTransformation` whose `update` needs `params`.

    Raises:
      ValueError: naming the argument that is out of range or contradicts another, or the unknown variant.

    >>> import jax.numpy as jnp, optax
    >>> tx = lamb(1e-2, weight_decay=0.01)
    >>> params = {"kernel": jnp.ones((2, 2)), "bias": jnp.zeros(2)}
    >>> updates, state = tx.update({"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, tx.init(params), params)
    >>> round(float(updates["kernel"][0, 0]), 6), round(float(updates["bias"][0]), 6)
    (-0.01, -0.01)

    References:
      You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 Minutes, arXiv 1904.00962, Algorithm 2.

    Note:
      Under `optax.inject_hyperparams` only options given explicitly can be changed later; name masks and `stacked` in
      `static_args`.
    """
    row = variants.choose(
        "lamb",
        variant,
        b1=b1,
        b2=b2,
        eps=eps,
        eps_root=eps_root,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        weight_decay_placement=weight_decay_placement,
        trust_ratio_mask=trust_ratio_mask,
        adapt_undecayed=adapt_undecayed,
        trust_ratio_bounds=trust_ratio_bounds,
        weight_norm_bounds=weight_norm_bounds,
        zero_norm_ratio=zero_norm_ratio,
        debias=debias,
        grad_averaging=grad_averaging,
        max_grad_norm=max_grad_norm,
        max_grad_norm_eps=max_grad_norm_eps,
        gradient_normalization=gradient_normalization,
        gradient_normalization_stage=gradient_normalization_stage,
    )
    placement = row["weight_decay_placement"]
    arguments.require_choice("weight_decay_placement", placement, WEIGHT_DECAY_PLACEMENTS)
    variants.check_adaptation(row, "lamb", variant)
    spread: dict[str, Any] = {"axis_name": axis_name, "sharded_mask": sharded_mask}
    return precision.chain_in_wide_precision(
        *_before_the_moments(row, stacked, spread),
        moments.scale_by_lamb_moments(
            row["b1"],
            row["b2"],
            row["eps"],
            row["eps_root"],
            row["debias"],
            grad_averaging=row["grad_averaging"],
            mu_dtype=mu_dtype,
            nu_dtype=nu_dtype,
        ),
        trust_ratio.scale_by_layerwise_trust_ratio(
            trust_ratio_mask=variants.trust_ratio_mask(row),
            trust_ratio_bounds=row["trust_ratio_bounds"],
            weight_norm_bounds=row["weight_norm_bounds"],
            weight_decay=row["weight_decay"],
            weight_decay_mask=row["weight_decay_mask"],
            weight_decay_placement="before" if placement == "gradient" else placement,
            zero_norm_ratio=row["zero_norm_ratio"],
            adapt_undecayed=row["adapt_undecayed"],
            learning_rate=learning_rate if placement == "decoupled" else None,
            stacked=stacked,
            _near_one=True,
            **spread,
        ),
        lr_transform.scale_by_learning_rate(learning_rate),
    )


def _before_the_moments(
    row: dict[str, Any], stacked: types.Stacked, spread: dict[str, Any]
) -> list[optax.GradientTransformation]:
    """Return what a row does to the gradient first: clip, normalisation, decay."""
    stage, per, first = row["gradient_normalization_stage"], row["gradient_normalization"], []
    arguments.require_choice("gradient_normalization_stage", stage, ("after_clip", "before_clip"))
    if row["max_grad_norm"] is not None:
        arguments.require_above("max_grad_norm", row["max_grad_norm"], 0)
        arguments.require_at_least("max_grad_norm_eps", row["max_grad_norm_eps"], 0)
        first.append(
            clipping.clip_by_global_norm(row["max_grad_norm"], row["max_grad_norm_eps"], **spread)
        )
    if per is not None:
        arguments.require_choice("gradient_normalization", per, normalization.PER)
        normalized = normalization.normalize_gradients(per, stacked=stacked, **spread)
        first.insert(0 if stage == "before_clip" else len(first), normalized)
    if row["weight_decay_placement"] == "gradient":
        first.append(decay.add_weight_decay(row["weight_decay"], row["weight_decay_mask"], stacked))
    return first
