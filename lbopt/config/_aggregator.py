"""What is made of the replicas' gradients."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses

from lbopt.aggregators import ACCUMULATIONS, OVERFLOWS, ROUNDINGS
from lbopt.config._checks import at_least, in_range
from lbopt.config._fields import only
from lbopt.errors import UserError, require, require_choice
from lbopt.tree import check_patterns

AGGREGATORS = ("none", "mean", "agvm", "aps", "ef", "ef21", "econtrol", "powersgd")
AGVM_START_STEP = 500
COMPRESSORS = ("cast", "identity", "randk", "sign", "topk")


_PER_REPLICA = tuple(name for name in AGGREGATORS if name != "none")
_COMPRESSED = ("ef", "ef21", "econtrol")
_ROUNDED = ({"name": ("aps",)}, {"name": _COMPRESSED, "compressor": ("cast",)})


@dataclasses.dataclass
class AggregatorConfig:
    """What stands for the mean of the replicas' gradients.

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
      overflow: What aps makes of numbers that are too large: "inf", "saturate" or "cpd".
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


def check_aggregator(aggregator: AggregatorConfig) -> None:
    """Raise `UserError` for a value that no aggregator takes."""
    require_choice("name", aggregator.name, AGGREGATORS)
    at_least("replicas_per_device", aggregator.replicas_per_device, 1)
    over = aggregator.over
    known = over in ("replicas", "slices") or (over.isdecimal() and int(over) >= 1)
    fix = "use 'replicas', 'slices', or a number of devices such as '8'"
    require(known, "over", over, fix)
    for field, choices in (
        ("compressor", COMPRESSORS),
        ("accumulate", ACCUMULATIONS),
        ("overflow", OVERFLOWS),
        ("rounding", ROUNDINGS),
    ):
        require_choice(field, getattr(aggregator, field), choices)
    fraction, rate, alpha = aggregator.fraction, aggregator.min_rate, aggregator.alpha
    require(0 < fraction <= 1, "fraction", fraction, "give a number in (0, 1]")
    require(rate > 0, "min_rate", rate, "give a number > 0")
    require(0 <= alpha <= 1, "alpha", alpha, "give a number in [0, 1]")
    in_range("momentum", aggregator.momentum, 0, 1)
    at_least("eta", aggregator.eta, 0)
    for field in ("rank", "interval_steps"):
        at_least(field, getattr(aggregator, field), 1)
    for field, low, high in (("exponent_bits", 2, 8), ("mantissa_bits", 0, 23)):
        value = getattr(aggregator, field)
        fix = f"give a whole number from {low} to {high}"
        require(low <= value <= high, field, value, fix)
    for field in ("start_step", "stop_step"):
        if getattr(aggregator, field) is not None:
            at_least(field, getattr(aggregator, field), 0)
    if aggregator.name == "agvm":
        _check_agvm(aggregator)


def _check_agvm(aggregator: AggregatorConfig) -> None:
    modules, names = aggregator.modules, [name for name, _ in aggregator.modules]
    fix = "name the modules of the model, for instance (('head', '^head/'), ('body', ''))"
    require(len(names) > 0, "modules", modules, fix, code="missing")
    require(len(names) == len(set(names)), "modules", modules, "use each name once")
    try:
        check_patterns(tuple(pattern for _, pattern in modules))
    except ValueError as error:
        raise UserError("modules", modules, f"{error}") from error
    low, high = aggregator.scale_bounds
    fix = "give (low, high) with 0 <= low <= high"
    require(0 <= low <= high, "scale_bounds", aggregator.scale_bounds, fix)
    start, stop = aggregator.start_step, aggregator.stop_step
    start = AGVM_START_STEP if start is None else start
    fix = f"it begins at step {start}; use at least that"
    require(stop is None or stop >= start, "stop_step", stop, fix)
    require_choice("anchor", aggregator.anchor, names)
