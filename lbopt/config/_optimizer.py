"""Which optimizer."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses
import math

from lbopt.config._checks import LARGEST_INTEGER, at_least, in_range
from lbopt.config._fields import GIVEN, only
from lbopt.errors import require, require_choice
from lbopt.transforms import CLIP_MODES, VARIANTS

DTYPES = ("float32", "bfloat16")
OPTIMIZERS = ("adam", "adamw", "lamb", "lans", "lars", "momentum", "rmsprop")
CLIP_STAGES = ("replica", "mean", "accumulated", "none")
_ADAM_LIKE = ("adam", "adamw", "lamb", "lans")
_LAYERWISE = ("lamb", "lans", "lars")
_WITH_VELOCITY = ("lars", "momentum", "rmsprop")


@dataclasses.dataclass
class OptimizerConfig:
    """The optimizer and what is measured beside it.

    Attributes:
      name: "lamb", "lans", "lars", "adamw", "adam", "momentum" or "rmsprop" (TensorFlow's form, as
        in EfficientNet).
      variant: Public code to follow; `lbopt.describe()` lists them. Options without a field here
        are the variant's.
      weight_decay: Weight decay, never the variant's. Decoupled for lamb, lans and adamw; added to
        the gradient for lars, momentum and rmsprop. Adam has none: use adamw.
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
      mu_dtype: Dtype of the first moment or the velocity, "float32" or "bfloat16".
      nu_dtype: Dtype of the second moment, "float32" or "bfloat16".
      track_noise_scale: Whether the gradient noise scale is logged; needs microsteps or several
        replicas.
      monitor_layers: Whether every layer's weight norm, update norm and their quotient are logged.
    """

    name: str = "lamb"
    variant: str = only("paper", name=tuple(VARIANTS))
    weight_decay: float = only(0.0, name=tuple(kind for kind in OPTIMIZERS if kind != "adam"))
    momentum: float = only(0.9, name=_WITH_VELOCITY)
    nesterov: bool = only(False, name=_WITH_VELOCITY)
    b1: float = only(0.9, name=_ADAM_LIKE)
    b2: float = only(0.999, name=_ADAM_LIKE)
    eps: float = only(1e-6, name=(*_ADAM_LIKE, "rmsprop"))
    rmsprop_decay: float = only(0.9, name=("rmsprop",))
    trust_coefficient: float | None = only(None, name=("lars",))
    trust_ratio_eps: float | None = only(None, name=("lars",))
    trust_ratio_clip_mode: str | None = only(None, name=("lars",))
    trust_ratio_bounds: tuple[float, float] | None = only(None, name=_LAYERWISE)
    max_grad_norm: float | None = only(None, clip_stage=("replica", "mean", "accumulated"))
    clip_stage: str = "accumulated"
    ema_decay: float | None = None
    ema_ramp: bool = only(True, ema_decay=GIVEN)
    skip_limit: int | None = None
    spike_factor: float | None = only(None, skip_limit=GIVEN)
    mu_dtype: str = only("float32", name=_LAYERWISE)
    nu_dtype: str = only("float32", name=("lamb", "lans"))
    track_noise_scale: bool = False
    monitor_layers: bool = False


def resolve_clip(config: OptimizerConfig) -> float | None:
    """Return the norm that gradients are clipped to, the config's or the variant's; None for no clipping."""
    if config.clip_stage == "none":
        return None
    if config.max_grad_norm is None and config.name in VARIANTS:
        return getattr(VARIANTS[config.name][config.variant].options, "max_grad_norm", None)
    return config.max_grad_norm


def check_optimizer(optimizer: OptimizerConfig) -> None:
    """Raise `UserError` for a value that no optimizer takes."""
    require_choice("name", optimizer.name, OPTIMIZERS)
    for field in ("weight_decay", "eps"):
        at_least(field, getattr(optimizer, field), 0)
    for field in ("momentum", "b1", "b2", "rmsprop_decay"):
        in_range(field, getattr(optimizer, field), 0, 1)
    if optimizer.name in VARIANTS:
        require_choice("variant", optimizer.variant, tuple(VARIANTS[optimizer.name]))
    coefficient = optimizer.trust_coefficient
    require(
        coefficient is None or 0 < coefficient < LARGEST_INTEGER,
        "trust_coefficient",
        coefficient,
        "give a number > 0 (and below 2^31), or None for the variant's",
    )
    if optimizer.trust_ratio_eps is not None:
        at_least("trust_ratio_eps", optimizer.trust_ratio_eps, 0)
    if optimizer.trust_ratio_clip_mode is not None:
        require_choice("trust_ratio_clip_mode", optimizer.trust_ratio_clip_mode, CLIP_MODES)
    bounds = optimizer.trust_ratio_bounds
    require(
        bounds is None or (len(bounds) == 2 and 0 <= bounds[0] <= bounds[1] < math.inf),
        "trust_ratio_bounds",
        bounds,
        "give (low, high) with 0 <= low <= high, or None",
    )
    for field in ("mu_dtype", "nu_dtype"):
        require_choice(field, getattr(optimizer, field), DTYPES)
    _check_clip(optimizer)
    _check_guards(optimizer)


def _check_clip(optimizer: OptimizerConfig) -> None:
    stage, norm = optimizer.clip_stage, optimizer.max_grad_norm
    require_choice("clip_stage", stage, CLIP_STAGES)
    fix = "give a number > 0, or None for the variant's; clip_stage='none' switches clipping off"
    require(norm is None or 0 < norm < math.inf, "max_grad_norm", norm, fix)
    idle = stage in ("replica", "mean") and resolve_clip(optimizer) is None
    fix = "nothing is clipped; set {max_grad_norm}, or leave it 'accumulated'"
    require(not idle, "clip_stage", stage, fix, code="conflict", also=["max_grad_norm"])


def _check_guards(optimizer: OptimizerConfig) -> None:
    if optimizer.ema_decay is not None:
        in_range("ema_decay", optimizer.ema_decay, 0, 1)
    if optimizer.skip_limit is not None:
        at_least("skip_limit", optimizer.skip_limit, 0)
    if optimizer.spike_factor is None:
        return
    factor, stage = optimizer.spike_factor, optimizer.clip_stage
    require(1 < factor < math.inf, "spike_factor", factor, "give a number > 1, or None")
    fix = f"{{clip_stage}} = {stage!r} cuts spikes off first; use 'accumulated' or 'none' there"
    cuts = stage in ("replica", "mean")
    require(not cuts, "spike_factor", factor, fix, code="conflict", also=["clip_stage"])
