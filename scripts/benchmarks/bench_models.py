"""Whole training steps on the pods they were published on, by the TPU compiler, beside plain Flax models.

Times are sums of the compiler's cycle estimates for one TPU v3 core at 940 MHz, without the time of collectives; utilisation is
model FLOPs (see `cases`) over 61.5 TFLOP/s. Each step is the one that `lbopt.make_train_step` makes, with batch statistics over the
global batch; in rows with a sharded update every core updates a part of the parameters and all gather them. "Plain" is the
same step around the models of plain_models.py and optax's optimizer. "Alone" rows are the convolutions
of a network with nothing between them and plain SGD: no batch-normalised network of plain convolutions can be faster.
Every layer of BERT is compiled, so every cycle is counted, but for the row that states what a loop over layers takes to
compile. The compiler gives no estimate for the gradient of a max pool, ours or plain. EfficientNet drops nothing here, ours or
plain, and BERT's GELU is the one by tanh, as in google-research/bert.
"""

import collections
import re
import sys

import cases
import pairs

from lbopt import make_mesh
from lbopt.plan import CHIPS, StepCost, cost_of, open_topology

GIB = 2**30
TOP = 12


def run() -> list[dict]:
    """Compile all cases and return their rows; where the time goes is printed meanwhile."""
    rows = []
    for case in cases.CASES:
        ours = _compile(case, case.ours)
        plain = _compile(case, case.plain) if case.plain else None
        rows += _rows(case, ours, plain)
        for label, cost in (("plain", plain), ("ours", ours)):
            if cost is not None and case.breakdown:
                _print_parts(f"{case.name}, {label}", cost)
    return rows


def _compile(case: cases.Case, build) -> StepCost:
    print(f"compiling {case.name} for {case.topology} ...", file=sys.stderr)
    place = open_topology(case.topology)
    step, *shapes = build(make_mesh(devices=place.devices))
    return cost_of(lambda: step.lower(*shapes), place, place.devices)


def _rows(case: cases.Case, ours: StepCost, plain: StepCost | None) -> list[dict]:
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
            f"{name}: compile", "s", ours, plain, lambda cost: cost.compile_seconds, ratio_limit=1.2
        ),
    ]
    if case.loops:
        return held
    return [
        _row(f"{name}: step", "ms", ours, plain, lambda cost: 1e3 * cost.seconds, case.most_ms),
        _row(
            f"{name}: utilisation",
            "%",
            ours,
            plain,
            lambda cost: 100 * case.flops / cost.seconds / CHIPS["v3"].device_flops,
            case.least_utilisation,
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


def _row(name, unit, ours, plain, value, limit=None, ratio_limit=None) -> dict:
    theirs = value(plain) if plain else None
    ratio = value(ours) / theirs if theirs else None
    return pairs.row(
        name,
        unit,
        value(ours),
        theirs,
        "plain Flax + optax" if plain else None,
        ratio,
        ratio_limit or limit,
    )


def _print_parts(title: str, cost: StepCost) -> None:
    print(f"\n{title}: {1e3 * cost.seconds:.1f} ms, of which")
    parts: dict[tuple[str, str], float] = collections.defaultdict(float)
    rooms: dict[str, float] = collections.defaultdict(float)
    for operation in cost.operations:
        direction, part = _part(operation.path)
        parts[direction, part] += operation.seconds
        rooms[part.split("/")[0]] += operation.seconds
    for room, seconds in sorted(rooms.items(), key=lambda item: -item[1])[:TOP]:
        print(f"  {1e3 * seconds:8.2f} ms  {100 * seconds / cost.seconds:5.1f} %  {room}")
    print("by operation:")
    ranked = sorted(parts.items(), key=lambda item: -item[1])
    for (direction, part), seconds in ranked[:TOP]:
        print(
            f"  {1e3 * seconds:8.2f} ms  {100 * seconds / cost.seconds:5.1f} %  {direction:<9}{part}"
        )


def _part(name: str) -> tuple[str, str]:
    """Turn an operation's path into (forward, backward or other; module with numbers left out, operation)."""
    inside = re.search(r"(transpose\()?jvp\((\w*)\)+/(.*)", name)
    if not inside:
        return "other", "copy of the input" if name.startswith("arguments") else "optimizer"
    path = re.sub(r"jit\(\w+\)/|\w+\._\w+/", "", inside[3])
    path = re.sub(r"(block|layer|_Layer_|Conv_|BatchNorm_|Dense_|LayerNorm_)\d+", r"\1", path)
    return "backward" if inside[1] else "forward", path.replace(
        "conv_general_dilated", "convolution"
    )
