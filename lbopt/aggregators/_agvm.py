"""Adaptive gradient variance modulation (AGVM): modules with noisy gradients take smaller steps."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, tree, types
from lbopt.aggregators import _aggregator
from lbopt.aggregators._aggregator import Aggregated, Aggregator, AggregatorState, Extra
from lbopt.aggregators._disagreement import phi_modules, require_halves
from lbopt.aggregators._group import Group
from lbopt.aggregators._wire_bytes import WireBytes, ring_bytes
from lbopt.errors import UserError, require_choice
from lbopt.transforms import (
    UNKNOWN_PARAMS,
    EmaState,
    Labels,
    LayerNormsState,
    ModuleOf,
    ModuleScaleState,
    is_placeholder,
    resolve_labels,
    squarable,
)


class AgvmState(NamedTuple):
    """The factor and the gradient noise of each module.

    Attributes:
      count: int32 scalar, number of steps so far.
      scale: module -> fp32 scalar, running mean of its factor.
      phi: module -> fp32 scalar, the last measurement; 1 before the first, and if the mean gradient
        of a half is zero.
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
    r"""Scale the update of each module by its gradient noise, relative to an anchor module's.

    At steps t with start <= t <= stop and t divisible by `interval`, with a_k and b_k the mean
    gradients of module k over the first and the second half of the R replicas:

        phi_k = 1 - cos(a_k, b_k)
        mu_k <- alpha mu_k + (1 - alpha) sqrt(clip((phi_anchor + eps) / (phi_k + eps)))

    The updates are the mean gradients. `scale_by_agvm`, last in the chain, multiplies by mu_k from
    `start` to `stop`, and by 1 before and after. Steps that measure phi reduce twice as many bytes,
    by one all-reduce of the sum and the difference of the halves.

    Args:
      labels: Module of each parameter, the same as those of `lbopt.scale_by_agvm`.
      anchor: Name of the module that the others are compared with, a detector's backbone for
        instance.
      interval: Number of steps between measurements, >= 1.
      start: First step that may measure and scale, the end of the warmup for instance; >= 0.
      stop: Last step that may measure and scale; None for no end.
      alpha: Decay rate of the running mean, in [0, 1]; 1 never leaves mu = 1.
      clip: (low, high) for the quotient, inside the root; None for no bounds.
      eps: Constant > 0 added to both sides of the quotient.
      adam_b2: Decay rate of the second moment, for optimizers of Adam's family. Instead of
        gradients it compares a / (sqrt(v') + adam_eps), with
        v' = adam_b2 v + (1 - adam_b2) (a / R)^2 and the optimizer's second moment v. None compares
        gradients.
      adam_eps: Constant >= 0 in that quotient.

    Returns:
      An `Aggregator` for an even number of replicas, which passes `agvm_scale`, `agvm_phi` and
      `agvm_modules` to the optimizer. It refuses an optimizer without `scale_by_agvm`, and an
      optimizer with a trust ratio after it.

    Raises:
      UserError: For an argument that is out of range; by its `init`, for an odd number of replicas,
        an anchor that is no module, or labels that do not fit the parameters.

    >>> import jax.numpy as jnp, lbopt, optax
    >>> labels = {"head": "^head/", "body": ""}
    >>> tx = optax.chain(optax.sgd(0.1), lbopt.scale_by_agvm(labels))
    >>> tx = lbopt.aggregate(agvm(labels, anchor="body"), tx, num_replicas=2)
    >>> state = tx.init({"conv": {"kernel": jnp.ones(2)}, "head": {"kernel": jnp.ones(2)}})
    >>> sorted(state[0].shared.scale)
    ['body', 'head']

    Note:
      The published hook compares the gradients of two of its ranks, which are the means of the
      halves too. It divides by R once more before v' mixes them in, and so does this. The paper
      places clip and eps elsewhere [recalled 80%: not read there].

    References:
      Xue et al., Large-batch Optimization for Dense Visual Predictions, arXiv:2210.11078v1.
      Sense-X/AGVM@b60d59813d238f4c7a37cf85ac51203f408c85e4:agvm/optim/agvm_optimizer_hook.py, whose
      defaults these are.
    """
    interval = _scalars.whole("interval", interval)
    start = _scalars.whole("start", start, 0)
    if stop is not None:
        stop = _scalars.whole("stop", stop, start)
    if not _scalars.is_number(alpha) or not 0 <= alpha <= 1:
        raise UserError("alpha", alpha, "give a number in [0, 1]")

    _scalars.require_bounds("clip", clip)
    _scalars.require_above("eps", eps, 0)
    _scalars.require_at_least("adam_eps", adam_eps, 0)
    if adam_b2 is not None:
        _scalars.require_decay_rate("adam_b2", adam_b2)

    def init(params: types.Params, num_replicas: int) -> AggregatorState:
        _check_replicas(num_replicas)
        if is_placeholder(params):
            return AggregatorState(shared=UNKNOWN_PARAMS)
        modules = dict.fromkeys(jax.tree.leaves(resolve_labels(labels, params)))
        check_anchor(anchor, modules)

        # Arrays of their own for each field, as each is donated to the step.
        def ones() -> dict[str, jax.Array]:
            return {module: jnp.ones((), jnp.float32) for module in modules}

        return AggregatorState(shared=AgvmState(jnp.zeros((), jnp.int32), ones(), ones()))

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
        grads = _aggregator.widened(rows)
        total = group.num_replicas
        modules = resolve_labels(labels, rows)

        # Outside of these steps the factors do not change, and 1 is applied instead.
        within = count >= start if stop is None else (count >= start) & (count <= stop)

        def measured() -> tuple[Any, ...]:
            mean, *halves = _mean_and_halves(group, grads)
            found = phi_modules(
                modules, *(preconditioned(half, extra.second_moment, total) for half in halves)
            )
            # The cosine to a gradient of zeros counts as 0.
            found = {
                module: jnp.where(jnp.isnan(value), 1.0, value) for module, value in found.items()
            }

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

        # A condition and no selection: steps that do not measure send half as many bytes.
        with jax.named_scope(f"{_aggregator.ONE_IN}{interval}"):
            is_due = within & (count % interval == 0)
            updates, scale, found = jax.lax.cond(is_due, measured, plain)
        applied = {module: jnp.where(within, value, 1.0) for module, value in scale.items()}
        new_state = AggregatorState(shared=AgvmState(count + 1, scale, found))
        aux = {"agvm_scale": applied, "agvm_phi": found, "agvm_modules": ModuleOf.of(modules)}
        return Aggregated(_aggregator.cast_like(updates, rows), new_state, aux)

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
        check_replicas=_check_replicas,
        compresses=False,
    )


def check_anchor(anchor: str, modules: Iterable[str]) -> None:
    """Raise `UserError` unless the anchor of `agvm` is the name of a module."""
    require_choice("anchor", anchor, modules)


def _check_replicas(num_replicas: int) -> None:
    require_halves("num_replicas", num_replicas)


def _mean_and_halves(
    group: Group, grads: types.PyTree
) -> tuple[types.PyTree, types.PyTree, types.PyTree]:
    """Return the mean gradients over all replicas, over the first half and over the second.

    One reduction takes the sum and the difference of the halves. The sum is added up as that of the
    plain mean, so nothing changes while all factors stay 1.
    """
    total = group.num_replicas
    sign = jnp.where(group.numbers() < total // 2, 1.0, -1.0)

    def signed(x: jax.Array) -> jax.Array:
        return x * sign.reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype)

    # Without the barrier XLA moves the sum, which a plain step has too, out of the condition, and
    # takes it here a second time.
    sums, differences = jax.lax.optimization_barrier(
        group.sum((grads, jax.tree.map(signed, grads)))
    )
    first = jax.tree.map(lambda a, b: (a + b) / total, sums, differences)
    second = jax.tree.map(lambda a, b: (a - b) / total, sums, differences)
    return jax.tree.map(lambda x: x / total, sums), first, second


_MAY_FOLLOW = (LayerNormsState, EmaState)
"""States of transforms that read the last update and do not change it."""


def _check_chain(opt_state: Any, params: types.Params) -> None:
    """Raise `UserError` unless `scale_by_agvm` applies the factors, and last in the chain."""
    order = _links(opt_state, jax.tree.structure(params))
    # This comes first: MultiSteps hides a chain that is right but for the factors it never gets.
    if optax.MultiStepsState in order:
        fix = (
            "optax.MultiSteps passes no factors to scale_by_agvm; use num_microsteps of "
            "make_train_step"
        )
        raise UserError("tx", reason=fix, code="conflict")

    if ModuleScaleState not in order:
        fix = (
            "no link applies the factors that agvm finds; put lbopt.scale_by_agvm(labels) last in "
            "the optimizer's chain"
        )
        raise UserError("tx", reason=fix, code="missing")

    after = [kind for kind in order[order.index(ModuleScaleState) + 1 :] if kind not in _MAY_FOLLOW]
    if after:
        fix = (
            f"scale_by_agvm comes before {after[0].__name__} in the optimizer's chain, and a trust "
            "ratio there would undo it; put it last"
        )
        raise UserError("tx", reason=fix, code="conflict")


def _links(state: Any, like_params: Any) -> list[type]:
    """Return the types of the states in a chain in order, each wrapper before its inner states.

    Args:
      state: State of an optimizer, or a part of it.
      like_params: Structure of the parameters. A part of a state with this structure, such as a
        moment or a sum of gradients, is no link.
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
    # Every link of a chain counts as one, with or without state.
    return [kind for part in state for kind in inner(part) or [type(part)]]
