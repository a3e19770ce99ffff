"""The optimizer of a run, and its construction; every number that a sweep varies may be traced."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import optax

from lbopt import _scalars, errors, masks, parallel, stacks, tree, types
from lbopt.config import _foreign
from lbopt.config._checks import DTYPES
from lbopt.config._fields import GIVEN, NOT_ZERO, Condition, When, only, only_default
from lbopt.errors import require, require_choice
from lbopt.transforms import (
    VARIANTS,
    Labels,
    LambVariant,
    LarsVariant,
    Transfer,
    clip_by_global_norm,
    compress_state,
    lamb,
    lans,
    lars,
    monitor_layers,
    scale_by_agvm,
    scale_by_learning_rate,
    skip_bad_updates,
    squarable,
    track_ema,
    track_noise_scale,
)

OPTIMIZERS = ("adam", "adamw", "lamb", "lans", "lars", "momentum", "rmsprop")
CLIP_STAGES = (*parallel.CLIP_STAGES, "none")
ADAM_LIKE = ("adam", "adamw", "lamb", "lans")
_LAYERWISE = ("lamb", "lans", "lars")
_WITH_VELOCITY = ("lars", "momentum", "rmsprop")
_OURS_DECAYED = tuple(name for name in OPTIMIZERS if name != "adam")
_DECAYED = Condition(
    "one with weight decay",
    lambda name: name in _OURS_DECAYED or _foreign.may_take(name, _foreign.DECAY),
)
_WITH_DECAY_MASK = Condition(
    "one with a mask of the weight decay",
    lambda name: name in _OURS_DECAYED or _foreign.may_take(name, *_foreign.MASKS),
)
_FOREIGN = Condition("a matrix optimizer, optax.NAME, or your own", _foreign.is_foreign)


def _variants_where(holds: Callable[[Any], bool]) -> tuple[When, ...]:
    """Return conditions: an optimizer, with one of its variants whose options `holds` accepts."""
    found = {
        name: tuple(key for key, variant in variants.items() if holds(variant.options))
        for name, variants in VARIANTS.items()
    }
    return tuple({"name": (name,), "variant": keys} for name, keys in found.items() if keys)


# Without decay, some variants adapt no layer, and some adapt the leaves of the decay's mask.
_ADAPTING = _variants_where(lambda options: options.adapt_undecayed)
_MASKED: tuple[When, ...] = (
    {"name": _WITH_DECAY_MASK, "weight_decay": NOT_ZERO},
    *_variants_where(
        lambda options: options.adapt_undecayed and isinstance(options.trust_ratio_mask, str)
    ),
)
_ADAPTED: tuple[When, ...] = (
    {"name": _LAYERWISE, "weight_decay": NOT_ZERO},
    {"name": ("lans",)},
    *_ADAPTING,
)
_ADAPTED_BY_LARS: tuple[When, ...] = (
    {"name": ("lars",), "weight_decay": NOT_ZERO},
    *(when for when in _ADAPTING if when["name"] == ("lars",)),
)


@dataclasses.dataclass
class OptimizerConfig:
    """The optimizer, and quantities that are measured beside it.

    Attributes:
      name: "lamb", "lans", "lars", "adamw", "adam", "momentum" or "rmsprop" (TensorFlow's form, as
        in EfficientNet). Or one whose other numbers are `options`: "adamh", "dion", "kron",
        "muloco", "muon", "muonh", "muown", "normuon", "scion", "shampoo", "soap" or "soaph" of
        lbopt; "optax.NAME" for any of Optax's, "optax.contrib.muon" for instance; or a function of
        yours that returns an `optax.GradientTransformation`, "module:function" or
        "file.py:function". These get the learning rate, the weight decay and its mask, and the axes
        of hidden matrices, as far as they have such arguments; the updates of a function without a
        `learning_rate`, or of a finished transformation, are multiplied by the schedule's number.
      variant: Public code to follow; `lbopt.describe()` lists them. Options without a field here
        are the variant's.
      weight_decay: Weight decay, never the variant's nor Optax's default. Decoupled for lamb, lans
        and adamw; added to the gradient for lars, momentum and rmsprop. Adam has none: use adamw.
      weight_decay_exclude: Regular expressions, searched in the paths of parameters, `("^embed/",)`
        for instance. Parameters that they match are not decayed, and neither are those that the
        default leaves out: for lamb, lars and the matrix optimizers the variant's choice, for the
        rest biases, normalization and other vectors.
      weight_decay_include: Regular expressions. Parameters that they match are decayed, also those
        that the variant or `weight_decay_exclude` leave out.
      momentum: Decay of the velocity, in [0, 1).
      nesterov: Whether momentum is Nesterov's.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Constant in the denominator; under the root for rmsprop.
      rmsprop_decay: Decay of rmsprop's mean of squares, in [0, 1).
      trust_coefficient: Factor of the trust ratio; None for the variant's.
      trust_ratio_eps: Constant in the ratio's denominator; None for the variant's.
      trust_ratio_clip_mode: "scale", or "clip" (LARC: a layer's rate is min(learning rate, ratio));
        None for the variant's.
      trust_ratio_bounds: Bounds (low, high) of the trust ratio; None for the variant's.
      trust_ratio_exclude: Regular expressions. Parameters that they match have trust ratio 1, as
        have those that the variant leaves out. A variant that adapts "as_weight_decay" starts from
        the decayed ones.
      trust_ratio_include: Regular expressions. Parameters that they match are adapted, also those
        that the variant or `trust_ratio_exclude` leave out.
      max_grad_norm: Largest global gradient norm; None for the variant's, or no clipping.
      clip_stage: Stage of clipping: "replica" (each replica's gradient, before the mean), "mean"
        (after it, each microstep's), "accumulated" (the whole gradient of the step), or "none" (no
        clipping, whatever the variant says).
      ema_decay: Decay of an average of the parameters that is evaluated in their place (0.9999 in
        EfficientNet); None for no average.
      ema_ramp: Whether the decay of that average rises with the updates.
      skip_limit: Largest number of updates in a row that may be skipped because their gradient is
        not finite; one more ends the run. None applies every update.
      spike_factor: Multiple of the usual gradient norm above which an update is skipped too; None
        for no such limit.
      mu_dtype: Dtype of the first moment or of the velocity, "float32" or "bfloat16".
      nu_dtype: Dtype of the second moment, "float32" or "bfloat16".
      state_format: Format in which moments are kept between steps: "8bit_dynamic", "8bit_linear" or
        "bf16_stochastic" (see `lbopt.compress_state`); None for their dtypes.
      track_noise_scale: Whether the gradient noise scale is logged; needs microsteps or several
        replicas.
      noise_scale_per_layer: Whether that of each parameter is logged too, and that of the gains and
        shifts of normalization layers alone.
      monitor_layers: Whether every layer's weight norm, update norm and their quotient are logged.
      options: Other arguments of a matrix optimizer, of one of Optax, or of your own; dtypes by
        name.

    >>> from lbopt.config import TrainConfig
    >>> optimizer = OptimizerConfig("lars", weight_decay=1e-4, momentum=0.9)
    >>> TrainConfig(data="digits", model="cnn", optimizer=optimizer).validate()
    """

    name: str = "lamb"
    variant: str = only("paper", name=tuple(VARIANTS))
    weight_decay: float = only(0.0, name=_DECAYED)
    weight_decay_exclude: tuple[str, ...] = only((), *_MASKED)
    weight_decay_include: tuple[str, ...] = only((), *_MASKED)
    momentum: float = only(0.9, name=_WITH_VELOCITY)
    nesterov: bool = only(False, name=_WITH_VELOCITY, momentum=NOT_ZERO)
    b1: float = only(0.9, name=ADAM_LIKE)
    b2: float = only(0.999, name=ADAM_LIKE)
    eps: float = only(1e-6, name=(*ADAM_LIKE, "rmsprop"))
    rmsprop_decay: float = only(0.9, name=("rmsprop",))
    trust_coefficient: float | None = only(None, *_ADAPTED_BY_LARS)
    trust_ratio_eps: float | None = only(None, *_ADAPTED_BY_LARS)
    trust_ratio_clip_mode: str | None = only(None, *_ADAPTED_BY_LARS)
    trust_ratio_bounds: tuple[float, float] | None = only(None, *_ADAPTED)
    trust_ratio_exclude: tuple[str, ...] = only((), *_ADAPTED)
    trust_ratio_include: tuple[str, ...] = only((), *_ADAPTED)
    max_grad_norm: float | None = only(None, clip_stage=("replica", "mean", "accumulated"))
    clip_stage: str = "accumulated"
    ema_decay: float | None = None
    ema_ramp: bool = only(True, ema_decay=GIVEN)
    skip_limit: int | None = None
    spike_factor: float | None = only(None, skip_limit=GIVEN)
    mu_dtype: str = only("float32", name=_LAYERWISE)
    nu_dtype: str = only("float32", name=("lamb", "lans"))
    state_format: str | None = None
    track_noise_scale: bool = False
    noise_scale_per_layer: bool = only(False, track_noise_scale=(True,))
    monitor_layers: bool = False
    options: dict[str, Any] = only_default(dict, name=_FOREIGN)


def OptaxConfig(name: str, options: dict[str, Any] | None = None, **fields: Any) -> OptimizerConfig:
    """Return the config of an optimizer of Optax.

    Args:
      name: Its name in `optax`, "lion" or "contrib.muon" for instance.
      options: Its arguments, without the learning rate, the weight decay and its mask.
      **fields: Other fields of `OptimizerConfig`, `weight_decay` for instance.

    >>> OptaxConfig("contrib.muon", {"ns_steps": 6}, weight_decay=0.1).name
    'optax.contrib.muon'
    """
    return OptimizerConfig(f"optax.{name}", options=dict(options or {}), **fields)


def check_optimizer(optimizer: OptimizerConfig) -> None:
    """Raise `UserError`, naming "optimizer.field", for an optimizer that cannot be built."""
    # The config takes fewer dtypes than the optimizers.
    with errors.under("optimizer"):
        for field in ("mu_dtype", "nu_dtype"):
            require_choice(field, getattr(optimizer, field), DTYPES)

    with warnings.catch_warnings():  # a run that is built warns
        warnings.simplefilter("ignore")
        make_optimizer(optimizer, learning_rate=1.0, global_batch_size=2)
    with errors.under("optimizer"):
        _check_clip(optimizer)
        _check_spikes(optimizer)


def check_optimizer_kind(optimizer: OptimizerConfig) -> None:
    """Raise `UserError` for an unknown optimizer, variant or stage: other fields depend on them."""
    _foreign.check_name(optimizer.name, OPTIMIZERS)
    variant_of(optimizer)
    require_choice("clip_stage", optimizer.clip_stage, CLIP_STAGES)


def _check_clip(optimizer: OptimizerConfig) -> None:
    stage = optimizer.clip_stage
    idle = stage in ("replica", "mean") and resolve_clip(optimizer) is None
    fix = "nothing is clipped; set {max_grad_norm}, or leave it 'accumulated'"
    require(not idle, "clip_stage", stage, fix, code="conflict", also=["max_grad_norm"])


def _check_spikes(optimizer: OptimizerConfig) -> None:
    stage = optimizer.clip_stage
    factor = optimizer.spike_factor
    cuts = factor is not None and stage in ("replica", "mean")
    fix = f"{{clip_stage}} = {stage!r} cuts spikes off first; use 'accumulated' or 'none' there"
    require(not cuts, "spike_factor", factor, fix, code="conflict", also=["clip_stage"])


def resolve_clip(config: OptimizerConfig) -> float | None:
    """Return the norm that gradients are clipped to, the config's or the variant's.

    None for no clipping.
    """
    if config.clip_stage == "none":
        return None
    return _variant_clip(config) if config.max_grad_norm is None else config.max_grad_norm


def _variant_clip(config: OptimizerConfig) -> float | None:
    """Return the norm to which the config's variant clips gradients; None for no clipping."""
    return getattr(variant_of(config), "max_grad_norm", None)


def clip_eps(config: OptimizerConfig) -> float:
    """Return the constant that the variant adds to the norm by which it clips."""
    return getattr(variant_of(config), "max_grad_norm_eps", 0.0)


def variant_of(config: OptimizerConfig) -> Any:
    """Return the options of the config's variant; None for an optimizer that has no variants."""
    if config.name not in VARIANTS:
        return None
    require_choice("variant", config.variant, VARIANTS[config.name])
    return VARIANTS[config.name][config.variant].options


def make_optimizer(
    config: OptimizerConfig,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float | jax.Array | None = None,
    global_batch_size: int | None = None,
    stacked: types.Stacked = None,
    module_labels: Labels | None = None,
    known_roles: types.PyTree = None,
    transfer: Transfer | None = None,
) -> optax.GradientTransformation:
    """Build the optimizer of a config.

    A chain of the noise scale's measurement, the clip, the optimizer and what watches its updates;
    inside the guard against updates that are not finite, if there is one.

    Args:
      config: The optimizer and its constants.
      learning_rate: Number or schedule.
      weight_decay: Weight decay instead of the config's; may be traced.
      global_batch_size: Examples per step, for `track_noise_scale`.
      stacked: The parameters that are stacks of layers, each layer with a trust ratio of its own.
      module_labels: Modules whose updates AGVM scales; None for none.
      known_roles: Roles of parameters for the masks, from `masks.module_roles` for instance; None
        if names tell them.
      transfer: The narrower network whose numbers these are; None if they are the network's own.

    Raises:
      UserError: Naming a field of the config, "optimizer.b1" for instance.

    >>> tx = make_optimizer(OptimizerConfig("lamb", weight_decay=0.01), learning_rate=0.02)
    >>> isinstance(tx, optax.GradientTransformation)
    True
    """
    with errors.under("optimizer"):
        check_optimizer_kind(config)
        max_norm = resolve_clip(config)

    # The noise scale is measured before the clip; the links after the optimizer see its updates.
    links = []
    if config.track_noise_scale:
        assert global_batch_size is not None, "track_noise_scale needs the batch size"
        per_layer = config.noise_scale_per_layer
        links.append(
            track_noise_scale(global_batch_size, per_layer=per_layer, known_roles=known_roles)
        )
    # The clip of the step's whole gradient is a link, so that the guard sees the norm before it.
    if max_norm is not None and config.clip_stage == "accumulated":
        with errors.under("optimizer", max_norm="optimizer.max_grad_norm"):
            links.append(clip_by_global_norm(max_norm, clip_eps(config)))
    with _naming(config):
        build = _BUILDERS.get(config.name, _of_others)
        leaves = _leaves(config, stacked, known_roles)._replace(transfer=transfer)
        tx = build(config, learning_rate, weight_decay, leaves)
    if config.state_format is not None:
        with errors.under("optimizer", format="optimizer.state_format"):
            tx = compress_state(tx, cast(Any, config.state_format))
    links.append(tx)

    if module_labels is not None:
        links.append(scale_by_agvm(module_labels))
    if config.monitor_layers:
        links.append(monitor_layers(stacked))
    if config.ema_decay is not None:
        with errors.under("optimizer", decay="optimizer.ema_decay"):
            links.append(track_ema(config.ema_decay, config.ema_ramp))
    tx = optax.chain(*links)
    if config.skip_limit is None:
        return tx
    with errors.under("optimizer", max_consecutive="optimizer.skip_limit"):
        return skip_bad_updates(tx, config.skip_limit, config.spike_factor)


def check_fits(
    config: OptimizerConfig,
    params: types.Params,
    stacked: types.Stacked = None,
    known_roles: types.PyTree = None,
) -> None:
    """Raise `UserError` if the optimizer, or a pattern of a mask, does not fit the parameters.

    Args:
      config: The optimizer.
      params: Parameters or their shapes.
      stacked: The parameters that are stacks of layers.
      known_roles: Known roles, as in `make_optimizer`.
    """
    with errors.under("optimizer"):
        leaves = _leaves(config, stacked, known_roles)
    masked = {
        "weight_decay_exclude": leaves.decayed,
        "weight_decay_include": leaves.decayed,
        "trust_ratio_exclude": leaves.adapted,
        "trust_ratio_include": leaves.adapted,
    }
    for field, mask in masked.items():
        patterns = getattr(config, field)
        if not patterns:
            continue
        place = f"optimizer.{field}"
        naming = errors.under("", mask=place, **{field: place})
        with errors.about(place, patterns, code="mismatch"), naming:
            masks.select_paths(*patterns)(params)
            layers = stacks.resolve_stacked(stacked, params)
            masks.resolve_mask(mask, params, field, layers)

    if _foreign.is_foreign(config.name):
        with _naming(config):
            tx = _of_others(config, 1.0, None, leaves)
            _foreign.check_update(config.name, config.options, tx, params)


class _Leaves(NamedTuple):
    """The leaves that an optimizer treats in another way than the rest.

    Attributes:
      decayed: Mask of the decayed ones.
      adapted: Mask of those with a trust ratio.
      stacked: Those that are stacks of layers.
      known_roles: Roles that names need not tell; None for none.
      transfer: The narrower network whose numbers these are; None for none.
    """

    decayed: types.Mask
    adapted: types.Mask
    stacked: types.Stacked
    known_roles: types.PyTree
    transfer: Transfer | None = None


def _leaves(config: OptimizerConfig, stacked: types.Stacked, known_roles: types.PyTree) -> _Leaves:
    decayed = _decayed_leaves(config)
    adapted = _adapted_leaves(config)
    if known_roles is not None:
        decayed = masks.with_known_roles(decayed, known_roles)
        adapted = masks.with_known_roles(adapted, known_roles)
    return _Leaves(decayed, adapted, stacked, known_roles)


def _decayed_leaves(config: OptimizerConfig) -> types.Mask:
    """Return the mask of decayed leaves: the variant's, and the patterns of the config."""
    options = variant_of(config) or _foreign.variant_options(config.name, config.options)
    default = masks.weights_only if options is None else options.weight_decay_mask
    exclude = config.weight_decay_exclude
    include = config.weight_decay_include
    return _changed_mask(default, "weight_decay", exclude, include)


def _adapted_leaves(config: OptimizerConfig) -> types.Mask:
    """Return the mask of leaves with a trust ratio: the variant's, and the config's patterns."""
    options = variant_of(config)
    default = masks.weights_only if options is None else options.trust_ratio_mask
    if isinstance(default, str):  # "as_weight_decay"
        default = _decayed_leaves(config)
    exclude = config.trust_ratio_exclude
    include = config.trust_ratio_include
    return _changed_mask(default, "trust_ratio", exclude, include)


def _changed_mask(
    default: types.Mask, name: str, exclude: tuple[str, ...], include: tuple[str, ...]
) -> types.Mask:
    for field, patterns in ((f"{name}_exclude", exclude), (f"{name}_include", include)):
        with errors.about(field, patterns):
            tree.check_patterns(patterns or ("",))
    mask: Any = masks.without(*exclude, default=default)
    if not include:
        return mask
    return (masks.all_leaves if mask is None else mask) | masks.select_paths(*include)


def _naming(config: OptimizerConfig) -> contextlib.AbstractContextManager[None]:
    """Let errors about the arguments of an optimizer name the fields of its config."""
    if config.name != "lars":
        options = {name: f"optimizer.options.{name}" for name in config.options}
        return errors.under("optimizer", **options)
    return errors.under(
        "optimizer",
        clip_mode="optimizer.trust_ratio_clip_mode",
        eps="optimizer.trust_ratio_eps",
        momentum_dtype="optimizer.mu_dtype",
    )


def _decay(config: OptimizerConfig, weight_decay: float | jax.Array | None) -> Any:
    return config.weight_decay if weight_decay is None else weight_decay


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None: the others are the variant's."""
    return {name: value for name, value in options.items() if value is not None}


def _of_two_moments(config: OptimizerConfig, weight_decay, leaves: _Leaves) -> dict[str, Any]:
    """Return the options that `lamb` and `lans` share."""
    return {
        "b1": config.b1,
        "b2": config.b2,
        "eps": config.eps,
        "weight_decay": _decay(config, weight_decay),
        "weight_decay_mask": leaves.decayed,
        "trust_ratio_mask": leaves.adapted,
        "stacked": leaves.stacked,
        "mu_dtype": config.mu_dtype,
        "nu_dtype": config.nu_dtype,
        **_given(trust_ratio_bounds=config.trust_ratio_bounds),
    }


def _lamb(
    config: OptimizerConfig, learning_rate, weight_decay, leaves: _Leaves
) -> optax.GradientTransformation:
    return lamb(
        learning_rate,
        max_grad_norm=None,  # make_optimizer or the step clips
        variant=cast(LambVariant, config.variant),
        **_of_two_moments(config, weight_decay, leaves),
    )


def _lans(
    config: OptimizerConfig, learning_rate, weight_decay, leaves: _Leaves
) -> optax.GradientTransformation:
    return lans(learning_rate, **_of_two_moments(config, weight_decay, leaves))


def _lars(
    config: OptimizerConfig, learning_rate, weight_decay, leaves: _Leaves
) -> optax.GradientTransformation:
    return lars(
        learning_rate,
        _decay(config, weight_decay),
        config.momentum,
        weight_decay_mask=leaves.decayed,
        trust_ratio_mask=leaves.adapted,
        variant=cast(LarsVariant, config.variant),
        nesterov=config.nesterov,
        stacked=leaves.stacked,
        momentum_dtype=config.mu_dtype,
        **_given(
            trust_coefficient=config.trust_coefficient,
            eps=config.trust_ratio_eps,
            clip_mode=config.trust_ratio_clip_mode,
            trust_ratio_bounds=config.trust_ratio_bounds,
        ),
    )


def _momentum(
    config: OptimizerConfig, learning_rate, weight_decay, leaves: _Leaves
) -> optax.GradientTransformation:
    return optax.chain(
        _add_decay(config, weight_decay, leaves),
        _velocity(config),
        scale_by_learning_rate(learning_rate),
    )


def _with_squares(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `inner`, which keeps squares of its updates, for updates whose squares are finite."""

    def update_fn(
        updates: optax.Updates, state: Any, params: types.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        return inner.update(
            jax.tree.map(lambda u: squarable(u).astype(u.dtype), updates), state, params
        )

    return optax.GradientTransformation(inner.init, update_fn)


def _adam_moments(config: OptimizerConfig, leaves: _Leaves) -> optax.GradientTransformation:
    for field in ("b1", "b2"):  # Optax takes any number
        _scalars.require_decay_rate(field, getattr(config, field))
    _scalars.require_at_least("eps", config.eps, 0)
    tx = optax.scale_by_adam(config.b1, config.b2, config.eps)
    return _with_squares(tx if leaves.transfer is None else leaves.transfer.around(tx))


def _add_decay(
    config: OptimizerConfig, weight_decay, leaves: _Leaves
) -> optax.GradientTransformation:
    decay = _decay(config, weight_decay)
    _scalars.require_at_least("weight_decay", decay, 0)

    def mask(params: types.Params) -> types.PyTree:
        return _foreign.decayed_leaves(leaves.decayed, leaves.stacked, params)

    return optax.add_decayed_weights(decay, mask=mask)


def _velocity(config: OptimizerConfig) -> optax.GradientTransformation:
    _scalars.require_decay_rate("momentum", config.momentum)
    return optax.trace(config.momentum, config.nesterov)


def _of_others(
    config: OptimizerConfig, learning_rate, weight_decay, leaves: _Leaves
) -> optax.GradientTransformation:
    decay = _decay(config, weight_decay)
    _scalars.require_at_least("weight_decay", decay, 0)
    of_leaves = (leaves.decayed, leaves.stacked, leaves.known_roles)
    return _foreign.make(config.name, config.options, learning_rate, decay, *of_leaves)


def _adam(
    config: OptimizerConfig, learning_rate, weight_decay, leaves: _Leaves
) -> optax.GradientTransformation:
    del weight_decay
    return optax.chain(
        _adam_moments(config, leaves),
        scale_by_learning_rate(learning_rate),
    )


def _adamw(
    config: OptimizerConfig, learning_rate, weight_decay, leaves: _Leaves
) -> optax.GradientTransformation:
    return optax.chain(
        _adam_moments(config, leaves),
        _add_decay(config, weight_decay, leaves),
        scale_by_learning_rate(learning_rate),
    )


def _rmsprop(
    config: OptimizerConfig, learning_rate, weight_decay, leaves: _Leaves
) -> optax.GradientTransformation:
    """Build TensorFlow's form.

    Its means of squares begin at 1, eps is under the root, and the learning rate is inside the
    momentum.
    """
    _scalars.require_decay_rate("rmsprop_decay", config.rmsprop_decay)
    _scalars.require_at_least("eps", config.eps, 0)
    return optax.chain(
        _add_decay(config, weight_decay, leaves),
        _with_squares(
            optax.scale_by_rms(
                config.rmsprop_decay, config.eps, initial_scale=1.0, eps_in_sqrt=True
            )
        ),
        scale_by_learning_rate(learning_rate),
        _velocity(config),
    )


_BUILDERS = {
    "adam": _adam,
    "adamw": _adamw,
    "lamb": _lamb,
    "lans": _lans,
    "lars": _lars,
    "momentum": _momentum,
    "rmsprop": _rmsprop,
}
