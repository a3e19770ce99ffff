"""AGVM: each module's rate follows the noise of its gradient."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import tree, types
from lbopt.aggregators import _protocol
from lbopt.aggregators._disagreement import phi_modules
from lbopt.aggregators._group import Group
from lbopt.aggregators._protocol import Aggregated, Aggregator, AggregatorState, Extra
from lbopt.aggregators._wire import WireBytes, ring_bytes
from lbopt.errors import UserError
from lbopt.transforms import (
    UNKNOWN_PARAMS,
    EmaState,
    Labels,
    LayerNormsState,
    ModuleOf,
    ModuleScaleState,
    is_number,
    is_placeholder,
    require_above,
    require_at_least,
    require_bounds,
    require_decay_rate,
    require_whole,
    resolve_labels,
    squarable,
)


class AgvmState(NamedTuple):
    """What is known of each module.

    Attributes:
      count: int32 scalar, steps so far.
      scale: module -> fp32 scalar, the running mean of its factor.
      phi: module -> fp32 scalar, when it was last measured; 1 before, and where a half is zero.
    """

    count: jax.Array  # type: ignore[assignment]
    scale: dict[str, jax.Array]
    phi: dict[str, jax.Array]


def agvm(
    labels: Labels,
    anchor: str,
    interval: int = 5,
    start: int = 500,
    stop: int | None = None,
    alpha: float = 0.97,
    clip: tuple[float, float] | None = (0.5, 10.0),
    eps: float = 1e-6,
    adam_b2: float | None = None,
    adam_eps: float = 1e-8,
) -> Aggregator:
    r"""Adaptive gradient variance modulator: scale each module's update by its gradient's noise, relative to an anchor's.

    At steps t with start <= t <= stop and t divisible by `interval`, with a_k and b_k the mean gradients of module k over the first and the
    second half of the replicas:

        phi_k = 1 - cos(a_k, b_k)
        mu_k <- alpha mu_k + (1 - alpha) sqrt(clip((phi_anchor + eps) / (phi_k + eps)))

    The updates are the mean gradients. `scale_by_agvm`, last in the chain, multiplies by mu_k from `start` to `stop`, and by 1 before and after.
    Only at the steps that measure phi are twice as many bytes reduced: one all-reduce of the sum and of the difference of the halves.

    Args:
      labels: the module of each parameter, see `lbopt.scale_by_agvm`, which has to be given the same.
      anchor: the module that the others are compared with; the backbone, of a detector.
      interval: measure so often, in steps.
      start: first step that may measure and scale; after the warmup.
      stop: the last; None for no end.
      alpha: what the running mean keeps; 1 never leaves mu = 1.
      clip: bounds of the quotient, inside the root; None for none.
      eps: added to both sides of the quotient.
      adam_b2: for Adam's family: compare not gradients but a / (sqrt(v') + adam_eps), v' = adam_b2 v + (1 - adam_b2) (a / R)^2, with the
        optimizer's second moment v; None to compare gradients.
      adam_eps: see there.

    Returns:
      An `Aggregator` for an even number of replicas; it gives `agvm_scale`, `agvm_phi` and `agvm_modules`. It refuses an optimizer without
      `scale_by_agvm`, and one that takes a trust ratio after it.

    Raises:
      ValueError: naming an argument that is out of range; of its `init`, for an odd number of replicas, an anchor that is no module, or
        labels that do not fit the parameters.

    Note:
      The hook compares what two of its ranks hold; here, as there, these are the means of the halves. It divides by R once more before v' mixes
      them in, and so does this. The paper's own form places clip and eps elsewhere [recalled 80%: not read there].

    References:
      Large-batch Optimization for Dense Visual Predictions, arXiv 2210.11078; github.com/Sense-X/AGVM at b60d598, `agvm_optimizer_hook.py`,
      whose defaults these are.
    """
    for name, value, low in (("interval", interval, 1), ("start", start, 0)):
        require_whole(name, value, low)
    if stop is not None:
        require_whole("stop", stop, start)
    if not is_number(alpha) or not 0 <= alpha <= 1:
        raise UserError("alpha", alpha, "give a number in [0, 1]")
    require_bounds("clip", clip)
    require_above("eps", eps, 0)
    require_at_least("adam_eps", adam_eps, 0)
    if adam_b2 is not None:
        require_decay_rate("adam_b2", adam_b2)

    def init(params: types.Params, num_replicas: int) -> AggregatorState:
        if num_replicas % 2:
            raise ValueError(
                f"agvm: {num_replicas} replicas have no two halves; use an even number (replicas_per_device=2)"
            )
        if is_placeholder(params):
            return AggregatorState(shared=UNKNOWN_PARAMS)
        modules = dict.fromkeys(jax.tree.leaves(resolve_labels(labels, params)))
        if anchor not in modules:
            fix = f"use one of the modules {sorted(modules)}"
            raise UserError("anchor", anchor, fix, code="choice")
        scale, phi = (
            {module: jnp.ones((), jnp.float32) for module in modules} for _ in range(2)
        )  # donated apart
        return AggregatorState(shared=AgvmState(jnp.zeros((), jnp.int32), scale, phi))

    def preconditioned(gradient: types.PyTree, nu: types.PyTree, num_replicas: int) -> types.PyTree:
        if adam_b2 is None:
            return gradient

        def one(a: jax.Array, v: jax.Array) -> jax.Array:
            mixed = adam_b2 * v.astype(a.dtype) + (1 - adam_b2) * tree.square(
                squarable(a / num_replicas)
            )
            return a / (jnp.sqrt(mixed) + adam_eps)

        return jax.tree.map(one, gradient, nu)

    def update(
        rows: types.PyTree, state: AggregatorState, group: Group, extra: Extra
    ) -> Aggregated:
        count, scale, before = state.shared
        grads, total = _protocol.widened(rows), group.num_replicas
        modules = resolve_labels(labels, rows)
        within = count >= start if stop is None else (count >= start) & (count <= stop)

        def measured() -> tuple[Any, ...]:
            mean, *halves = _mean_and_halves(group, grads)
            found = phi_modules(
                modules, *(preconditioned(half, extra.second_moment, total) for half in halves)
            )
            found = {
                module: jnp.where(jnp.isnan(value), 1.0, value) for module, value in found.items()
            }  # cos of 0 is 0
            goal = {
                module: jnp.sqrt(
                    jnp.clip((found[anchor] + eps) / (value + eps), *(clip or (None, None)))
                )
                for module, value in found.items()
            }
            moved = {
                module: scale[module] + (1 - alpha) * (goal[module] - scale[module])
                for module in found
            }
            return mean, *jax.tree.map(lambda x: x.astype(jnp.float32), (moved, found))

        def plain() -> tuple[Any, ...]:
            return group.mean(grads), scale, before

        updates, scale, found = jax.lax.cond(within & (count % interval == 0), measured, plain)
        applied = {module: jnp.where(within, value, 1.0) for module, value in scale.items()}
        new_state = AggregatorState(shared=AgvmState(count + 1, scale, found))
        aux = {"agvm_scale": applied, "agvm_phi": found, "agvm_modules": ModuleOf.of(modules)}
        return Aggregated(_protocol.cast_like(updates, rows), new_state, aux)

    def sent(params: types.Params, num_replicas: int) -> WireBytes:
        ring = ring_bytes(params, num_replicas)
        return WireBytes(ring * (1 + 1 / interval), ring)

    return Aggregator(
        f"agvm(interval={interval})",
        init,
        update,
        sent,
        needs_second_moment=adam_b2 is not None,
        check_chain=_check_chain,
        compresses=False,
    )


def _mean_and_halves(
    group: Group, grads: types.PyTree
) -> tuple[types.PyTree, types.PyTree, types.PyTree]:
    """Return the means over all replicas, the first half and the second, by one reduction of the sum and the difference of the halves.

    The sum is added up as the plain mean's is, so that nothing changes where all scales stay 1.
    """
    total = group.num_replicas
    sign = jnp.where(group.numbers() < total // 2, 1.0, -1.0)

    def signed(x: jax.Array) -> jax.Array:
        return x * sign.reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype)

    # Without the barrier XLA moves the sum, which a plain step has too, out of the condition, and takes it here once more.
    sums, differences = jax.lax.optimization_barrier(
        group.sum((grads, jax.tree.map(signed, grads)))
    )
    first = jax.tree.map(lambda a, b: (a + b) / total, sums, differences)
    second = jax.tree.map(lambda a, b: (a - b) / total, sums, differences)
    return jax.tree.map(lambda x: x / total, sums), first, second


_MAY_FOLLOW = (LayerNormsState, EmaState)
"""States of transforms that look at the last update, and leave it."""


def _check_chain(opt_state: Any, params: types.Params) -> None:
    """See that the scale is applied, and that nothing changes the update afterwards."""
    order = _links(opt_state, jax.tree.structure(params))
    if optax.MultiStepsState in order:
        raise ValueError(
            "optax.MultiSteps hands nothing on to scale_by_agvm: use num_microsteps of make_train_step"
        )
    if ModuleScaleState not in order:
        raise ValueError(
            "agvm finds a scale that nobody applies: put lbopt.scale_by_agvm(labels) last in the optimizer's chain"
        )
    after = [kind for kind in order[order.index(ModuleScaleState) + 1 :] if kind not in _MAY_FOLLOW]
    if after:
        raise ValueError(
            f"scale_by_agvm comes before {after[0].__name__} in the optimizer's chain, and a trust ratio there would undo it: put it last"
        )


def _links(state: Any, like_params: Any) -> list[type]:
    """Return the types of the states of a chain, those of wrappers and of what they wrap too, in order.

    Args:
      state: of an optimizer, or a part of it.
      like_params: the structure of the parameters. In a state what has it too, a moment or a sum of gradients, is no link.
    """
    inner = functools.partial(_links, like_params=like_params)
    if (
        state is None
        or jax.tree_util.all_leaves([state])
        or jax.tree.structure(state) == like_params
    ):
        return []
    if isinstance(state, dict):
        return [kind for part in state.values() for kind in inner(part)]
    if not isinstance(state, (tuple, list)):
        return [type(state)]
    if hasattr(state, "_fields"):
        inside = () if isinstance(state, (ModuleScaleState, *_MAY_FOLLOW)) else state
        return [type(state), *(kind for part in inside for kind in inner(part))]
    if jax.tree_util.all_leaves(state):
        return []  # arrays of one link
    # A chain: whatever a link keeps, an array or nothing at all, it is one.
    return [kind for part in state for kind in inner(part) or [type(part)]]
