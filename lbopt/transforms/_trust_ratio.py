"""The layerwise trust ratio of LAMB and LARS; its options are the differences of public codes.

LAMB is layerwise adaptive moments for batch training, LARS layerwise adaptive rate scaling.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, masks, stacks, tree, types
from lbopt.errors import UserError, require_choice
from lbopt.transforms import _arguments, _per_path, _selection

Denominator = Literal["norm_of_sum", "sum_of_norms", "gradient_only", "momentum"]
DENOMINATORS = ("norm_of_sum", "sum_of_norms", "gradient_only", "momentum")
WeightDecayPlacement = Literal["inside", "outside", "norm_only", "decoupled", "before"]
WEIGHT_DECAY_PLACEMENTS = ("inside", "outside", "norm_only", "decoupled", "before")
ClipMode = Literal["scale", "clip"]
CLIP_MODES = ("scale", "clip")
_FITS_ON_CHIP = 1 << 24
"""Most numbers of a direction that is kept: arrays of BERT-Large stay on chip on v5e and v6e.
A larger one would go through HBM once more than it does if it is computed again."""


class TrustRatioState(NamedTuple):
    """The ratio of each adapted leaf at the last update.

    Attributes:
      trust_ratio: Path of each adapted leaf -> its ratio, an fp32 scalar, or an array with one for
        each layer of a stack; 1 before the first update. It is a plain dictionary, because in the
        parameters' own containers a scalar would inherit the sharding of a matrix.
      inner: State of the transform inside, empty if there is none.
      schedule_count: int32 scalar, number of updates so far; None unless the ratio depends on the
        learning rate.
      initial_norm: Path of each adapted leaf -> its norm in `init`, like the ratios; None unless
        the ratio depends on it.
    """

    trust_ratio: dict[str, jax.Array]
    inner: Any = optax.EmptyState()
    schedule_count: jax.Array | None = None
    initial_norm: dict[str, jax.Array] | None = None


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
    """Whether the norms of incoming updates are near 1, as those of Adam's directions."""
    keep_direction: bool
    """Whether directions are written once, to memory on the chip, and not computed again."""
    weight_norm: Any
    """The norm in the numerator: "current", "initial" (that in `init`), or a number > 0."""

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_conflicts()

    def _check_ranges(self) -> None:
        _scalars.require_above("trust_coefficient", self.trust_coefficient, 0)
        _scalars.require_at_least("eps", self.eps, 0)
        _scalars.require_at_least("weight_decay", self.weight_decay, 0)
        _scalars.require_bounds("trust_ratio_bounds", self.trust_ratio_bounds)
        _scalars.require_bounds("weight_norm_bounds", self.weight_norm_bounds)
        _scalars.require_bounds("update_bounds", self.update_bounds, low=None)
        require_choice("denominator", self.denominator, DENOMINATORS)
        require_choice(
            "weight_decay_placement", self.weight_decay_placement, WEIGHT_DECAY_PLACEMENTS
        )
        require_choice("clip_mode", self.clip_mode, CLIP_MODES)
        _scalars.require_flag("adapt_undecayed", self.adapt_undecayed)
        if self.zero_norm_ratio is not None:
            _scalars.require_at_least("zero_norm_ratio", self.zero_norm_ratio, 0)

    def _check_conflicts(self) -> None:
        # A later link of the chain applies the learning rate, so the two settings that need its
        # value have no other source for it.
        also = ["learning_rate"]
        if self.clip_mode == "clip" and self.learning_rate is None:
            fix = "it compares the ratio with the learning rate; pass {learning_rate} too"
            raise UserError("clip_mode", "clip", fix, code="conflict", also=also)
        if self.clip_mode == "clip" and self.trust_ratio_bounds is not None:
            fix = "it already bounds the ratio by the learning rate; use {trust_ratio_bounds}=None"
            also = ["trust_ratio_bounds"]
            raise UserError("clip_mode", "clip", fix, code="conflict", also=also)

        placement = self.weight_decay_placement
        if placement == "decoupled" and self.learning_rate is None:
            fix = "it shrinks weights by the learning rate; pass {learning_rate} too"
            raise UserError("weight_decay_placement", placement, fix, code="conflict", also=also)
        if placement == "norm_only" and self.denominator in ("gradient_only", "momentum"):
            fix = (
                f"with {{denominator}} = {self.denominator!r} the decay would act nowhere; use "
                "'inside', or another {denominator}"
            )
            also = ["denominator"]
            raise UserError("weight_decay_placement", placement, fix, code="conflict", also=also)

    @property
    def needs_rate(self) -> bool:
        return self.clip_mode == "clip" or self.weight_decay_placement == "decoupled"

    @property
    def needs_initial_norm(self) -> bool:
        return isinstance(self.weight_norm, str) and self.weight_norm == "initial"

    def rate(self, count: jax.Array | None) -> Any:
        """Return the learning rate of this update; None if a schedule's is not needed."""
        if callable(self.learning_rate) and count is None:
            return None
        return _arguments.rate_at(self.learning_rate, count)

    def choose_leaves(self, params: types.Params) -> LeafChoices:
        """Return the leaves of `params` that are adapted and decayed."""
        return choose_leaves(
            params,
            self.trust_ratio_mask,
            self.weight_decay_mask,
            self.weight_decay,
            self.adapt_undecayed,
            self.stacked,
        )

    def rules(self, params: types.Params, choices: LeafChoices) -> types.PyTree:
        """Return a `_LeafRule` per leaf of `params`."""
        split = masks.resolve_split(self.sharded_mask, self.axis_name, params)

        def rule(
            layer_axes: stacks.LayerAxes, adapted: bool, decayed: bool, is_split: bool
        ) -> _LeafRule:
            return _LeafRule(self, adapted, decayed, layer_axes, split.axis_of(is_split))

        return jax.tree.map(rule, *choices, split.leaves)


class LeafChoices(NamedTuple):
    """The treatment of each leaf; each field is a pytree like the parameters.

    Attributes:
      layers: `LayerAxes`, the axes that count layers.
      adapted: Bool, whether the leaf gets a ratio.
      decayed: Bool, whether the leaf gets decay.
    """

    layers: types.PyTree
    adapted: types.PyTree
    decayed: types.PyTree

    def record(self) -> None:
        """Record the choices for `lbopt.summarize_masks`; call it in `init`."""
        masks.record_choice("stacked", self.layers)
        masks.record_choice("trust_ratio_mask", self.adapted)
        masks.record_choice("weight_decay_mask", self.decayed)


def choose_leaves(
    params: types.Params,
    trust_ratio_mask: types.Mask,
    weight_decay_mask: types.Mask,
    weight_decay: float | jax.Array,
    adapt_undecayed: bool,
    stacked: types.Stacked,
) -> LeafChoices:
    """Resolve masks and stacks together.

    With `adapt_undecayed=False` a leaf without decay is not adapted.

    Raises:
      UserError: If a mask or a stack does not fit the parameters, or if masks that each select
        leaves have none in common, so that nothing would be adapted.
    """
    layers = stacks.resolve_stacked(stacked, params)
    chosen = masks.resolve_mask(trust_ratio_mask, params, "trust_ratio_mask", layers)
    decayed = masks.resolve_mask(weight_decay_mask, params, "weight_decay_mask", layers)
    if _scalars.is_number(weight_decay) and weight_decay == 0:
        decayed = jax.tree.map(lambda _: False, decayed)
    if adapt_undecayed:
        return LeafChoices(layers, chosen, decayed)

    adapted = jax.tree.map(lambda a, d: bool(a and d), chosen, decayed)
    selects_each = any(jax.tree.leaves(decayed)) and any(jax.tree.leaves(chosen))
    if selects_each and not any(jax.tree.leaves(adapted)):
        fix = (
            "it has no leaf in common with {weight_decay_mask}, and {adapt_undecayed} = False, so "
            "no leaf would be adapted; pass False if that is meant, or {adapt_undecayed}=True"
        )
        also = ["weight_decay_mask", "adapt_undecayed"]
        raise UserError("trust_ratio_mask", trust_ratio_mask, fix, code="conflict", also=also)
    return LeafChoices(layers, adapted, decayed)


@dataclasses.dataclass(frozen=True)
class _LeafRule:
    """The arithmetic of one leaf, on arrays of fp32 or wider.

    Arguments are called as in `scale_by_layerwise_trust_ratio`: g is the incoming update, w the
    weight, y the direction, which is the output of `inner`.
    """

    options: _Options
    adapted: bool
    decayed: bool
    layer_axes: stacks.LayerAxes
    axis_name: types.AxisName

    @property
    def _decay_in_norm(self) -> bool:
        return self.decayed and self.options.weight_decay_placement in ("inside", "norm_only")

    def decay(self, w: jax.Array) -> jax.Array:
        return tree.scaled(w, self.options.weight_decay)

    def decayed_update(self, g: jax.Array, w: jax.Array) -> jax.Array:
        """Return the input of `inner`: the update, decayed if that is inside, and clamped."""
        inside = self.decayed and self.options.weight_decay_placement == "inside"
        d = g + self.decay(w) if inside else g
        return d if self.options.update_bounds is None else jnp.clip(d, *self.options.update_bounds)

    @property
    def layer(self) -> _selection.LeafTreatment:
        return _selection.LeafTreatment(self.adapted, self.layer_axes, self.axis_name)

    def ratio(
        self, g: jax.Array, w: jax.Array, y: jax.Array, rate: Any, initial: jax.Array | None
    ) -> jax.Array:
        """Return the trust ratio, real, of a shape that broadcasts against `y`."""
        options = self.options
        if isinstance(options.weight_norm, str) and initial is None:
            weight_norm = tree.l2_norm(w, self.layer_axes.axes, self.axis_name)
        else:
            kept = options.weight_norm if initial is None else initial
            weight_norm = self.layer.against(jnp.asarray(kept, tree.real_dtype(w.dtype)), w)
        weight_decay = jnp.asarray(options.weight_decay, weight_norm.dtype)
        rate = None if rate is None else jnp.asarray(rate, weight_norm.dtype)

        # The decoupled decay shrinks weights before their norm is taken.
        if self.decayed and options.weight_decay_placement == "decoupled":
            weight_norm = weight_norm * jnp.abs(1 - rate * weight_decay)
        decay_norm = weight_decay * weight_norm
        weight_norm = _clip(weight_norm, options.weight_norm_bounds)

        update_norm = self._update_norm(g, w, y)
        total = update_norm
        if options.denominator == "sum_of_norms" and self._decay_in_norm:
            total = update_norm + decay_norm

        ratio = self._quotient(weight_norm, update_norm, total)
        # The inner `where` avoids 0 / 0 at a rate of 0, for instance in the first step of a warmup.
        if options.clip_mode == "clip":
            ratio = jnp.where(ratio >= rate, 1, ratio / jnp.where(ratio >= rate, 1, rate))
        ratio = _clip(ratio, options.trust_ratio_bounds)
        # A traced decay may be 0, which the masks cannot know.
        if not options.adapt_undecayed:
            ratio = jnp.where(jnp.asarray(options.weight_decay) != 0, ratio, 1)
        return ratio.astype(tree.real_dtype(w.dtype))

    def _update_norm(self, g: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
        """Return the norm in the denominator, without the decay's for "sum_of_norms"."""
        measured = g
        if self.options.denominator == "momentum":
            measured = y
        elif self.options.denominator == "norm_of_sum" and self._decay_in_norm:
            measured = g + self.decay(w)
        norm = tree.norm_near_one if self.options.near_one else tree.l2_norm
        return norm(measured, self.layer_axes.axes, self.axis_name)

    def _quotient(
        self, weight_norm: jax.Array, update_norm: jax.Array, total: jax.Array
    ) -> jax.Array:
        """Return trust_coefficient * weight_norm / (total + eps), or `zero_norm_ratio`."""
        options = self.options
        if options.zero_norm_ratio is None:
            defined = weight_norm + update_norm > 0
            ratio = options.trust_coefficient * weight_norm / (total + options.eps)
            return jnp.where(defined, ratio, 1)
        defined = (weight_norm > 0) & (update_norm > 0)
        below = jnp.where(defined, total + options.eps, 1)
        ratio = options.trust_coefficient * weight_norm / below
        return jnp.where(defined, ratio, options.zero_norm_ratio)

    def finish(self, y: jax.Array, w: jax.Array, ratio: jax.Array | None) -> jax.Array:
        """Return the direction times the ratio, plus the decay if that is outside."""
        if ratio is not None and self.options.keep_direction and y.size <= _FITS_ON_CHIP:
            # The norm is that of the direction before this barrier, so it stays in the first pass.
            y = jax.lax.optimization_barrier(y)
        out = y if ratio is None else tree.scaled(y, ratio)
        outside = self.decayed and self.options.weight_decay_placement in ("outside", "decoupled")
        return out + self.decay(w) if outside else out


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
    _keep_direction: bool = False,
    _weight_norm: Any = "current",
) -> optax.GradientTransformation:
    r"""Add the weight decay, then scale each layer's update by a ratio of norms.

    For a leaf w with incoming update g and weight decay wd (0 where `weight_decay_mask` is False):

        d     = g + wd w
        y     = inner(d)                                 (d itself without `inner`)
        ratio = trust_coefficient * phi(||w||) / (denominator + eps)
        out   = clip(ratio, *trust_ratio_bounds) * y     (y where `trust_ratio_mask` is False)

        denominator     norm_of_sum     ||d||              LAMB, optax.lars
                        sum_of_norms    ||g|| + wd ||w||   LARS
                        gradient_only   ||g||              nvcaffe
                        momentum        ||y||              LARS as the LAMB paper writes it

    The ratio is `zero_norm_ratio` where phi(||w||) or the measured norm (||g|| for sum_of_norms) is
    0. The decay is part of this transform because the denominators differ in where it enters. All
    arithmetic is in fp32 (or wider, for wider leaves); the output has the dtype of the incoming
    update. Complex leaves have real norms and ratios.

    Args:
      trust_ratio_mask: The leaves that are adapted (see `lbopt.types.Mask`). The default,
        `lbopt.weights_only`, leaves out biases, vectors and normalization leaves.
      trust_coefficient: Factor > 0 on the ratio; 1 in LAMB, 0.001 in LARS.
      eps: Constant >= 0 added to the denominator.
      trust_ratio_bounds: (low, high) for the ratio, or None. (0, 1) on LAMB is LAMBC
        (arXiv:2011.13584v1).
      weight_norm_bounds: phi of the LAMB paper, (low, high) for ||w||; None for the identity.
      weight_decay: Coefficient wd >= 0; may be a traced scalar.
      weight_decay_mask: The leaves that are decayed.
      denominator: "norm_of_sum", "sum_of_norms", "gradient_only" or "momentum", as above.
      weight_decay_placement: Place at which the decay enters.
        "inside": the update and the denominator, as above.
        "outside": out = ratio g + wd w, in neither norm.
        "norm_only": the denominator, but not the update.
        "decoupled": w shrinks by lr wd before its norm is taken, and the shrinkage is not scaled by
        the ratio (timm).
        "before": an earlier transform added it; only `adapt_undecayed` depends on it here.
      zero_norm_ratio: Ratio >= 0 where a norm is zero; 1 in all public codes except flax's. With
        LARS, 1 gives a leaf that starts at zero a step of 1 / trust_coefficient times the usual
        size. None divides all the same (flax): ratio 0 for zero weights, NaN for a zero
        update, 1 if both are zero.
      adapt_undecayed: Whether leaves without decay are adapted. False gives them ratio 1, and all
        leaves if `weight_decay` is 0 (apex, timm).
      clip_mode: "scale", or "clip" (LARC), which caps the step learning_rate * ratio at
        learning_rate: the ratio becomes min(ratio / learning_rate, 1).
      learning_rate: Number or schedule that is applied later in the chain; needed for
        `clip_mode="clip"` and "decoupled", otherwise unused.
      update_bounds: (low, high) for each number of d on all leaves, before `inner`; None for no
        bounds. Norms are taken without them.
      inner: Transform between the decay and the ratio, for instance a momentum that the ratio
        multiplies from outside; None for none.
      stacked: Leaves that are stacks of layers (`nn.scan`), each layer with a ratio of its own. It
        is a function (path, leaf) -> bool or number of leading layer axes, a pytree of these,
        `lbopt.stacked_paths` or `lbopt.stacked_from_metadata`. Masks that are functions get one
        layer of a stack.
      axis_name: Inside `shard_map`, the mapped axis (or axes) over which leaves are split; norms
        are summed over it.
      sharded_mask: Mask of the leaves that are split over `axis_name`; None for all. Leave out
        leaves that every shard holds whole, or their norms are counted once per shard.

    Returns:
      A transform whose state is `TrustRatioState` and whose `update` needs `params`.

    Raises:
      UserError: For an argument that is out of range or contradicts another, a mask that selects
        nothing or does not fit the parameters, or an `update` without `params`.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_layerwise_trust_ratio(trust_ratio_mask=None)
    >>> params = {"kernel": jnp.full((2, 2), 3.0)}
    >>> state = tx.init(params)
    >>> updates, state = tx.update({"kernel": jnp.full((2, 2), 0.5)}, state, params)
    >>> float(state.trust_ratio["kernel"]), float(updates["kernel"][0, 0])
    (6.0, 3.0)

    References:
      You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 Minutes (LAMB),
      arXiv:1904.00962v5, Algorithm 2.
      You et al., Large Batch Training of Convolutional Networks (LARS), arXiv:1708.03888v3,
      Algorithm 1.

    Note:
      `optax.scale_by_trust_ratio` takes norms in the parameter dtype, gives a stack of layers one
      ratio, keeps no ratios and knows norm_of_sum only. In fp32 its norms are infinite from 1.8e19
      and 0 below 1e-23; here they are right from 1e-33 to 1e34, and those of the directions of
      `lamb` and `lans` from 1e-27 to 6e10.
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
        keep_direction=_keep_direction,
        weight_norm=_weight_norm,
    )
    through = optax.identity() if inner is None else inner
    _arguments.require_transformation("inner", through)

    def init_fn(params: types.Params) -> TrustRatioState:
        count = jnp.zeros((), jnp.int32) if options.needs_rate else None
        if _per_path.is_placeholder(params):
            unknown = _per_path.UNKNOWN_PARAMS if options.needs_initial_norm else None
            return TrustRatioState(_per_path.UNKNOWN_PARAMS, through.init(params), count, unknown)
        _arguments.require_float_leaves(params, update_bounds=options.update_bounds)
        choices = options.choose_leaves(params)
        choices.record()

        def one(rule: _LeafRule, p: jax.Array) -> jax.Array | None:
            shape = rule.layer_axes.layers(p.shape)
            return jnp.ones(shape, tree.real_dtype(p.dtype)) if rule.adapted else None

        rules = options.rules(params, choices)
        ratios = _per_path.collect(params, jax.tree.map(one, rules, params))
        initial = None
        if options.needs_initial_norm:
            layers = jax.tree.map(lambda rule: rule.layer, rules)
            initial = _selection.initial_norms(params, layers, "relative_update")
        return TrustRatioState(ratios, through.init(params), count, initial)

    def update_fn(
        updates: optax.Updates, state: TrustRatioState, params: types.Params | None = None
    ) -> tuple[optax.Updates, TrustRatioState]:
        _arguments.require_params(params, "scale_by_layerwise_trust_ratio")
        tree.check_updates(updates, params)
        _arguments.require_state(state, TrustRatioState)
        rules = options.rules(params, options.choose_leaves(params))
        rate = options.rate(state.schedule_count)

        # Norms of bf16 parameters in their own dtype would be wrong by up to half a percent.
        wide = jax.tree.map(lambda u, p: u.astype(tree.wide_dtype(p.dtype)), updates, params)
        weights = jax.tree.map(lambda p: p.astype(tree.wide_dtype(p.dtype)), params)
        decayed = jax.tree.map(lambda rule, g, w: rule.decayed_update(g, w), rules, wide, weights)
        directions, inner_state = through.update(decayed, state.inner, params)

        initial = jax.tree.map(lambda _: None, params)
        if options.needs_initial_norm:
            adapted = jax.tree.map(lambda rule: rule.adapted, rules)
            initial = _per_path.spread(params, state.initial_norm or {}, adapted)

        def adapt(
            u: jax.Array,
            rule: _LeafRule,
            g: jax.Array,
            w: jax.Array,
            y: jax.Array,
            start: jax.Array | None,
        ) -> tuple[jax.Array, jax.Array | None]:
            ratio = rule.ratio(g, w, y, rate, start) if rule.adapted else None
            out = rule.finish(y, w, ratio).astype(u.dtype)
            return out, None if ratio is None else ratio.reshape(rule.layer_axes.layers(w.shape))

        pairs = jax.tree.map(adapt, updates, rules, wide, weights, directions, initial)
        updates, ratios = tree.unzip_pairs(updates, pairs)
        count = None if state.schedule_count is None else optax.safe_increment(state.schedule_count)
        kept = _per_path.collect(params, ratios)
        return updates, TrustRatioState(kept, inner_state, count, state.initial_norm)

    return optax.GradientTransformation(init_fn, update_fn)


def _clip(x: jax.Array, bounds: tuple[float, float] | None) -> jax.Array:
    return x if bounds is None else jnp.clip(x, bounds[0], bounds[1])
