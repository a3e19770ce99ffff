"""LARS (layerwise adaptive rate scaling) as a chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import optax
from jax.typing import DTypeLike

from lbopt import masks, types
from lbopt.errors import UserError, require_choice
from lbopt.transforms import (
    _layerwise_options,
    _learning_rate,
    _moments,
    _precision,
    _trust_ratio,
    _variants,
)

WEIGHT_DECAY_PLACEMENTS = ("inside", "outside", "norm_only", "decoupled")
PLACEMENTS = ("inside", "outside")


def lars(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float | jax.Array = types.default(0.0),
    momentum: float | jax.Array = types.default(0.9),
    trust_coefficient: float | jax.Array = types.default(0.001),
    weight_decay_mask: types.Mask = types.default(masks.weights_only),
    trust_ratio_mask: types.Mask = types.default(masks.weights_only),
    variant: _variants.LarsVariant = "paper",
    eps: float | jax.Array = types.default(0.0),
    nesterov: bool = types.default(False),
    trust_ratio_bounds: tuple[float, float] | None = types.default(None),
    denominator: Literal[
        "sum_of_norms", "norm_of_sum", "gradient_only", "momentum"
    ] = types.default("sum_of_norms"),
    *,
    dampening: float | jax.Array | Literal["momentum"] = types.default(0.0),
    undamped_start: bool = types.default(False),
    learning_rate_placement: Literal["inside", "outside"] = types.default("inside"),
    plain_learning_rate_placement: Literal["inside", "outside"] | None = types.default(None),
    trust_ratio_placement: Literal["inside", "outside"] = types.default("inside"),
    weight_decay_placement: Literal["inside", "outside", "norm_only", "decoupled"] = types.default(
        "inside"
    ),
    adapt_undecayed: bool = types.default(True),
    clip_mode: Literal["scale", "clip"] = types.default("scale"),
    weight_norm_bounds: tuple[float, float] | None = types.default(None),
    update_bounds: tuple[float, float] | None = types.default(None),
    zero_norm_ratio: float | jax.Array | None = types.default(1.0),
    stacked: types.Stacked = None,
    axis_name: types.AxisName = None,
    sharded_mask: types.Mask = None,
    momentum_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""Build LARS: momentum SGD whose layers each move in proportion to their own norm.

        ratio = trust_coefficient * ||w|| / (||g|| + wd ||w|| + eps)
        vel   = momentum * vel + lr * ratio * (g + wd w) ;   w <- w - vel

    A chain of `scale_by_layerwise_trust_ratio`, `scale_by_learning_rate` and
    `scale_by_lars_momentum`; a ratio outside the momentum is the same chain with the momentum
    inside the first. Leaves that are not adapted take plain momentum steps at the same rate.
    Between the links updates are fp32 (or wider).

    Every option from `weight_decay` to `zero_norm_ratio` has the value that is given, else the
    variant's, else the paper's, which is the default shown above.

    Args:
      learning_rate: Number or schedule.
      weight_decay: Coefficient wd >= 0; 0.0001 or 0.0002 is usual for ResNet-50.
      momentum: Decay rate of the velocity, in [0, 1).
      trust_coefficient: Factor on the ratio, > 0; eta of the paper.
      weight_decay_mask: The leaves that are decayed (see `lbopt.types.Mask`).
      trust_ratio_mask: The leaves that are adapted; "as_weight_decay" for those that
        `weight_decay_mask` selects.
      variant: Public LARS code whose options are the defaults; listed below, in full by
        `lbopt.describe("nus", "lars")`.
      eps: Constant >= 0 added to the denominator of the ratio.
      nesterov: Whether the momentum is Nesterov's.
      trust_ratio_bounds: (low, high) for the ratio, or None.
      denominator: "sum_of_norms", "norm_of_sum", "gradient_only" or "momentum" (see
        `scale_by_layerwise_trust_ratio`; the last needs rate and ratio outside the momentum).
      dampening: Share in [0, 1) of the update that is left out of the velocity (see
        `scale_by_lars_momentum`); "momentum" makes the velocity an average.
      undamped_start: Whether the first velocity is the update itself, as in PyTorch.
      learning_rate_placement: "inside" the momentum (vel = m vel + lr ...) or "outside"
        (w <- w - lr ...). They differ whenever the rate changes.
      plain_learning_rate_placement: Placement for leaves that are not adapted; None for that of the
        others. Where the two differ, Nesterov momentum is for adapted leaves alone (flax).
      trust_ratio_placement: Whether the ratio is "inside" or "outside" the momentum.
      weight_decay_placement: "inside" (the update and the denominator), "outside", "norm_only" (the
        denominator but not the update), "decoupled"; see `scale_by_layerwise_trust_ratio`.
      adapt_undecayed: Whether leaves without decay are adapted. False gives them ratio 1, and all
        leaves if `weight_decay` is 0.
      clip_mode: "scale", or "clip" for LARC: the layer's rate is min(lr, ratio), not lr * ratio.
      weight_norm_bounds: (low, high) for ||w||, or None.
      update_bounds: (low, high) for each number of the decayed gradient, or None.
      zero_norm_ratio: Ratio where a norm is zero. At 1, which all public codes have, an adapted
        leaf that starts at zero takes a full step, about 1 / trust_coefficient times the others'.
      stacked: Leaves that are stacks of layers, each layer with a ratio of its own (see
        `scale_by_layerwise_trust_ratio`).
      axis_name: Inside `shard_map`, the axis over which leaves are split; norms are summed over it.
      sharded_mask: Mask of the leaves that are split over `axis_name`; None for all.
      momentum_dtype: Dtype in which the velocity is kept; None for fp32.

    Variants and the options in which they differ from the paper:

      paper         -
      lamb_paper    trust_coefficient=1.0, dampening='momentum', denominator='momentum',
                    learning_rate_placement='outside', trust_ratio_placement='outside'
      contrib_2018  learning_rate_placement='outside', trust_ratio_placement='outside',
                    weight_decay_mask=select_roles('vector', 'weight'),
                    weight_decay_placement='norm_only',
                    trust_ratio_mask=select_roles('vector', 'weight')
      tpu           weight_decay=1e-05, weight_decay_mask=select_roles('vector', 'weight'),
                    trust_ratio_mask=select_roles('vector', 'weight')
      mlperf_tf2    eps=1e-07, weight_decay_mask=select_roles('vector', 'weight'),
                    trust_ratio_mask=select_roles('vector', 'weight')
      flax          plain_learning_rate_placement='outside',
                    weight_decay_mask=select_roles('vector', 'weight'),
                    trust_ratio_mask=select_roles('vector', 'weight')
      optax         denominator='norm_of_sum', weight_decay_mask=None, trust_ratio_mask=None
      nus           eps=1e-05, learning_rate_placement='outside', trust_ratio_placement='outside',
                    weight_decay_mask=select_roles('vector', 'weight'),
                    trust_ratio_mask=select_roles('vector', 'weight'),
                    trust_ratio_bounds=(0.0, 50.0), update_bounds=(-10.0, 10.0)
      timm          eps=1e-08, undamped_start=True, learning_rate_placement='outside',
                    trust_ratio_mask=None, adapt_undecayed=False
      nvcaffe       denominator='gradient_only', weight_decay_mask=None, trust_ratio_mask=None,
                    clip_mode='clip'

    Returns:
      An `optax.GradientTransformation` whose `update` needs `params`.

    Raises:
      UserError: For an argument that is out of range or contradicts another, or an unknown variant.

    >>> import jax.numpy as jnp
    >>> tx = lars(1.0, momentum=0.0)
    >>> params = {"kernel": jnp.full((2, 2), 3.0)}
    >>> updates, _ = tx.update({"kernel": jnp.ones((2, 2))}, tx.init(params), params)
    >>> round(float(updates["kernel"][0, 0]), 6)
    -0.003

    References:
      You et al., Large Batch Training of Convolutional Networks, arXiv:1708.03888v3,
      Algorithm 1.

    Note:
      Under `optax.inject_hyperparams` only options given explicitly can be changed later; name
      masks and `stacked` in `static_args`.
    """
    options = _layerwise_options.choose(
        _variants.LARS,
        variant,
        weight_decay=weight_decay,
        momentum=momentum,
        trust_coefficient=trust_coefficient,
        eps=eps,
        nesterov=nesterov,
        dampening=dampening,
        undamped_start=undamped_start,
        denominator=denominator,
        learning_rate_placement=learning_rate_placement,
        plain_learning_rate_placement=plain_learning_rate_placement,
        trust_ratio_placement=trust_ratio_placement,
        weight_decay_mask=weight_decay_mask,
        weight_decay_placement=weight_decay_placement,
        trust_ratio_mask=trust_ratio_mask,
        adapt_undecayed=adapt_undecayed,
        clip_mode=clip_mode,
        trust_ratio_bounds=trust_ratio_bounds,
        weight_norm_bounds=weight_norm_bounds,
        update_bounds=update_bounds,
        zero_norm_ratio=zero_norm_ratio,
    )
    if options.plain_learning_rate_placement is None:
        options = dataclasses.replace(
            options, plain_learning_rate_placement=options.learning_rate_placement
        )
    _check(options)
    _layerwise_options.check_adaptation(options, "lars", variant)

    # The momentum comes after the ratio, or inside it if the ratio is outside the momentum.
    links = _momentum_links(options, learning_rate, momentum_dtype, stacked)
    ratio_is_outside = options.trust_ratio_placement == "outside"
    ratio = _trust_ratio.scale_by_layerwise_trust_ratio(
        trust_ratio_mask=_layerwise_options.trust_ratio_mask(options),
        trust_coefficient=options.trust_coefficient,
        eps=options.eps,
        trust_ratio_bounds=options.trust_ratio_bounds,
        weight_norm_bounds=options.weight_norm_bounds,
        weight_decay=options.weight_decay,
        weight_decay_mask=options.weight_decay_mask,
        denominator=options.denominator,
        weight_decay_placement=options.weight_decay_placement,
        zero_norm_ratio=options.zero_norm_ratio,
        adapt_undecayed=options.adapt_undecayed,
        clip_mode=options.clip_mode,
        learning_rate=learning_rate,
        update_bounds=options.update_bounds,
        inner=links.pop(0) if ratio_is_outside else None,
        stacked=stacked,
        axis_name=axis_name,
        sharded_mask=sharded_mask,
    )
    return _precision.chain_in_wide_precision(ratio, *links)


def _check(options: _layerwise_options.LarsOptions) -> None:
    """Raise `UserError` for an unknown placement, or placements that contradict each other."""
    for name in (
        "learning_rate_placement",
        "plain_learning_rate_placement",
        "trust_ratio_placement",
    ):
        require_choice(name, getattr(options, name), PLACEMENTS)
    decay_placement = options.weight_decay_placement
    require_choice("weight_decay_placement", decay_placement, WEIGHT_DECAY_PLACEMENTS)

    if options.trust_ratio_placement == "outside":
        rates = (options.learning_rate_placement, options.plain_learning_rate_placement)
        if rates != ("outside", "outside"):
            fix = (
                "it puts the ratio after the momentum; use 'outside' for {rate} and {plain_rate} "
                "too"
            )
            also = {
                "rate": "learning_rate_placement",
                "plain_rate": "plain_learning_rate_placement",
            }
            raise UserError("trust_ratio_placement", "outside", fix, code="conflict", also=also)
        return

    # The momentum follows the ratio: it would accumulate a decay added outside, and its norm is not
    # known yet when the ratio is taken.
    also = {"ratio": "trust_ratio_placement"}
    if decay_placement in ("outside", "decoupled"):
        fix = "the velocity after it would accumulate the decay; use 'inside', or {ratio}='outside'"
        raise UserError("weight_decay_placement", decay_placement, fix, code="conflict", also=also)
    if options.denominator == "momentum":
        fix = "it divides by the norm of the momentum; use {ratio}='outside' too"
        raise UserError("denominator", "momentum", fix, code="conflict", also=also)


def _momentum_links(
    options: _layerwise_options.LarsOptions,
    learning_rate: optax.ScalarOrSchedule,
    momentum_dtype: DTypeLike | None,
    stacked: types.Stacked,
) -> list[optax.GradientTransformation]:
    """Return the momentum and the learning rate, in the order that the options ask for."""
    order = options.learning_rate_placement
    plain_order = options.plain_learning_rate_placement
    velocity = _moments.scale_by_lars_momentum(
        options.momentum,
        options.nesterov,
        dampening=options.momentum if options.dampening == "momentum" else options.dampening,
        undamped_start=options.undamped_start,
        momentum_dtype=momentum_dtype,
    )
    rate = _learning_rate.scale_by_learning_rate(learning_rate)

    # One order for all leaves needs no masks.
    if order == plain_order:
        return [velocity, rate] if order == "outside" else [rate, velocity]

    def adapted(params: types.Params) -> types.PyTree:
        return _trust_ratio.choose_leaves(
            params,
            _layerwise_options.trust_ratio_mask(options),
            options.weight_decay_mask,
            options.weight_decay,
            options.adapt_undecayed,
            stacked,
        ).adapted

    def plain(params: types.Params) -> types.PyTree:
        return jax.tree.map(lambda chosen: not chosen, adapted(params))

    def unchanged(updates: optax.Updates, state: Any) -> optax.Updates:
        del state
        return updates

    def plain_momentum(updates: optax.Updates, state: Any) -> optax.Updates:
        del updates
        return state.momentum

    rate_of_adapted = _only(adapted, rate, unchanged)
    rate_of_plain = _only(plain, rate, unchanged)
    momentum = _only(adapted, velocity, plain_momentum) if options.nesterov else velocity
    # The leaves whose rate is inside take it before the momentum, the others after it.
    if order == "inside":
        return [rate_of_adapted, momentum, rate_of_plain]
    return [rate_of_plain, momentum, rate_of_adapted]


def _only(
    mask: Callable[[types.Params], types.PyTree],
    tx: optax.GradientTransformation,
    others: Callable[[optax.Updates, Any], optax.Updates],
) -> optax.GradientTransformation:
    """Return a transform that gives the output of `tx` on some leaves only.

    Its state covers all leaves. `optax.masked` would leave holes in the state, which code that
    shards a state like the parameters cannot handle.

    Args:
      mask: Function of the parameters that selects the leaves.
      tx: The transform.
      others: (updates, new state of `tx`) -> the output on the other leaves.
    """

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: types.Params | None = None
    ):
        out, state = tx.update(updates, state, params)
        rest = others(updates, state)

        def pick(chosen: bool, new: jax.Array, other: jax.Array) -> jax.Array:
            return new if chosen else other.astype(new.dtype)

        return jax.tree.map(pick, mask(params), out, rest), state

    return optax.GradientTransformation(tx.init, update_fn)
