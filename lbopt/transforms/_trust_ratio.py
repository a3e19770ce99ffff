"""The layerwise trust ratio that LAMB and LARS share: one mechanism, whose options are what the public codes differ in."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import masks, stacks, tree, types
from lbopt.errors import UserError
from lbopt.transforms import _arguments, _per_path

Denominator = Literal["norm_of_sum", "sum_of_norms", "gradient_only", "momentum"]
DENOMINATORS = ("norm_of_sum", "sum_of_norms", "gradient_only", "momentum")
WeightDecayPlacement = Literal["inside", "outside", "norm_only", "decoupled", "before"]
WEIGHT_DECAY_PLACEMENTS = ("inside", "outside", "norm_only", "decoupled", "before")
ClipMode = Literal["scale", "clip"]
CLIP_MODES = ("scale", "clip")


class TrustRatioState(NamedTuple):
    """The ratio each adapted leaf got at the last update.

    Attributes:
      trust_ratio: path of each adapted leaf -> its ratio, an fp32 scalar, or an array with one per layer of a stack; 1
        before the first update. A plain dictionary: in the parameters' own containers a scalar would inherit the
        sharding of a matrix.
      inner: the state of the transform inside, empty if there is none.
      schedule_count: updates so far, kept only if the ratio looks at the learning rate.
    """

    trust_ratio: dict[str, jax.Array]
    inner: Any = optax.EmptyState()
    schedule_count: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class _Options:
    """The arguments of `scale_by_layerwise_trust_ratio`, checked."""

    trust_ratio_mask: types.Mask
    trust_coefficient: float | jax.Array
    eps: float | jax.Array
    trust_ratio_bounds: tuple[float, float] | None
    weight_norm_bounds: tuple[float, float] | None
    weight_decay: float | jax.Array
    weight_decay_mask: types.Mask
    denominator: Denominator
    weight_decay_placement: WeightDecayPlacement
    zero_norm_ratio: float | jax.Array | None
    adapt_undecayed: bool
    clip_mode: ClipMode
    learning_rate: optax.ScalarOrSchedule | None
    update_bounds: tuple[float, float] | None
    stacked: types.Stacked
    axis_name: types.AxisName
    sharded_mask: types.Mask
    near_one: bool
    """Whether the norms of what comes in are near 1, as those of Adam's directions."""

    def __post_init__(self) -> None:
        _arguments.require_above("trust_coefficient", self.trust_coefficient, 0)
        _arguments.require_at_least("eps", self.eps, 0)
        _arguments.require_at_least("weight_decay", self.weight_decay, 0)
        _arguments.require_bounds("trust_ratio_bounds", self.trust_ratio_bounds)
        _arguments.require_bounds("weight_norm_bounds", self.weight_norm_bounds)
        _arguments.require_bounds("update_bounds", self.update_bounds, low=None)
        _arguments.require_choice("denominator", self.denominator, DENOMINATORS)
        _arguments.require_choice(
            "weight_decay_placement", self.weight_decay_placement, WEIGHT_DECAY_PLACEMENTS
        )
        _arguments.require_choice("clip_mode", self.clip_mode, CLIP_MODES)
        _arguments.require_flag("adapt_undecayed", self.adapt_undecayed)
        if self.zero_norm_ratio is not None:
            _arguments.require_at_least("zero_norm_ratio", self.zero_norm_ratio, 0)
        if self.clip_mode == "clip" and self.learning_rate is None:
            fix = "it compares the ratio with the learning rate: pass learning_rate too"
            raise UserError("clip_mode", "clip", fix, code="conflict")
        if self.clip_mode == "clip" and self.trust_ratio_bounds is not None:
            fix = "it already bounds the ratio by the learning rate; use {bounds}=None"
            also = {"bounds": "trust_ratio_bounds"}
            raise UserError("clip_mode", "clip", fix, code="conflict", also=also)
        if self.weight_decay_placement == "decoupled" and self.learning_rate is None:
            fix = "it shrinks weights by the learning rate: pass learning_rate too"
            raise UserError("weight_decay_placement", "decoupled", fix, code="conflict")
        if self.weight_decay_placement == "norm_only" and self.denominator in (
            "gradient_only",
            "momentum",
        ):
            fix = (
                f"with denominator = {self.denominator!r} the decay would act nowhere; use "
                "'inside', or another denominator"
            )
            raise UserError("weight_decay_placement", "norm_only", fix, code="conflict")

    @property
    def needs_rate(self) -> bool:
        return self.clip_mode == "clip" or self.weight_decay_placement == "decoupled"

    def rate(self, count: jax.Array | None) -> Any:
        """Return the learning rate of this update; None where it is not looked at."""
        return (
            None
            if callable(self.learning_rate) and count is None
            else _arguments.rate_at(self.learning_rate, count)
        )

    def touched(self, params: types.Params) -> Touched:
        """Return which leaves of `params` are adapted and decayed."""
        return resolve_touched(
            params,
            self.trust_ratio_mask,
            self.weight_decay_mask,
            self.weight_decay,
            self.adapt_undecayed,
            self.stacked,
        )

    def plans(self, params: types.Params, touched: Touched) -> types.PyTree:
        """Return a `_Plan` per leaf of `params`."""
        split = masks.resolve_split(self.sharded_mask, self.axis_name, params)

        def plan(layer_axes: stacks.LayerAxes, adapted: bool, decayed: bool, over: bool) -> _Plan:
            return _Plan(self, adapted, decayed, layer_axes, split.axis_of(over))

        return jax.tree.map(plan, *touched, split.leaves)


class Touched(NamedTuple):
    """What a trust ratio does to each leaf.

    Attributes:
      layers: which axes count layers.
      adapted: whether it gets a ratio.
      decayed: whether it gets decay.
    """

    layers: types.PyTree
    adapted: types.PyTree
    decayed: types.PyTree

    def record(self) -> None:
        """Tell `lbopt.summarize_masks`, if it asks; call it in `init`."""
        masks.record_choice("stacked", self.layers)
        masks.record_choice("trust_ratio_mask", self.adapted)
        masks.record_choice("weight_decay_mask", self.decayed)


def resolve_touched(
    params: types.Params,
    trust_ratio_mask: types.Mask,
    weight_decay_mask: types.Mask,
    weight_decay: float | jax.Array,
    adapt_undecayed: bool,
    stacked: types.Stacked,
) -> Touched:
    """Work out masks and stacks together: a leaf without decay is not adapted where `adapt_undecayed` is False.

    Raises:
      ValueError: if a mask or a stack does not fit the parameters, or if masks that each select something leave nothing
        to adapt.
    """
    layers = stacks.resolve_stacked(stacked, params)
    chosen = masks.resolve_mask(trust_ratio_mask, params, "trust_ratio_mask", layers)
    decayed = masks.resolve_mask(weight_decay_mask, params, "weight_decay_mask", layers)
    if _arguments.is_number(weight_decay) and weight_decay == 0:
        decayed = jax.tree.map(lambda _: False, decayed)
    adapted = (
        chosen if adapt_undecayed else jax.tree.map(lambda a, d: bool(a and d), chosen, decayed)
    )
    any_decayed, any_chosen, any_adapted = (
        any(jax.tree.leaves(tree)) for tree in (decayed, chosen, adapted)
    )
    if any_decayed and any_chosen and not any_adapted:
        raise ValueError(
            "trust_ratio_mask and weight_decay_mask have no leaf in common, and adapt_undecayed = False: no leaf would be "
            "adapted; pass trust_ratio_mask=False if that is meant, or adapt_undecayed=True"
        )
    return Touched(layers, adapted, decayed)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What happens to one leaf; all arrays are fp32 or wider."""

    options: _Options
    adapted: bool
    decayed: bool
    layer_axes: stacks.LayerAxes
    axis_name: types.AxisName

    def update_norm(self, g: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
        norm = tree.norm_near_one if self.options.near_one else tree.l2_norm
        return norm(self._measured(g, w, y), self.layer_axes.axes, self.axis_name)

    def decay(self, w: jax.Array) -> jax.Array:
        return tree.scaled(w, self.options.weight_decay)

    def decayed_update(self, g: jax.Array, w: jax.Array) -> jax.Array:
        """Return what enters the transform inside: the update, with the decay if it goes there, clamped."""
        d = (
            g + self.decay(w)
            if self.decayed and self.options.weight_decay_placement == "inside"
            else g
        )
        return d if self.options.update_bounds is None else jnp.clip(d, *self.options.update_bounds)

    def ratio(self, g: jax.Array, w: jax.Array, y: jax.Array, rate: Any) -> jax.Array:
        """Return the ratio, of a shape that multiplies `y`, from incoming update, weight and outgoing direction."""
        options = self.options
        weight_norm = tree.l2_norm(w, self.layer_axes.axes, self.axis_name)
        rate = None if rate is None else jnp.asarray(rate, weight_norm.dtype)
        if self.decayed and options.weight_decay_placement == "decoupled":
            weight_norm = weight_norm * jnp.abs(
                1 - rate * jnp.asarray(options.weight_decay, weight_norm.dtype)
            )
        decay_norm = jnp.asarray(options.weight_decay, weight_norm.dtype) * weight_norm
        weight_norm = _clip(weight_norm, options.weight_norm_bounds)
        update_norm = total = self.update_norm(g, w, y)
        if options.denominator == "sum_of_norms" and self._decay_in_norm:
            total = update_norm + decay_norm
        fallback = 1 if options.zero_norm_ratio is None else options.zero_norm_ratio
        if options.zero_norm_ratio is None:
            defined = weight_norm + update_norm > 0
            ratio = options.trust_coefficient * weight_norm / (total + options.eps)
        else:
            defined = (weight_norm > 0) & (update_norm > 0)
            ratio = (
                options.trust_coefficient * weight_norm / jnp.where(defined, total + options.eps, 1)
            )
        ratio = jnp.where(defined, ratio, fallback)
        if options.clip_mode == "clip":
            ratio = jnp.where(ratio >= rate, 1, ratio / jnp.where(ratio >= rate, 1, rate))
        ratio = _clip(ratio, options.trust_ratio_bounds)
        if not options.adapt_undecayed:
            ratio = jnp.where(jnp.asarray(options.weight_decay) != 0, ratio, 1)
        return ratio.astype(tree.real_dtype(w.dtype))

    @property
    def _decay_in_norm(self) -> bool:
        return self.decayed and self.options.weight_decay_placement in ("inside", "norm_only")

    def _measured(self, g: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
        if self.options.denominator == "momentum":
            return y
        if self.options.denominator == "norm_of_sum" and self._decay_in_norm:
            return g + self.decay(w)
        return g

    def finish(self, y: jax.Array, w: jax.Array, ratio: jax.Array | None) -> jax.Array:
        """Return the direction times the ratio, plus the decay where that stays outside."""
        out = y if ratio is None else tree.scaled(y, ratio)
        late = self.decayed and self.options.weight_decay_placement in ("outside", "decoupled")
        return out + self.decay(w) if late else out


def scale_by_layerwise_trust_ratio(
    trust_ratio_mask: types.Mask = types.default(masks.weights_only),
    trust_coefficient: float | jax.Array = 1.0,
    eps: float | jax.Array = 0.0,
    trust_ratio_bounds: tuple[float, float] | None = None,
    weight_norm_bounds: tuple[float, float] | None = None,
    weight_decay: float | jax.Array = 0.0,
    weight_decay_mask: types.Mask = types.default(masks.weights_only),
    denominator: Denominator = "norm_of_sum",
    *,
    weight_decay_placement: WeightDecayPlacement = "inside",
    zero_norm_ratio: float | jax.Array | None = 1.0,
    adapt_undecayed: bool = True,
    clip_mode: ClipMode = "scale",
    learning_rate: optax.ScalarOrSchedule | None = None,
    update_bounds: tuple[float, float] | None = None,
    inner: optax.GradientTransformation | None = None,
    stacked: types.Stacked = None,
    axis_name: types.AxisName = None,
    sharded_mask: types.Mask = None,
    _near_one: bool = False,
) -> optax.GradientTransformation:
    r"""Add the weight decay, then scale each layer's update by a ratio of norms.

    For a leaf w with incoming update g and weight decay wd (0 where `weight_decay_mask` is False):

        d     = g + wd w
        y     = inner(d)                                                     (d itself without `inner`)
        ratio = trust_coefficient * phi(||w||) / (||d|| + eps)               norm_of_sum   (LAMB, optax.lars)
        ratio = trust_coefficient * phi(||w||) / (||g|| + wd ||w|| + eps)    sum_of_norms  (LARS)
        ratio = trust_coefficient * phi(||w||) / (||g|| + eps)               gradient_only (nvcaffe)
        ratio = trust_coefficient * phi(||w||) / (||y|| + eps)               momentum      (LARS as the LAMB paper has it)
        ratio = zero_norm_ratio where phi(||w||) or the measured norm (for sum_of_norms ||g||) is 0
        out   = clip(ratio, *trust_ratio_bounds) * y       on leaves in `trust_ratio_mask`;   out = y on the others

    The decay is part of this transform because the denominators differ in exactly where it enters. All arithmetic
    is in fp32 (or wider, for wider leaves); the output has the dtype of the incoming update. Complex leaves have real norms and ratios.

    Args:
      trust_ratio_mask: the leaves that are adapted (see `lbopt.types.Mask`); if not given, `lbopt.weights_only`: weights, not
        biases or normalization leaves.
      trust_coefficient: factor on the ratio, > 0; LAMB 1, LARS 0.001.
      eps: added to the denominator, >= 0.
      trust_ratio_bounds: (low, high) for the ratio, or None. (0, 1) on LAMB is LAMBC (arXiv 2011.13584).
      weight_norm_bounds: phi of the LAMB paper, (low, high) for ||w||, or None for the identity.
      weight_decay: coefficient >= 0; may be a traced scalar.
      weight_decay_mask: the leaves that are decayed; default as `trust_ratio_mask`.
      denominator: see above.
      weight_decay_placement: "inside" (as above); "outside" (in neither norm: out = ratio g + wd w); "norm_only" (in the
        denominator but not in the update); "decoupled" (timm: w shrinks by lr wd before its norm is taken, and the
        shrinkage is not scaled by the ratio); "before" (somebody added it already: only `adapt_undecayed` looks at it).
      zero_norm_ratio: the ratio where a norm is zero, >= 0; 1 in all public code but flax's. With LARS 1 means a step
        of 1 / trust_coefficient times the usual scale for a zero-initialised leaf. None divides all the same (flax): ratio 0 for
        zero weights, NaN for a zero update, 1 if both are zero.
      adapt_undecayed: False gives ratio 1 to leaves without decay, also where `weight_decay` is 0 (apex, timm).
      clip_mode: "scale", or "clip" (LARC): the step learning_rate * ratio is capped at learning_rate, so ratio becomes
        min(ratio / learning_rate, 1).
      learning_rate: number or schedule, the one that is applied later in the chain; needed for `clip_mode="clip"` and
        "decoupled", otherwise unused.
      update_bounds: (low, high), clamps each number of d on all leaves, before `inner`; the norms are taken before it.
      inner: a transform between the decay and the ratio, for instance a momentum which the ratio multiplies from
        outside.
      stacked: leaves that are stacks of layers (`nn.scan`) get one ratio per layer; (path, leaf) -> bool or number of
        leading layer axes, a pytree of those, `lbopt.stacked_paths`, or `lbopt.stacked_from_metadata`. Callable masks
        see one layer of a stack.
      axis_name: inside `shard_map`, the mapped axis (or axes) over which leaves are split: norms are summed over it.
      sharded_mask: with `axis_name`, the leaves that are split; None for all. A leaf that every shard holds whole must
        be left out, or its norm is counted once per shard.

    Returns:
      A transform whose state is `TrustRatioState`.

    Raises:
      ValueError: naming the argument, if it is out of range or contradicts another, if a mask selects nothing or does
        not fit the parameters, or if `params` is missing from `update`.

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
      `optax.scale_by_trust_ratio` takes norms in the parameter dtype, gives a stack of layers one ratio, keeps no record
      of the ratios and offers only norm_of_sum. In fp32 its norms are infinite from 1.8e19 and 0 below 1e-23; here they are right from
      1e-33 to 1e34 (`lamb` and `lans`: those of directions from 1e-27 to 6e10).
    """
    options = _Options(
        trust_ratio_mask=trust_ratio_mask,
        trust_coefficient=trust_coefficient,
        eps=eps,
        trust_ratio_bounds=trust_ratio_bounds,
        weight_norm_bounds=weight_norm_bounds,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        denominator=denominator,
        weight_decay_placement=weight_decay_placement,
        zero_norm_ratio=zero_norm_ratio,
        adapt_undecayed=adapt_undecayed,
        clip_mode=clip_mode,
        learning_rate=learning_rate,
        update_bounds=update_bounds,
        stacked=stacked,
        axis_name=axis_name,
        sharded_mask=sharded_mask,
        near_one=_near_one,
    )
    through = optax.identity() if inner is None else inner
    _arguments.require_transformation("inner", through)

    def init_fn(params: types.Params) -> TrustRatioState:
        count = jnp.zeros((), jnp.int32) if options.needs_rate else None
        if _per_path.is_placeholder(params):
            return TrustRatioState(_per_path.UNKNOWN_PARAMS, through.init(params), count)
        _arguments.require_float_leaves(
            params, "scale_by_layerwise_trust_ratio", update_bounds=options.update_bounds
        )
        touched = options.touched(params)
        touched.record()
        ones = jax.tree.map(
            lambda plan, p: _one(p, plan.layer_axes) if plan.adapted else None,
            options.plans(params, touched),
            params,
        )
        return TrustRatioState(_per_path.collect(params, ones), through.init(params), count)

    def update_fn(
        updates: optax.Updates, state: TrustRatioState, params: types.Params | None = None
    ) -> tuple[optax.Updates, TrustRatioState]:
        _arguments.require_params(params, "scale_by_layerwise_trust_ratio")
        tree.check_updates(updates, params)
        _arguments.require_state(state, TrustRatioState, "scale_by_layerwise_trust_ratio")
        plans = options.plans(params, options.touched(params))
        rate = options.rate(state.schedule_count)
        wide = jax.tree.map(lambda u, p: u.astype(tree.wide_dtype(p.dtype)), updates, params)
        weights = jax.tree.map(lambda p: p.astype(tree.wide_dtype(p.dtype)), params)
        decayed = jax.tree.map(lambda plan, g, w: plan.decayed_update(g, w), plans, wide, weights)
        directions, inner_state = through.update(decayed, state.inner, params)

        def adapt(
            u: jax.Array, plan: _Plan, g: jax.Array, w: jax.Array, y: jax.Array
        ) -> tuple[jax.Array, Any]:
            ratio = plan.ratio(g, w, y, rate) if plan.adapted else None
            out = plan.finish(y, w, ratio).astype(u.dtype)
            return out, None if ratio is None else ratio.reshape(plan.layer_axes.layers(w.shape))

        pairs = jax.tree.map(adapt, updates, plans, wide, weights, directions)
        updates, ratios = tree.unzip_pairs(updates, pairs)
        count = None if state.schedule_count is None else optax.safe_increment(state.schedule_count)
        return updates, TrustRatioState(_per_path.collect(params, ratios), inner_state, count)

    return optax.GradientTransformation(init_fn, update_fn)


def _one(param: Any, layer_axes: stacks.LayerAxes) -> jax.Array:
    return jnp.ones(layer_axes.layers(param.shape), tree.real_dtype(param.dtype))


def _clip(x: jax.Array, bounds: tuple[float, float] | None) -> jax.Array:
    return x if bounds is None else jnp.clip(x, bounds[0], bounds[1])
