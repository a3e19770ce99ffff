"""Which optimizer."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses
import math

from lbopt.config._checks import LARGEST_INTEGER, at_least, in_range
from lbopt.errors import require, require_choice
from lbopt.transforms import CLIP_MODES, VARIANTS

DTYPES = ("float32", "bfloat16")
OPTIMIZERS = ("adam", "adamw", "lamb", "lans", "lars", "momentum", "rmsprop")
CLIP_STAGES = ("replica", "mean", "accumulated", "none")


@dataclasses.dataclass
class OptimizerConfig:
    """The optimizer. Fields that an optimizer does not have are ignored by it.

    Attributes:
      name: "lamb", "lans", "lars", "adamw", "adam", "momentum" or "rmsprop" (TensorFlow's form, as in EfficientNet).
      variant: of lamb and lars: which public code (`lbopt.describe()` lists them). What is not a field here is as that
        code has it.
      weight_decay: never the variant's; decoupled for lamb, lans and adamw, added to the gradient for lars, momentum and rmsprop, not used by adam.
      momentum: of lars, momentum and rmsprop.
      nesterov: of lars and momentum.
      b1: of lamb, lans, adamw and adam.
      b2: likewise.
      eps: likewise, and of rmsprop: under the root.
      rmsprop_decay: what rmsprop keeps of the mean of squares.
      trust_coefficient: of lars; None for the variant's.
      trust_ratio_eps: of lars: added to the ratio's denominator; None for the variant's.
      trust_ratio_clip_mode: of lars: "scale", or "clip" (LARC: a layer's rate is min(learning rate, ratio)); None for the variant's.
      trust_ratio_bounds: (low, high) for lamb, lans and lars; None for the variant's.
      max_grad_norm: clip the global gradient norm; None for the variant's (for the others, no clipping).
      clip_stage: where that happens: "replica" (each replica's gradient, before the mean), "mean" (after it, each microstep's),
        "accumulated" (the whole gradient of the step), or "none": not at all, whatever the variant says.
      ema_decay: evaluate with an average of the parameters, of this decay (0.9999 in EfficientNet); None for the parameters themselves.
      ema_ramp: let the decay of that average rise with the updates.
      skip_limit: skip updates whose gradient is not finite, and stop after more than so many in a row; None applies whatever comes.
      spike_factor: with `skip_limit`, skip gradients so many times larger than usual too; None lets them through.
      mu_dtype: of the first moment (lamb, lans) or the velocity (lars): "float32" or "bfloat16".
      nu_dtype: of the second moment (lamb, lans).
      track_noise_scale: log the gradient noise scale; needs microsteps or several replicas.
      monitor_layers: log every layer's weight norm, update norm and their quotient.
    """

    name: str = "lamb"
    variant: str = "paper"
    weight_decay: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-6
    rmsprop_decay: float = 0.9
    trust_coefficient: float | None = None
    trust_ratio_eps: float | None = None
    trust_ratio_clip_mode: str | None = None
    trust_ratio_bounds: tuple[float, float] | None = None
    max_grad_norm: float | None = None
    clip_stage: str = "accumulated"
    ema_decay: float | None = None
    ema_ramp: bool = True
    skip_limit: int | None = None
    spike_factor: float | None = None
    mu_dtype: str = "float32"
    nu_dtype: str = "float32"
    track_noise_scale: bool = False
    monitor_layers: bool = False


def resolve_clip(config: OptimizerConfig) -> float | None:
    """Return the norm that gradients are clipped to, the config's or the variant's; None for no clipping."""
    if config.clip_stage == "none":
        return None
    if config.max_grad_norm is None and config.name in VARIANTS:
        return getattr(VARIANTS[config.name][config.variant].options, "max_grad_norm", None)
    return config.max_grad_norm


def validate_optimizer(optimizer: OptimizerConfig, prefix: str) -> None:
    """Check the optimizer's fields."""
    require_choice(f"{prefix}.name", optimizer.name, OPTIMIZERS)
    for field in ("weight_decay", "eps"):
        at_least(f"{prefix}.{field}", getattr(optimizer, field), 0)
    for field in ("momentum", "b1", "b2", "rmsprop_decay"):
        in_range(f"{prefix}.{field}", getattr(optimizer, field), 0, 1)
    if optimizer.name in VARIANTS:
        require_choice(f"{prefix}.variant", optimizer.variant, tuple(VARIANTS[optimizer.name]))
    coefficient = optimizer.trust_coefficient
    require(
        coefficient is None or 0 < coefficient < LARGEST_INTEGER,
        f"{prefix}.trust_coefficient",
        coefficient,
        "give a number > 0 (and below 2^31), or None for the variant's",
    )
    if optimizer.trust_ratio_eps is not None:
        at_least(f"{prefix}.trust_ratio_eps", optimizer.trust_ratio_eps, 0)
    if optimizer.trust_ratio_clip_mode is not None:
        require_choice(
            f"{prefix}.trust_ratio_clip_mode", optimizer.trust_ratio_clip_mode, CLIP_MODES
        )
    bounds = optimizer.trust_ratio_bounds
    require(
        bounds is None or (len(bounds) == 2 and 0 <= bounds[0] <= bounds[1] < math.inf),
        f"{prefix}.trust_ratio_bounds",
        bounds,
        "give (low, high) with 0 <= low <= high, or None",
    )
    if optimizer.max_grad_norm is not None:
        require(
            0 < optimizer.max_grad_norm < math.inf,
            f"{prefix}.max_grad_norm",
            optimizer.max_grad_norm,
            "give a number > 0, or None for the variant's; clip_stage='none' switches clipping off",
        )
    stage = optimizer.clip_stage
    require_choice(f"{prefix}.clip_stage", stage, CLIP_STAGES)
    idle = stage in ("replica", "mean") and resolve_clip(optimizer) is None
    fix = "nothing is clipped; set max_grad_norm, or leave it 'accumulated'"
    require(not idle, f"{prefix}.clip_stage", stage, fix)
    for field in ("mu_dtype", "nu_dtype"):
        require_choice(f"{prefix}.{field}", getattr(optimizer, field), DTYPES)
    _validate_guards(optimizer, prefix)


def _validate_guards(optimizer: OptimizerConfig, prefix: str) -> None:
    if optimizer.ema_decay is not None:
        in_range(f"{prefix}.ema_decay", optimizer.ema_decay, 0, 1)
    if optimizer.skip_limit is not None:
        at_least(f"{prefix}.skip_limit", optimizer.skip_limit, 0)
    if optimizer.spike_factor is not None:
        factor = optimizer.spike_factor
        require(
            1 < factor < math.inf, f"{prefix}.spike_factor", factor, "give a number > 1, or None"
        )
        require(
            optimizer.skip_limit is not None,
            f"{prefix}.spike_factor",
            factor,
            "set skip_limit too: so many are skipped in a row",
        )
        require(
            optimizer.clip_stage not in ("replica", "mean"),
            f"{prefix}.spike_factor",
            factor,
            f"clip_stage={optimizer.clip_stage!r} cuts spikes off before they are looked for; use 'accumulated' or 'none'",
        )
