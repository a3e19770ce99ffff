"""What is made of the replicas' gradients."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses

from lbopt.aggregators import ACCUMULATIONS, OVERFLOWS, ROUNDINGS
from lbopt.config._checks import at_least, in_range
from lbopt.errors import UserError, require, require_choice
from lbopt.tree import check_patterns

AGGREGATORS = ("none", "mean", "agvm", "aps", "ef", "ef21", "econtrol", "powersgd")
AGVM_START_STEP = 500
COMPRESSORS = ("cast", "identity", "randk", "sign", "topk")


@dataclasses.dataclass
class AggregatorConfig:
    """What stands for the mean of the replicas' gradients. Fields that an aggregator does not have are ignored by it.

    Attributes:
      name: "none" (the compiler's mean), "mean" (in fp32, of rows), "agvm", "aps", "ef", "ef21", "econtrol" or "powersgd"; see
        `lbopt.agvm` and so on.
      replicas_per_device: let each device be so many replicas, one after another; on CPUs and in studies. Each has the same part of the
        batch on any number of devices.
      over: "replicas"; "slices" (sums inside each slice first); or a number, as text: so many neighbouring devices are summed first.
      compressor: of ef, ef21 and econtrol: "topk", "randk", "sign", "cast" (to exponent_bits and mantissa_bits) or "identity".
      fraction: of topk and randk: what is kept, in (0, 1].
      momentum: of ef21.
      eta: of econtrol.
      dense_start: of ef21 and econtrol: say the first gradient whole.
      exponent_bits: of aps and cast.
      mantissa_bits: likewise.
      accumulate: of aps: "fp32", "same" or "kahan".
      shift: of aps: False for the format alone.
      overflow: of aps: "inf", "saturate" or "cpd".
      rounding: of aps: "nearest" or "stochastic".
      rank: of powersgd.
      min_rate: of powersgd: compress what becomes so many times smaller.
      modules: of agvm: (name, regular expression) of each module; the first that is found in a parameter's path.
      anchor: of agvm: the module that the others are compared with.
      interval_steps: of agvm: measure so often.
      start_step: of agvm and powersgd; None for their own (500 and 100).
      stop_step: of agvm; None for the end.
      alpha: of agvm: what the running mean keeps.
      scale_bounds: of agvm: of the quotient under the root.
      of_adam: of agvm: compare gradients as Adam divides them.
    """

    name: str = "none"
    replicas_per_device: int = 1
    over: str = "replicas"
    compressor: str = "topk"
    fraction: float = 0.01
    momentum: float = 0.0
    eta: float = 0.1
    dense_start: bool = False
    exponent_bits: int = 5
    mantissa_bits: int = 2
    accumulate: str = "fp32"
    shift: bool = True
    overflow: str = "inf"
    rounding: str = "nearest"
    rank: int = 4
    min_rate: float = 2.0
    modules: tuple[tuple[str, str], ...] = ()
    anchor: str = ""
    interval_steps: int = 5
    start_step: int | None = None
    stop_step: int | None = None
    alpha: float = 0.97
    scale_bounds: tuple[float, float] = (0.5, 10.0)
    of_adam: bool = False


def validate_aggregator(aggregator: AggregatorConfig, prefix: str) -> None:
    """Check the fields of what stands for the mean.

    Raises:
      UserError: naming the field, its value and the fix.
    """
    require_choice(f"{prefix}.name", aggregator.name, AGGREGATORS)
    at_least(f"{prefix}.replicas_per_device", aggregator.replicas_per_device, 1)
    over = aggregator.over
    known = over in ("replicas", "slices") or (over.isdecimal() and int(over) >= 1)
    require(
        known,
        f"{prefix}.over",
        over,
        "use 'replicas', 'slices', or a number of devices such as '8'",
    )
    if aggregator.name == "none":
        fix = f"only an aggregator sees replicas; set {prefix}.name, or leave it at its default"
        rows = aggregator.replicas_per_device
        require(rows == 1, f"{prefix}.replicas_per_device", rows, fix)
        require(over == "replicas", f"{prefix}.over", over, fix)
    for field, choices in (
        ("compressor", COMPRESSORS),
        ("accumulate", ACCUMULATIONS),
        ("overflow", OVERFLOWS),
        ("rounding", ROUNDINGS),
    ):
        require_choice(f"{prefix}.{field}", getattr(aggregator, field), choices)
    require(
        0 < aggregator.fraction <= 1,
        f"{prefix}.fraction",
        aggregator.fraction,
        "give a number in (0, 1]",
    )
    in_range(f"{prefix}.momentum", aggregator.momentum, 0, 1)
    at_least(f"{prefix}.eta", aggregator.eta, 0)
    for field, low, high in (("exponent_bits", 2, 8), ("mantissa_bits", 0, 23)):
        value = getattr(aggregator, field)
        require(
            low <= value <= high,
            f"{prefix}.{field}",
            value,
            f"give a whole number from {low} to {high}",
        )
    at_least(f"{prefix}.rank", aggregator.rank, 1)
    require(aggregator.min_rate > 0, f"{prefix}.min_rate", aggregator.min_rate, "give a number > 0")
    at_least(f"{prefix}.interval_steps", aggregator.interval_steps, 1)
    for field in ("start_step", "stop_step"):
        if getattr(aggregator, field) is not None:
            at_least(f"{prefix}.{field}", getattr(aggregator, field), 0)
    require(
        0 <= aggregator.alpha <= 1, f"{prefix}.alpha", aggregator.alpha, "give a number in [0, 1]"
    )
    if aggregator.name == "agvm":
        names = [name for name, _ in aggregator.modules]
        fix = "name the modules of the model, for instance (('head', '^head/'), ('body', ''))"
        require(len(names) > 0, f"{prefix}.modules", aggregator.modules, fix)
        require(
            len(names) == len(set(names)),
            f"{prefix}.modules",
            aggregator.modules,
            "use each name once",
        )
        try:
            check_patterns(tuple(pattern for _, pattern in aggregator.modules))
        except ValueError as error:
            raise UserError(f"{prefix}.modules: {error}") from error
        bounds = aggregator.scale_bounds
        fix = "give (low, high) with 0 <= low <= high"
        require(0 <= bounds[0] <= bounds[1], f"{prefix}.scale_bounds", bounds, fix)
        start, stop = aggregator.start_step, aggregator.stop_step
        start = AGVM_START_STEP if start is None else start
        require(
            stop is None or stop >= start,
            f"{prefix}.stop_step",
            stop,
            f"it begins at step {start}; use at least that",
        )
        require(
            aggregator.anchor in names,
            f"{prefix}.anchor",
            aggregator.anchor,
            f"use one of the modules {names}",
        )
