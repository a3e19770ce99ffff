"""Updates of a size relative to their weights', and weights that keep their norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, masks, tree, types
from lbopt.errors import require_choice
from lbopt.transforms import _arguments, _exact_norm, _per_path, _selection, _trust_ratio


def relative_update(
    scale: Literal["weight", "initial"] | float | jax.Array = "weight",
    mask: types.Mask = types.default(masks.weights_only),
    *,
    stacked: types.Stacked = None,
    axis_name: types.AxisName = None,
    sharded_mask: types.Mask = None,
) -> optax.GradientTransformation:
    r"""Scale each layer's update to the size of its weight, so that lr is the relative step.

        u <- (s / ||u||) u ,   s = ||w||, ||w_0|| or a fixed number;   0 where s or ||u|| is 0

    This is LAMB's trust ratio without decay, in which a zero weight does not move. Put it before
    the learning rate; a decay that is added after it is not scaled.

    Args:
      scale: "weight" for the norm of the weight, "initial" for its norm in `init`, or a number > 0.
      mask: The leaves that are scaled (see `lbopt.types.Mask`).
      stacked: Leaves that are stacks of layers, each layer with a norm of its own (see
        `scale_by_layerwise_trust_ratio`).
      axis_name: Inside `shard_map`, the axis over which leaves are split; norms are summed over it.
      sharded_mask: Mask of the leaves that are split over `axis_name`; None for all.

    Returns:
      A transform whose state is that of `scale_by_layerwise_trust_ratio`; its output keeps the
      dtype of the updates. `optimizer_metrics` shows its ratios.

    Raises:
      UserError: For another scale, or a mask that does not fit the parameters.

    >>> import jax.numpy as jnp
    >>> tx = relative_update()
    >>> params = {"kernel": jnp.full((2, 2), 3.0)}
    >>> updates, _ = tx.update({"kernel": jnp.full((2, 2), 0.5)}, tx.init(params), params)
    >>> float(updates["kernel"][0, 0])
    3.0

    References:
      NVIDIA-NeMo/Emerging-Optimizers@fd772926:
      emerging_optimizers/weight_update_hooks/relative_update.py ("weight"). You et al., LAMB,
      arXiv:1904.00962v5, Algorithm 2.

    Note:
      NVIDIA's hook takes norms below 1e-15 for 0; here only 0 is 0.
    """
    if isinstance(scale, str):
        require_choice("scale", scale, ("weight", "initial"))
    else:
        _scalars.require_above("scale", scale, 0)
    return _trust_ratio.scale_by_layerwise_trust_ratio(
        mask,
        weight_decay_mask=None,
        zero_norm_ratio=0.0,
        stacked=stacked,
        axis_name=axis_name,
        sharded_mask=sharded_mask,
        _weight_norm="current" if isinstance(scale, str) and scale == "weight" else scale,
    )


class SphereState(NamedTuple):
    """The norms that weights keep.

    Attributes:
      radius: Path of each chosen leaf -> its norm, an fp32 scalar, or an array with one for each
        layer of a stack; empty if the radius is a given number.
    """

    radius: dict[str, jax.Array]


def hyperball(
    radius: Literal["initial"] | float | jax.Array = "initial",
    mask: types.Mask = types.default(masks.weights_only),
    *,
    stacked: types.Stacked = None,
    axis_name: types.AxisName = None,
    sharded_mask: types.Mask = None,
) -> optax.GradientTransformation:
    r"""Keep each chosen weight on a sphere: after the update, its norm is the radius again.

        w <- R (w + u) / ||w + u||

    Put it last in the chain, after the learning rate. With `relative_update` before the learning
    rate it is the hyperball update, w <- R (w - lr R u / ||u||) / ||...||, in which the scale of
    the gradients has no effect and weight decay has no use.

    The norm is taken in pairs of numbers and the radius is kept, so the norm stays within one unit
    in the last place of the radius, in the dtype of the weight, however many steps are taken.

    Args:
      radius: "initial" for the norm in `init`, or a number > 0, to which the first update brings
        the weight.
      mask: The leaves that keep their norm (see `lbopt.types.Mask`).
      stacked: Leaves that are stacks of layers, each layer with a radius of its own.
      axis_name: Inside `shard_map`, the axis over which leaves are split; norms are summed over it.
      sharded_mask: Mask of the leaves that are split over `axis_name`; None for all.

    Returns:
      A transform whose state is `SphereState` and whose `update` needs `params`. Its output keeps
      the dtype of the updates.

    Raises:
      UserError: For another radius, a mask that does not fit the parameters, or "initial" with
        parameters that are shapes.

    >>> import jax.numpy as jnp, lbopt
    >>> params = {"kernel": jnp.array([[3.0, 0.0], [0.0, 4.0]])}
    >>> tx = optax.chain(lbopt.relative_update(), optax.scale_by_learning_rate(0.1), hyperball())
    >>> updates, _ = tx.update({"kernel": jnp.ones((2, 2))}, tx.init(params), params)
    >>> round(float(jnp.linalg.norm(params["kernel"] + updates["kernel"])), 6)
    5.0

    References:
      Wen et al., Hyperball, arXiv:2606.16899. NVIDIA-NeMo/Emerging-Optimizers@fd772926:
      emerging_optimizers/weight_update_hooks/hyperball.py.

    Note:
      A layer that starts at zero stays zero: leave it out by the mask, or give a radius; `init`
      warns. In bf16 a step below half a unit in the last place is lost, as in every optimizer; see
      `round_stochastically`.
    """
    if isinstance(radius, str):
        require_choice("radius", radius, ("initial",))
    else:
        _scalars.require_above("radius", radius, 0)
    selection = _selection.Selection(mask, stacked, axis_name, sharded_mask)

    def init_fn(params: types.Params) -> SphereState:
        if _per_path.is_placeholder(params):
            return SphereState(_per_path.UNKNOWN_PARAMS)
        _arguments.require_float_leaves(params)
        selection.record(params)
        if not isinstance(radius, str):
            return SphereState({})
        return SphereState(_selection.initial_norms(params, selection.layers(params), "hyperball"))

    def project(
        w: jax.Array, u: jax.Array, layer: _selection.LeafTreatment, kept: jax.Array | None
    ) -> jax.Array:
        wanted = jnp.asarray(radius if kept is None else kept, tree.real_dtype(w.dtype))
        wanted = layer.against(wanted, w)
        # Scaled by a power of two, which is exact, the squares are far from overflow.
        scale = _selection.power_of_two(wanted)
        moved = tree.scaled(w + u, scale)
        norm = _exact_norm.exact_norm(moved, layer.axes.axes, layer.axis_name)
        factor = _exact_norm.ratio(wanted * scale, norm)
        return tree.scaled(_exact_norm.times(moved, factor), 1 / scale) - w

    def update_fn(
        updates: optax.Updates, state: SphereState, params: types.Params | None = None
    ) -> tuple[optax.Updates, SphereState]:
        _arguments.require_state(state, SphereState)
        has_radius = isinstance(radius, str)
        kept = state.radius if has_radius else None
        return _after(updates, params, selection, project, "hyperball", kept), state

    return optax.GradientTransformation(init_fn, update_fn)


def radial_brake(
    outward_scale: float | jax.Array = 0.5,
    inward_scale: float | jax.Array = 1.0,
    mask: types.Mask = types.default(masks.weights_only),
    *,
    stacked: types.Stacked = None,
    axis_name: types.AxisName = None,
    sharded_mask: types.Mask = None,
) -> optax.GradientTransformation:
    r"""Damp the change of each weight's norm, and leave the direction that the update gives it.

        w <- (||w|| + s (||w + u|| - ||w||)) / ||w + u||  (w + u) ,   s = outward_scale where the
        norm would grow, inward_scale where it would shrink

    Put it last in the chain, after the learning rate. 1 and 1 change nothing; 0 and 0 keep each
    norm at its last value, without the radius that `hyperball` remembers.

    Args:
      outward_scale: Share of a growth of the norm that is kept, in [0, 1].
      inward_scale: Share of a shrinkage that is kept, in [0, 1].
      mask: The leaves whose norm is damped (see `lbopt.types.Mask`).
      stacked: Leaves that are stacks of layers, each layer with a norm of its own.
      axis_name: Inside `shard_map`, the axis over which leaves are split; norms are summed over it.
      sharded_mask: Mask of the leaves that are split over `axis_name`; None for all.

    Returns:
      A stateless transform whose `update` needs `params`; its output keeps the dtype of the
      updates.

    Raises:
      UserError: For a share outside of [0, 1], or a mask that does not fit the parameters.

    >>> import jax.numpy as jnp
    >>> tx = radial_brake(0.5)
    >>> params = {"kernel": jnp.ones((2, 2))}
    >>> updates, _ = tx.update({"kernel": jnp.ones((2, 2))}, tx.init(params), params)
    >>> float(updates["kernel"][0, 0])
    0.5

    References:
      NVIDIA-NeMo/Emerging-Optimizers@fd772926:
      emerging_optimizers/weight_update_hooks/radial_brake.py.
    """
    for argument, share in (("outward_scale", outward_scale), ("inward_scale", inward_scale)):
        _scalars.require_scalar(argument, share)
        _scalars.checked(argument, share, "a number in [0, 1]", lambda n: 0 <= n <= 1, traced=True)
    selection = _selection.Selection(mask, stacked, axis_name, sharded_mask)

    def init_fn(params: types.Params) -> optax.EmptyState:
        selection.record(params)
        return optax.EmptyState()

    def brake(
        w: jax.Array, u: jax.Array, layer: _selection.LeafTreatment, kept: jax.Array | None
    ) -> jax.Array:
        del kept
        moved = w + u
        before, after = (tree.l2_norm(x, layer.axes.axes, layer.axis_name) for x in (w, moved))
        share = jnp.where(after >= before, outward_scale, inward_scale).astype(before.dtype)
        wanted = before + share * (after - before)
        factor = jnp.where(after > 0, wanted / jnp.where(after > 0, after, 1), 0)
        return tree.scaled(moved, factor) - w

    def update_fn(
        updates: optax.Updates, state: optax.EmptyState, params: types.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        return _after(updates, params, selection, brake, "radial_brake"), state

    return optax.GradientTransformation(init_fn, update_fn)


def update_floor(
    floor: float | jax.Array = 0.35,
    mask: types.Mask = types.default(masks.weights_only),
    *,
    stacked: types.Stacked = None,
    axis_name: types.AxisName = None,
    sharded_mask: types.Mask = None,
) -> optax.GradientTransformation:
    r"""Scale up updates that are small beside their weight: at least floor * ||w||, before lr.

        u <- max(1, floor ||w|| / ||u||) u ;   a zero update stays zero

    Put it before the learning rate. Where the floor always acts it is `relative_update`.

    Args:
      floor: Least ratio ||u|| / ||w|| >= 0.
      mask: The leaves that have the floor (see `lbopt.types.Mask`).
      stacked: Leaves that are stacks of layers, each layer with norms of its own.
      axis_name: Inside `shard_map`, the axis over which leaves are split; norms are summed over it.
      sharded_mask: Mask of the leaves that are split over `axis_name`; None for all.

    Returns:
      A stateless transform whose `update` needs `params`; its output keeps the dtype of the
      updates.

    Raises:
      UserError: For a floor below 0, or a mask that does not fit the parameters.

    >>> import jax.numpy as jnp
    >>> tx = update_floor(0.5)
    >>> params = {"kernel": jnp.ones((2, 2))}
    >>> updates, _ = tx.update({"kernel": jnp.full((2, 2), 0.1)}, tx.init(params), params)
    >>> round(float(updates["kernel"][0, 0]), 6)
    0.5

    References:
      KellerJordan/modded-nanogpt@4a2e8079:records/track_3_optimization/results/
      20260504_contra_muon_mlp_soapish ("u/w floor").
    """
    _scalars.require_at_least("floor", floor, 0)
    selection = _selection.Selection(mask, stacked, axis_name, sharded_mask)

    def init_fn(params: types.Params) -> optax.EmptyState:
        selection.record(params)
        return optax.EmptyState()

    def lift(
        w: jax.Array, u: jax.Array, layer: _selection.LeafTreatment, kept: jax.Array | None
    ) -> jax.Array:
        del kept
        weight, size = (tree.l2_norm(x, layer.axes.axes, layer.axis_name) for x in (w, u))
        factor = jnp.asarray(floor, weight.dtype) * weight / jnp.where(size > 0, size, 1)
        return tree.scaled(u, jnp.where(size > 0, jnp.maximum(factor, 1), 1))

    def update_fn(
        updates: optax.Updates, state: optax.EmptyState, params: types.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        return _after(updates, params, selection, lift, "update_floor"), state

    return optax.GradientTransformation(init_fn, update_fn)


def _after(
    updates: optax.Updates,
    params: types.Params | None,
    selection: _selection.Selection,
    fn: Callable[[jax.Array, jax.Array, _selection.LeafTreatment, jax.Array | None], jax.Array],
    transform: str,
    kept: dict[str, jax.Array] | None = None,
) -> optax.Updates:
    """Return fn(weight, update, layer, kept value) for the chosen leaves, in fp32 or wider."""
    _arguments.require_params(params, transform)
    tree.check_updates(updates, params)
    layers = selection.layers(params)
    values = jax.tree.map(lambda _: None, params)
    if kept is not None:
        has_value = jax.tree.map(lambda layer: layer.chosen, layers)
        values = _per_path.spread(params, kept, has_value)

    def one(u: jax.Array, w: jax.Array, layer: _selection.LeafTreatment, value: Any) -> jax.Array:
        if not layer.chosen:
            return u
        wide = tree.wide_dtype(w.dtype)
        return fn(w.astype(wide), u.astype(wide), layer, value).astype(u.dtype)

    return jax.tree.map(one, updates, params, layers, values)
