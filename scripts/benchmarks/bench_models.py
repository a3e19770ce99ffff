"""Whole training steps on their published pods, by the TPU compiler, beside plain Flax models.

Times are sums of the compiler's cycle estimates for one TPU v3 core at 940 MHz, without
collectives. Utilisation is model FLOPs (see `cases`) over 61.5 TFLOP/s. Each step is made by
`lbopt.make_train_step`, with batch statistics over the global batch. With a sharded update every
core updates a shard of the parameters, and an all-gather follows. "Plain" is the same step around
the models of plain_models.py and optax's optimizer. "Alone" rows have the convolutions of a
network, without normalisation, and plain SGD: a lower bound for networks of plain convolutions
with batch norm.

BERT's layers are compiled one by one, because the compiler counts a loop's body once; one row has a
loop and states only memory and compile time. The compiler gives no estimate for the gradient of a
max pool. EfficientNet has no dropout and no stochastic depth here, and BERT's GELU is the tanh
approximation, as in google-research/bert.
"""

import collections
import re
import sys
from collections.abc import Iterator

import cases
import pairs

from lbopt import make_mesh
from lbopt.plan import CHIPS, StepCost, cost_of, open_topology

GIB = 2**30
TOP = 12


def run() -> Iterator[dict]:
    """Compile all cases and yield their rows; print breakdowns of the time meanwhile."""
    for case in cases.CASES:
        ours = _compile(case, case.ours)
        plain = _compile(case, case.plain) if case.plain else None
        yield from _rows(case, ours, plain)
        for label, cost in (("plain", plain), ("ours", ours)):
            if cost is not None and case.breakdown:
                _print_parts(f"{case.name}, {label}", cost)


def _compile(case: cases.StepCase, build) -> StepCost:
    print(f"compiling {case.name} for {case.topology} ...", file=sys.stderr)
    place = open_topology(case.topology)
    step, *shapes = build(make_mesh(devices=place.devices))
    return cost_of(lambda: step.lower(*shapes), place, place.devices)


def _rows(case: cases.StepCase, ours: StepCost, plain: StepCost | None) -> list[dict]:
    name = f"{case.name}, {case.topology}"

    held = [
        _row(
            f"{name}: memory",
            "GiB/core",
            ours,
            plain,
            lambda cost: (cost.argument_bytes + cost.temporary_bytes) / GIB,
        ),
        _row(
            f"{name}: compile",
            "s",
            ours,
            plain,
            lambda cost: cost.compile_seconds,
            ("ratio", ">=", 1 / 1.2) if plain else None,
        ),
    ]
    if case.loops:  # cycles and collectives of a loop's body are counted once
        return held

    most = case.most_ms and ("lbopt", "<=", case.most_ms)
    least = case.least_utilisation and ("lbopt", ">=", case.least_utilisation)
    return [
        _row(f"{name}: step", "ms", ours, plain, lambda cost: 1e3 * cost.seconds, most),
        _row(
            f"{name}: utilisation",
            "%",
            ours,
            plain,
            lambda cost: 100 * case.flops / cost.seconds / CHIPS["v3"].device_flops,
            least,
        ),
        _row(
            f"{name}: all-reduces",
            "number",
            ours,
            plain,
            lambda cost: sum(one.count for one in cost.collectives),
        ),
        _row(
            f"{name}: all-reduced",
            "GB",
            ours,
            plain,
            lambda cost: sum(one.num_bytes for one in cost.collectives) / 1e9,
        ),
        *held,
    ]


def _row(name, unit, ours, plain, value, aim=None) -> dict:
    theirs = value(plain) if plain else None
    ratio = theirs / value(ours) if theirs else None
    if ratio and unit == "%":  # of the utilisation, more is better
        ratio = 1 / ratio
    return pairs.row(
        name,
        unit,
        value(ours),
        theirs,
        "plain Flax + optax" if plain else None,
        ratio,
        aim,
    )


def _print_parts(title: str, cost: StepCost) -> None:
    print(f"\n{title}: {1e3 * cost.seconds:.1f} ms, of which")
    parts: dict[tuple[str, str], float] = collections.defaultdict(float)
    modules: dict[str, float] = collections.defaultdict(float)
    for operation in cost.operations:
        direction, part = _part(operation.path)
        parts[direction, part] += operation.seconds
        modules[part.split("/")[0]] += operation.seconds

    for module, seconds in sorted(modules.items(), key=lambda item: -item[1])[:TOP]:
        print(f"{_share(seconds, cost)}  {module}")
    print("by operation:")
    ranked = sorted(parts.items(), key=lambda item: -item[1])
    for (direction, part), seconds in ranked[:TOP]:
        print(f"{_share(seconds, cost)}  {direction:<9}{part}")


def _share(seconds: float, cost: StepCost) -> str:
    return f"  {1e3 * seconds:8.2f} ms  {100 * seconds / cost.seconds:5.1f} %"


def _part(name: str) -> tuple[str, str]:
    """Turn an operation's path into (direction, part).

    Returns:
      "forward", "backward" or "other", and the modules and operation without their numbers.
    """
    inside = re.search(r"(transpose\()?jvp\((\w*)\)+/(.*)", name)
    if not inside:
        return "other", "copy of the input" if name.startswith("arguments") else "optimizer"
    path = re.sub(r"jit\(\w+\)/|\w+\._\w+/", "", inside[3])
    path = re.sub(r"(block|layer|_Layer_|Conv_|BatchNorm_|Dense_|LayerNorm_)\d+", r"\1", path)
    path = path.replace("conv_general_dilated", "convolution")
    return "backward" if inside[1] else "forward", path
