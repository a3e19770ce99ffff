"""LAMB (layerwise adaptive moments for batch training) as a chain."""

from __future__ import annotations

from typing import Any, Literal

import jax
import optax
from jax.typing import DTypeLike

from lbopt import errors, masks, types
from lbopt.errors import require_choice
from lbopt.transforms import (
    _clipping,
    _layerwise_options,
    _learning_rate,
    _moments,
    _normalization,
    _precision,
    _trust_ratio,
    _variants,
    _weight_decay,
)

WEIGHT_DECAY_PLACEMENTS = ("inside", "outside", "decoupled", "gradient")


def lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: float | jax.Array = types.default(0.9),
    b2: float | jax.Array = types.default(0.999),
    eps: float | jax.Array = types.default(1e-6),
    weight_decay: float | jax.Array = types.default(0.0),
    weight_decay_mask: types.Mask = types.default(masks.weights_only),
    trust_ratio_mask: types.Mask = types.default(masks.weights_only),
    trust_ratio_bounds: tuple[float, float] | None = types.default(None),
    max_grad_norm: float | jax.Array | None = types.default(None),
    variant: _variants.LambVariant = "paper",
    weight_norm_bounds: tuple[float, float] | None = types.default(None),
    debias: bool | Literal["in_state"] = types.default(True),
    *,
    eps_root: float | jax.Array = types.default(0.0),
    weight_decay_placement: Literal["inside", "outside", "decoupled", "gradient"] = types.default(
        "inside"
    ),
    adapt_undecayed: bool = types.default(True),
    zero_norm_ratio: float | jax.Array | None = types.default(1.0),
    grad_averaging: bool = types.default(True),
    max_grad_norm_eps: float | jax.Array = types.default(0.0),
    gradient_normalization: Literal["layer", "global"] | None = types.default(None),
    gradient_normalization_stage: Literal["after_clip", "before_clip"] = types.default(
        "after_clip"
    ),
    stacked: types.Stacked = None,
    axis_name: types.AxisName = None,
    sharded_mask: types.Mask = None,
    mu_dtype: DTypeLike | None = None,
    nu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""Build LAMB: Adam's direction plus decay, each layer scaled to a step of lr * ||w||.

        r = m' / (sqrt(v') + eps) ;   u = r + wd w ;   w <- w - lr * phi(||w||) / ||u|| * u

    A chain of `clip_by_global_norm`, `normalize_gradients` and decay added to the gradient (where
    asked for), `scale_by_lamb_moments`, `scale_by_layerwise_trust_ratio`, `scale_by_learning_rate`.
    Between the links updates are fp32 (or wider); they leave in the dtype of the gradients.

    Every option from `b1` to `gradient_normalization_stage` has the value that is given, else the
    variant's, else the paper's, which is the default shown above.

    Args:
      learning_rate: Number or schedule.
      b1: Decay rate of the first moment, in [0, 1).
      b2: Decay rate of the second moment, in [0, 1).
      eps: Constant >= 0 added to the root of the second moment.
      weight_decay: Coefficient wd >= 0. No default suits all: 0.01 is usual for BERT, 1.5 is that
        of You's ResNet-50.
      weight_decay_mask: The leaves that are decayed (see `lbopt.types.Mask`).
      trust_ratio_mask: The leaves that are adapted; "as_weight_decay" for those that
        `weight_decay_mask` selects.
      trust_ratio_bounds: (low, high) for the ratio, or None; (0, 1) is LAMBC.
      max_grad_norm: Global norm to which the incoming gradients are clipped first; None for no
        clipping.
      variant: Public LAMB code whose options are the defaults; listed below, in full by
        `lbopt.describe("albert", "lamb")`.
      weight_norm_bounds: The paper's phi, (low, high) for ||w||; None for the identity.
      debias: Bias correction of both moments, or "in_state" (see `scale_by_lamb_moments`).
      eps_root: Constant >= 0 added to the second moment inside the root.
      weight_decay_placement: "inside" (the direction and its norm), "outside" (added after the
        ratio), "decoupled" (timm: shrinks w by lr wd before its norm is taken), "gradient" (L2:
        added to the gradient before the moments).
      adapt_undecayed: Whether leaves without decay are adapted. False gives them ratio 1, and all
        leaves if `weight_decay` is 0.
      zero_norm_ratio: Ratio where a norm is zero; None divides all the same (see
        `scale_by_layerwise_trust_ratio`).
      grad_averaging: Whether the gradient enters the first moment with 1 - b1; False: m = b1 m + g.
      max_grad_norm_eps: Constant >= 0 added to the global norm before the division by it.
      gradient_normalization: Norm that gradients are divided by before the moments, "layer" or
        "global"; None for no division.
      gradient_normalization_stage: Whether that division comes "after_clip" or "before_clip".
      stacked: Leaves that are stacks of layers, each layer with a ratio of its own (see
        `scale_by_layerwise_trust_ratio`).
      axis_name: Inside `shard_map`, the axis over which leaves are split; norms are summed over it.
      sharded_mask: Mask of the leaves that are split over `axis_name`; None for all.
      mu_dtype: Dtype in which the first moment is kept; None for fp32.
      nu_dtype: Dtype in which the second moment is kept; None for fp32.

    Variants and the options in which they differ from the paper:

      paper       -
      optax       weight_decay_mask=None, trust_ratio_mask=None
      tfa         weight_decay_mask=None, trust_ratio_mask='as_weight_decay'
      albert      weight_decay=0.01, weight_decay_mask=select_roles('vector', 'weight'),
                  trust_ratio_mask='as_weight_decay', debias=False, max_grad_norm=1.0
      you_rn50    weight_decay=1.5, weight_decay_mask=select_roles('bias', 'vector', 'weight'),
                  trust_ratio_mask='as_weight_decay', adapt_undecayed=False, debias=False,
                  max_grad_norm=1.0
      you_mnist   weight_decay=0.01, weight_decay_mask=select_roles('vector', 'weight'),
                  trust_ratio_mask=None, debias=False, max_grad_norm=1.0
      apex        weight_decay=0.01, weight_decay_mask=select_roles('vector', 'weight'),
                  trust_ratio_mask=None, adapt_undecayed=False, max_grad_norm=1.0
      nvlamb      weight_decay=0.01, weight_decay_mask=select_roles('vector', 'weight'),
                  trust_ratio_mask=None, max_grad_norm=1.0
      timm        weight_decay=0.01, trust_ratio_mask=None, adapt_undecayed=False, max_grad_norm=1.0
      nus         weight_decay_mask=select_roles('vector', 'weight'), trust_ratio_mask=None,
                  adapt_undecayed=False, debias=False, max_grad_norm=1.0, max_grad_norm_eps=1e-06
      cybertron   weight_decay_mask=None, trust_ratio_mask=None, weight_norm_bounds=(0.0, 10.0),
                  debias=False
      mlperf_tf   weight_decay=0.0166629, weight_decay_mask=select_roles('vector', 'weight'),
                  trust_ratio_mask='as_weight_decay', max_grad_norm=1.0
      mlperf_jax  weight_decay=0.0166629, weight_decay_mask=select_roles('vector', 'weight'),
                  trust_ratio_mask=None, max_grad_norm=1.0
      flax        weight_decay_mask=None, trust_ratio_mask=None, zero_norm_ratio=None

    Returns:
      An `optax.GradientTransformation` whose `update` needs `params`.

    Raises:
      UserError: For an argument that is out of range or contradicts another, or an unknown variant.

    >>> import jax.numpy as jnp, optax
    >>> tx = lamb(1e-2, weight_decay=0.01)
    >>> params = {"kernel": jnp.ones((2, 2)), "bias": jnp.zeros(2)}
    >>> grads = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    >>> updates, state = tx.update(grads, tx.init(params), params)
    >>> round(float(updates["kernel"][0, 0]), 6), round(float(updates["bias"][0]), 6)
    (-0.01, -0.01)

    References:
      You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 Minutes,
      arXiv:1904.00962v5, Algorithm 2.

    Note:
      Under `optax.inject_hyperparams` only options given explicitly can be changed later; name
      masks and `stacked` in `static_args`.
    """
    options = _layerwise_options.choose(
        _variants.LAMB,
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
    placement = options.weight_decay_placement
    require_choice("weight_decay_placement", placement, WEIGHT_DECAY_PLACEMENTS)
    _layerwise_options.check_adaptation(options, "lamb", variant)
    split: dict[str, Any] = {"axis_name": axis_name, "sharded_mask": sharded_mask}

    moments = _moments.scale_by_lamb_moments(
        options.b1,
        options.b2,
        options.eps,
        options.eps_root,
        options.debias,
        grad_averaging=options.grad_averaging,
        mu_dtype=mu_dtype,
        nu_dtype=nu_dtype,
    )
    # Decay that goes into the gradient is added before the moments, so not here again. The norms of
    # Adam's directions lie where one sum of squares is exact, which saves a pass over memory. Kept
    # on the chip, they save the second reading of both moments (bench update: v5e, v6e).
    ratio = _trust_ratio.scale_by_layerwise_trust_ratio(
        trust_ratio_mask=_layerwise_options.trust_ratio_mask(options),
        trust_ratio_bounds=options.trust_ratio_bounds,
        weight_norm_bounds=options.weight_norm_bounds,
        weight_decay=options.weight_decay,
        weight_decay_mask=options.weight_decay_mask,
        weight_decay_placement="before" if placement == "gradient" else placement,
        zero_norm_ratio=options.zero_norm_ratio,
        adapt_undecayed=options.adapt_undecayed,
        learning_rate=learning_rate if placement == "decoupled" else None,
        stacked=stacked,
        _near_one=True,
        _keep_direction=True,
        **split,
    )
    return _precision.chain_in_wide_precision(
        *_before_the_moments(options, stacked, split),
        moments,
        ratio,
        _learning_rate.scale_by_learning_rate(learning_rate),
    )


def _before_the_moments(
    options: _layerwise_options.LambOptions, stacked: types.Stacked, split: dict[str, Any]
) -> list[optax.GradientTransformation]:
    """Return the transforms of the gradient that the options ask for: clip, normalization, decay.

    Args:
      options: The options of `lamb`.
      stacked: Leaves that are stacks of layers, as given to `lamb`.
      split: The arguments `axis_name` and `sharded_mask` of the transforms that take norms.
    """
    stage = options.gradient_normalization_stage
    require_choice("gradient_normalization_stage", stage, ("after_clip", "before_clip"))

    links = []
    if options.max_grad_norm is not None:
        with errors.under("", max_norm="max_grad_norm", eps="max_grad_norm_eps"):
            clip = _clipping.clip_by_global_norm(
                options.max_grad_norm, options.max_grad_norm_eps, **split
            )
        links.append(clip)
    per = options.gradient_normalization
    if per is not None:
        with errors.under("", per="gradient_normalization"):
            normalize = _normalization.normalize_gradients(per, stacked=stacked, **split)
        # The order matters: a clip after the division sees normalized gradients.
        links.insert(0 if stage == "before_clip" else len(links), normalize)
    if options.weight_decay_placement == "gradient":
        links.append(
            _weight_decay.add_weight_decay(options.weight_decay, options.weight_decay_mask, stacked)
        )
    return links
