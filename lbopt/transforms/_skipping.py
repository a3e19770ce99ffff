"""Updates from bad gradients, skipped and counted."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, types
from lbopt.transforms import _arguments, _clipping


class SkipState(NamedTuple):
    """Numbers of skipped updates, and the state of the optimizer inside.

    Attributes:
      skipped_nonfinite: int32 scalar, updates skipped because a gradient was infinite or NaN.
      skipped_spikes: int32 scalar, updates skipped because the global norm jumped.
      consecutive: int32 scalar, updates skipped since the last one that was applied.
      limit_reached: Bool scalar, True once more than `max_consecutive` updates in a row had a
        gradient that was not finite.
      typical_norm: fp32 scalar, running mean of the global norms of applied updates.
      applied: int32 scalar, number of applied updates.
      inner: State of the transform inside.

    >>> import jax.numpy as jnp, optax
    >>> tx = skip_bad_updates(optax.sgd(0.1))
    >>> _, state = tx.update({"w": jnp.array([jnp.nan])}, tx.init({"w": jnp.zeros(1)}))
    >>> int(state.skipped_nonfinite), int(state.applied), bool(state.limit_reached)
    (1, 0, False)
    """

    skipped_nonfinite: jax.Array
    skipped_spikes: jax.Array
    consecutive: jax.Array
    limit_reached: jax.Array
    typical_norm: jax.Array
    applied: jax.Array
    inner: Any


def skip_bad_updates(
    inner: optax.GradientTransformation,
    max_consecutive: int = 10,
    spike_factor: float | None = None,
    *,
    norm_decay: float = 0.95,
    warmup_updates: int = 20,
    axis_name: types.AxisName = None,
    sharded_mask: types.Mask = None,
) -> optax.GradientTransformation:
    r"""Run `inner` only on good gradients; give zero updates and keep its state otherwise.

    A gradient is bad if its global norm G is not finite, or, with `spike_factor`, if
    G > spike_factor * typical, where the typical norm is an average over applied updates:

        typical <- norm_decay * typical + (1 - norm_decay) * G      (its first value is G itself)

    After `max_consecutive` spikes in a row the next one is applied: the norm has moved to another
    level. A gradient that is not finite is never applied; after `max_consecutive` in a row
    `limit_reached` is set for good. `lbopt.optimizer_metrics` shows it, and `lbopt train` stops.

    Args:
      inner: The optimizer.
      max_consecutive: Number of bad gradients in a row that are skipped, >= 0.
      spike_factor: Factor above 1 on the typical norm, or None to let spikes through.
      norm_decay: Decay rate of the typical norm, in [0, 1).
      warmup_updates: Number of applied updates before spikes are looked for, >= 0.
      axis_name: Inside `shard_map`, the axis over which leaves are split; squares are summed over
        it.
      sharded_mask: Mask of the leaves that are split over `axis_name`; None for all.

    Returns:
      A transform whose state is `SkipState`.

    Raises:
      UserError: For an argument that is out of range.

    >>> import jax.numpy as jnp
    >>> tx = skip_bad_updates(optax.sgd(1.0))
    >>> state = tx.init({"w": jnp.zeros(1)})
    >>> updates, state = tx.update({"w": jnp.array([jnp.nan])}, state)
    >>> float(updates["w"][0]), int(state.skipped_nonfinite)
    (0.0, 1)

    Note:
      `optax.apply_if_finite` applies a non-finite update once its limit is passed, and knows no
      spikes. Place this outermost, also around a clip: a clip hides a spike but not its direction.
      A gradient of 1e20 is finite, and so is its norm here. It makes the second moments of
      `optax.scale_by_adam` infinite for good, but not those of `lamb`, `lans` and
      `scale_by_lamb_moments`.
    """
    _arguments.require_transformation("inner", inner)
    _scalars.require_at_least("max_consecutive", max_consecutive, 0)
    _scalars.require_at_least("warmup_updates", warmup_updates, 0)
    _scalars.require_decay_rate("norm_decay", norm_decay)
    if spike_factor is not None:
        _scalars.require_above("spike_factor", spike_factor, 1)

    def init_fn(params: types.Params) -> SkipState:
        def zero() -> jax.Array:
            return jnp.zeros((), jnp.int32)

        return SkipState(
            skipped_nonfinite=zero(),
            skipped_spikes=zero(),
            consecutive=zero(),
            limit_reached=jnp.zeros((), bool),
            typical_norm=jnp.zeros((), jnp.float32),
            applied=zero(),
            inner=inner.init(params),
        )

    def update_fn(
        updates: optax.Updates,
        state: SkipState,
        params: types.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, SkipState]:
        _arguments.require_state(state, SkipState)
        norm = _clipping.global_norm(updates, axis_name, sharded_mask).astype(jnp.float32)
        nonfinite = ~jnp.isfinite(norm)

        # After `max_consecutive` skips in a row large norms are applied: they are no spikes.
        spike = jnp.zeros((), bool)
        if spike_factor is not None:
            settled = (state.applied >= warmup_updates) & (state.applied > 0)
            spike = ~nonfinite & settled & (norm > spike_factor * state.typical_norm)
            spike &= state.consecutive < max_consecutive
        bad = nonfinite | spike

        def apply(updates: optax.Updates, inner_state: Any) -> tuple[optax.Updates, Any]:
            return optax.with_extra_args_support(inner).update(
                updates, inner_state, params, **extra_args
            )

        def skip(updates: optax.Updates, inner_state: Any) -> tuple[optax.Updates, Any]:
            like, _ = jax.eval_shape(apply, updates, inner_state)  # `inner` may give another dtype
            zeros = jax.tree.map(lambda u, out: jnp.zeros_like(u, out.dtype), updates, like)
            return zeros, inner_state

        updates, inner_state = jax.lax.cond(bad, skip, apply, updates, state.inner)
        consecutive = jnp.where(bad, state.consecutive + 1, 0)

        # Only applied updates count for the typical norm.
        average = norm_decay * state.typical_norm + (1 - norm_decay) * norm
        typical_norm = jnp.where(state.applied == 0, norm, average)
        return updates, SkipState(
            skipped_nonfinite=state.skipped_nonfinite + nonfinite.astype(jnp.int32),
            skipped_spikes=state.skipped_spikes + spike.astype(jnp.int32),
            consecutive=consecutive,
            limit_reached=state.limit_reached | (nonfinite & (consecutive > max_consecutive)),
            typical_norm=jnp.where(bad, state.typical_norm, typical_norm),
            applied=state.applied + (~bad).astype(jnp.int32),
            inner=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
