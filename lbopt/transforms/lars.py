"""LARS as a chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from lbopt import types
from lbopt.transforms import (
    arguments,
    learning_rate as lr_transform,
    moments,
    precision,
    trust_ratio,
    variants,
)

WEIGHT_DECAY_PLACEMENTS = ("inside", "outside", "norm_only", "decoupled")
PLACEMENTS = ("inside", "outside")


def lars(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: Any = types.UNSET,
    momentum: Any = types.UNSET,
    trust_coefficient: Any = types.UNSET,
    weight_decay_mask: types.Mask | types.Unset = types.UNSET,
    trust_ratio_mask: types.Mask | types.Unset = types.UNSET,
    variant: str = "paper",
    eps: Any = types.UNSET,
    nesterov: Any = types.UNSET,
    trust_ratio_bounds: tuple[float, float] | types.Unset | None = types.UNSET,
    denominator: Any = types.UNSET,
    *,
    dampening: Any = types.UNSET,
    undamped_start: Any = types.UNSET,
    learning_rate_placement: Any = types.UNSET,
    plain_learning_rate_placement: Any = types.UNSET,
    trust_ratio_placement: Any = types.UNSET,
    weight_decay_placement: Any = types.UNSET,
    adapt_undecayed: Any = types.UNSET,
    clip_mode: Any = types.UNSET,
    weight_norm_bounds: tuple[float, float] | types.Unset | None = types.UNSET,
    update_bounds: tuple[float, float] | types.Unset | None = types.UNSET,
    zero_norm_ratio: Any = types.UNSET,
    stacked: types.Stacked = None,
    axis_name: types.AxisName = None,
    sharded_mask: types.Mask = None,
    momentum_dtype: Any = None,
) -> optax.GradientTransformation:
    r"""Build LARS: momentum SGD whose layers each move in proportion to their own norm.

        ratio = trust_coefficient * ||w|| / (||g|| + wd ||w|| + eps)
        vel   = momentum * vel + lr * ratio * (g + wd w) ;   w <- w - vel

    A chain of `scale_by_layerwise_trust_ratio`, `scale_by_learning_rate` and `scale_by_lars_momentum`, and no more; a ratio
    outside the momentum is the same chain with the momentum inside the first. Leaves that are not adapted take plain
    momentum steps at the same rate. Between the links updates are fp32 (or wider).

    Args:
      learning_rate: a number or a schedule.
      weight_decay: wd >= 0; .0001 or .0002 is usual for ResNet-50. As every option below up to `zero_norm_ratio`, the
        variant's if not given.
      momentum: decay rate of the velocity.
      trust_coefficient: eta of the paper.
      weight_decay_mask: which leaves are decayed (see `lbopt.types.Mask`).
      trust_ratio_mask: which leaves are adapted; "as_weight_decay" for those that `weight_decay_mask` selects.
      variant: which public LARS; `lbopt.describe()` lists them, `lbopt.describe("nus")` prints one.
      eps: added to the denominator.
      nesterov: Nesterov momentum.
      trust_ratio_bounds: (low, high) for the ratio, or None.
      denominator: "sum_of_norms", "norm_of_sum", "gradient_only" or "momentum" (which needs rate and ratio outside).
      dampening: see `scale_by_lars_momentum`; "momentum" for a velocity that is an average.
      undamped_start: likewise.
      learning_rate_placement: "inside" the momentum (vel = m vel + lr ...) or "outside" (w <- w - lr ...). They differ
        whenever the rate changes.
      plain_learning_rate_placement: the same, for leaves that are not adapted; None for that of the others. Where the two
        differ, Nesterov momentum is for the adapted ones alone (flax).
      trust_ratio_placement: the ratio "inside" or "outside" the momentum.
      weight_decay_placement: "inside" (the update and the denominator), "outside", "norm_only" (the denominator but not the
        update), "decoupled"; see `scale_by_layerwise_trust_ratio`.
      adapt_undecayed: False gives ratio 1 to leaves that are not decayed, and to all if `weight_decay` is 0.
      clip_mode: "scale", or "clip": LARC, the layer's rate min(lr, ratio) instead of lr * ratio.
      weight_norm_bounds: bounds on ||w||.
      update_bounds: (low, high), clamps each number of the decayed gradient.
      zero_norm_ratio: the ratio where a norm is zero. At 1, which all public codes have, a zero-initialised leaf that is adapted takes a
        full step, about 1 / trust_coefficient times the others'.
      stacked: which leaves are stacks of layers, each with a ratio of its own (see `scale_by_layerwise_trust_ratio`).
      axis_name: inside `shard_map`: the axis over which leaves are split; norms are summed over it.
      sharded_mask: with `axis_name`: which leaves are split; None for all.
      momentum_dtype: of the kept velocity; None for fp32.

    Returns:
      An `optax.GradientTransformation` whose `update` needs `params`.

    Raises:
      ValueError: naming the argument that is out of range or contradicts another, or the unknown variant.

    >>> import jax.numpy as jnp
    >>> tx = lars(1.0, momentum=0.0)
    >>> params = {"kernel": jnp.full((2, 2), 3.0)}
    >>> updates, _ = tx.update({"kernel": jnp.ones((2, 2))}, tx.init(params), params)
    >>> round(float(updates["kernel"][0, 0]), 6)
    -0.003

    References:
      You et al., Large Batch Training of Convolutional Networks, arXiv 1708.03888, Algorithm 1.

    Note:
      Under `optax.inject_hyperparams` only options given explicitly can be changed later; name masks and `stacked` in
      `static_args`.
    """
    row = variants.choose(
        "lars",
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
    if row["plain_learning_rate_placement"] is None:
        row["plain_learning_rate_placement"] = row["learning_rate_placement"]
    _check(row)
    variants.check_adaptation(row, "lars", variant)
    late_ratio = row["trust_ratio_placement"] == "outside"
    steps = _momentum_steps(row, learning_rate, momentum_dtype, stacked)
    ratio = trust_ratio.scale_by_layerwise_trust_ratio(
        trust_ratio_mask=variants.trust_ratio_mask(row),
        trust_coefficient=row["trust_coefficient"],
        eps=row["eps"],
        trust_ratio_bounds=row["trust_ratio_bounds"],
        weight_norm_bounds=row["weight_norm_bounds"],
        weight_decay=row["weight_decay"],
        weight_decay_mask=row["weight_decay_mask"],
        denominator=row["denominator"],
        weight_decay_placement=row["weight_decay_placement"],
        zero_norm_ratio=row["zero_norm_ratio"],
        adapt_undecayed=row["adapt_undecayed"],
        clip_mode=row["clip_mode"],
        learning_rate=learning_rate,
        update_bounds=row["update_bounds"],
        inner=steps.pop(0) if late_ratio else None,
        stacked=stacked,
        axis_name=axis_name,
        sharded_mask=sharded_mask,
    )
    return precision.chain_in_wide_precision(ratio, *steps)


def _check(row: dict[str, Any]) -> None:
    for name in (
        "learning_rate_placement",
        "plain_learning_rate_placement",
        "trust_ratio_placement",
    ):
        arguments.require_choice(name, row[name], PLACEMENTS)
    arguments.require_choice(
        "weight_decay_placement", row["weight_decay_placement"], WEIGHT_DECAY_PLACEMENTS
    )
    rate_outside = (
        row["learning_rate_placement"] == row["plain_learning_rate_placement"] == "outside"
    )
    if row["trust_ratio_placement"] == "outside" and not rate_outside:
        raise ValueError(
            "trust_ratio_placement = 'outside' puts the ratio after the momentum: learning_rate_placement and "
            "plain_learning_rate_placement have to be 'outside' too"
        )
    if (
        row["weight_decay_placement"] in ("outside", "decoupled")
        and row["trust_ratio_placement"] == "inside"
    ):
        raise ValueError(
            f"weight_decay_placement = {row['weight_decay_placement']!r} with a momentum after it: the velocity would gather the "
            "decay; use 'inside', or trust_ratio_placement='outside'"
        )
    if row["denominator"] == "momentum" and row["trust_ratio_placement"] == "inside":
        raise ValueError(
            "denominator = 'momentum' divides by the norm of the momentum: trust_ratio_placement has to be 'outside'"
        )


def _momentum_steps(
    row: dict[str, Any], learning_rate, momentum_dtype, stacked
) -> list[optax.GradientTransformation]:
    """Return what follows the decayed gradient: momentum and learning rate, in the order of the variant."""
    adapted_order, plain_order = (
        row["learning_rate_placement"],
        row["plain_learning_rate_placement"],
    )
    velocity = moments.scale_by_lars_momentum(
        row["momentum"],
        row["nesterov"],
        dampening=row["momentum"] if row["dampening"] == "momentum" else row["dampening"],
        undamped_start=row["undamped_start"],
        momentum_dtype=momentum_dtype,
    )
    rate = lr_transform.scale_by_learning_rate(learning_rate)
    if adapted_order == plain_order:
        return [velocity, rate] if adapted_order == "outside" else [rate, velocity]

    def adapted(params: types.Params) -> types.PyTree:
        return trust_ratio.resolve_touched(
            params,
            variants.trust_ratio_mask(row),
            row["weight_decay_mask"],
            row["weight_decay"],
            row["adapt_undecayed"],
            stacked,
        ).adapted

    def plain(params: types.Params) -> types.PyTree:
        return jax.tree.map(lambda chosen: not chosen, adapted(params))

    inside, outside = (adapted, plain) if adapted_order == "inside" else (plain, adapted)
    unchanged = lambda updates, state: updates  # noqa: E731
    plain_momentum = lambda updates, state: state.momentum  # noqa: E731
    return [
        _only(inside, rate, unchanged),
        _only(adapted, velocity, plain_momentum) if row["nesterov"] else velocity,
        _only(outside, rate, unchanged),
    ]


def _only(
    mask: Callable[[types.Params], types.PyTree],
    tx: optax.GradientTransformation,
    others: Callable[[optax.Updates, Any], optax.Updates],
) -> optax.GradientTransformation:
    """Return a transform whose output is that of `tx` on some leaves only.

    Its state covers all leaves. `optax.masked` would leave holes in it, and what shards a state by the parameters stumbles over holes.

    Args:
      mask: selects the leaves, from the parameters.
      tx: the transform.
      others: (updates, new state) -> the output on the other leaves.
    """

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: types.Params | None = None
    ):
        out, state = tx.update(updates, state, params)
        rest = others(updates, state)
        pick = lambda chosen, new, old: new if chosen else old.astype(new.dtype)  # noqa: E731
        return jax.tree.map(pick, mask(params), out, rest), state

    return optax.GradientTransformation(tx.init, update_fn)
