"""The aggregator that replaces the mean of the replicas' gradients."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses
from typing import Any

from lbopt import aggregators, errors, types
from lbopt.aggregators import Aggregator, Compressor
from lbopt.config._fields import only
from lbopt.config._optimizer import ADAM_LIKE, OptimizerConfig
from lbopt.errors import require, require_choice
from lbopt.transforms import module_patterns

AGGREGATORS = ("none", "mean", "agvm", "aps", "ef", "ef21", "econtrol", "powersgd")
COMPRESSORS = ("cast", "identity", "randk", "sign", "topk")
_PER_REPLICA = tuple(name for name in AGGREGATORS if name != "none")
_COMPRESSED = ("ef", "ef21", "econtrol")
_ROUNDED = ({"name": ("aps",)}, {"name": _COMPRESSED, "compressor": ("cast",)})


@dataclasses.dataclass
class AggregatorConfig:
    """The aggregator that replaces the mean of the replicas' gradients.

    Attributes:
      name: "none" (the compiler's mean), "mean" (an fp32 mean over replicas), "agvm", "aps", "ef",
        "ef21", "econtrol" or "powersgd"; see `lbopt.agvm` and so on.
      replicas_per_device: Number of replicas that each device simulates, one after another; for
        CPUs and studies. Each replica has the same slice of the batch on any number of devices.
      over: "replicas"; "slices" (gradients are summed inside each slice first); or a number, as
        text, of neighbouring devices whose gradients are summed first.
      compressor: "topk", "randk", "sign", "cast" (to exponent_bits and mantissa_bits) or
        "identity".
      fraction: Fraction of the numbers that topk and randk keep, in (0, 1].
      momentum: Momentum of ef21, in [0, 1).
      eta: Feedback strength of econtrol.
      dense_start: Whether the first gradient is sent whole.
      exponent_bits: Bits of the exponent, 2 to 8.
      mantissa_bits: Bits of the mantissa, 0 to 23.
      accumulate: Precision of aps's partial sums: "fp32", "same" or "kahan".
      shift: Whether aps shifts each layer by a power of two; False for the format alone.
      overflow: Result of aps for numbers that are too large: "inf", "saturate" or "cpd".
      rounding: Rounding of aps: "nearest" or "stochastic".
      rank: Rank of powersgd's approximation.
      min_rate: Factor by which powersgd has to make a parameter's gradient smaller to compress it.
      modules: (name, regular expression) of each module of agvm; the first expression found in a
        parameter's path counts.
      anchor: Name of the module that agvm compares the others with.
      interval_steps: Steps between two measurements of agvm.
      start_step: First step of agvm or powersgd; None for their own (500 and 100).
      stop_step: Last step of agvm's measurements; None for the end.
      alpha: Decay of agvm's running mean, in [0, 1].
      scale_bounds: Bounds (low, high) of the quotient under agvm's root.
      of_adam: Whether agvm compares gradients as Adam divides them.

    >>> from lbopt.config import TrainConfig
    >>> aggregator = AggregatorConfig("ef", compressor="topk", fraction=0.01)
    >>> TrainConfig(data="digits", model="cnn", aggregator=aggregator).validate()
    """

    name: str = "none"
    replicas_per_device: int = only(1, name=_PER_REPLICA)
    over: str = only("replicas", name=_PER_REPLICA)
    compressor: str = only("topk", name=_COMPRESSED)
    fraction: float = only(0.01, name=_COMPRESSED, compressor=("randk", "topk"))
    momentum: float = only(0.0, name=("ef21",))
    eta: float = only(0.1, name=("econtrol",))
    dense_start: bool = only(False, name=("ef21", "econtrol"))
    exponent_bits: int = only(5, *_ROUNDED)
    mantissa_bits: int = only(2, *_ROUNDED)
    accumulate: str = only("fp32", name=("aps",))
    shift: bool = only(True, name=("aps",))
    overflow: str = only("inf", name=("aps",))
    rounding: str = only("nearest", name=("aps",))
    rank: int = only(4, name=("powersgd",))
    min_rate: float = only(2.0, name=("powersgd",))
    modules: tuple[tuple[str, str], ...] = only((), name=("agvm",))
    anchor: str = only("", name=("agvm",))
    interval_steps: int = only(5, name=("agvm",))
    start_step: int | None = only(None, name=("agvm", "powersgd"))
    stop_step: int | None = only(None, name=("agvm",))
    alpha: float = only(0.97, name=("agvm",))
    scale_bounds: tuple[float, float] = only((0.5, 10.0), name=("agvm",))
    of_adam: bool = only(False, name=("agvm",))


_ELSEWHERE = {
    "adam_b2": "optimizer.b2",
    "adam_eps": "optimizer.eps",
    "clip": "aggregator.scale_bounds",
    "interval": "aggregator.interval_steps",
    "start": "aggregator.start_step",
    "stop": "aggregator.stop_step",
}
"""Arguments of aggregators -> the fields of a config that have other names."""


def make_aggregator(
    config: AggregatorConfig, optimizer: OptimizerConfig, stacked: types.Stacked = None
) -> Aggregator | None:
    """Build the aggregator of a config; None for the compiler's mean.

    Args:
      config: The aggregator and its constants.
      optimizer: The optimizer behind it. AGVM divides by its second moment; if it skips updates
        that are not finite, the aggregator does not remember them either.
      stacked: The parameters that are stacks of layers, each layer compressed for itself.

    Raises:
      UserError: Naming a field of the config, "aggregator.rank" for instance.

    >>> from lbopt.config import OptimizerConfig
    >>> make_aggregator(AggregatorConfig("powersgd", rank=2), OptimizerConfig("momentum"))
    powersgd(2)
    """
    if config.name == "none":
        return None
    # Between slices each device compresses its own shard of a leaf, which has no layers; only
    # PowerSGD takes whole matrices there.
    in_shards = config.over not in ("replicas", "1") and config.name != "powersgd"
    with errors.under("aggregator", **_ELSEWHERE):
        require_choice("name", config.name, AGGREGATORS)
        made = _build(config, optimizer, None if in_shards else stacked)
    return made if optimizer.skip_limit is None else aggregators.keep_finite(made)


def group_of(config: AggregatorConfig) -> str | int:
    """Return `over` as `lbopt.parallel.Aggregate` takes it: a number of devices is an int."""
    over = config.over
    known = over in ("replicas", "slices") or (over.isdecimal() and 1 <= float(over) < 2**31)
    fix = "use 'replicas', 'slices', or a number of devices such as '8'"
    require(known, "aggregator.over", over, fix)
    return int(over) if over.isdecimal() else over


def check_aggregator_kind(config: AggregatorConfig) -> None:
    """Raise `UserError` for an unknown aggregator or compressor, on which other fields depend."""
    require_choice("name", config.name, AGGREGATORS)
    require_choice("compressor", config.compressor, COMPRESSORS)


def scaled_modules(config: AggregatorConfig) -> dict[str, str] | None:
    """Return name -> pattern of the modules whose updates AGVM scales; None without AGVM."""
    return dict(config.modules) if config.name == "agvm" else None


def _build(
    config: AggregatorConfig, optimizer: OptimizerConfig, stacked: types.Stacked
) -> Aggregator:
    match config.name:
        case "agvm":
            return _agvm(config, optimizer)
        case "aps":
            return aggregators.aps(
                config.exponent_bits,
                config.mantissa_bits,
                config.accumulate,  # type: ignore[arg-type]
                config.shift,
                config.overflow,  # type: ignore[arg-type]
                config.rounding,  # type: ignore[arg-type]
                stacked,
            )
        case "ef":
            return aggregators.ef(_compressor(config), stacked)
        case "ef21":
            compressor = _compressor(config)
            return aggregators.ef21(compressor, config.momentum, config.dense_start, stacked)
        case "econtrol":
            compressor = _compressor(config)
            return aggregators.econtrol(compressor, config.eta, config.dense_start, stacked)
        case "powersgd":
            rank = config.rank
            rate = config.min_rate
            return aggregators.powersgd(rank, min_rate=rate, stacked=stacked, **_start(config))

    # The caller has checked the name, so "mean" is left.
    return aggregators.plain_mean()


def _compressor(config: AggregatorConfig) -> Compressor:
    require_choice("compressor", config.compressor, COMPRESSORS)
    match config.compressor:
        case "cast":
            return aggregators.cast(config.exponent_bits, config.mantissa_bits)
        case "topk":
            return aggregators.topk(config.fraction)
        case "randk":
            return aggregators.randk(config.fraction)
        case "sign":
            return aggregators.sign()
    return aggregators.identity()


def _agvm(config: AggregatorConfig, optimizer: OptimizerConfig) -> Aggregator:
    of_adam: dict[str, Any] = {}
    if config.of_adam:
        fix = (
            f"{optimizer.name} keeps no second moment of Adam's; use one of "
            f"{', '.join(ADAM_LIKE)}, or leave it False"
        )
        require(optimizer.name in ADAM_LIKE, "of_adam", True, fix, code="conflict")
        of_adam = {"adam_b2": optimizer.b2, "adam_eps": optimizer.eps}

    made = aggregators.agvm(
        dict(config.modules),
        config.anchor,
        config.interval_steps,
        stop=config.stop_step,
        alpha=config.alpha,
        clip=config.scale_bounds,
        **_start(config),
        **of_adam,
    )
    # agvm looks at the modules when it gets the parameters, which are not here yet.
    aggregators.check_anchor(config.anchor, module_patterns(config.modules))
    return made


def _start(config: AggregatorConfig) -> dict[str, int]:
    return {} if config.start_step is None else {"start": config.start_step}
