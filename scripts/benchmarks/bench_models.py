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
import sys

import cases
import pairs
import tpu_compiler
from tpu_compiler import V3_PEAK_FLOPS, StepCost

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
    return tpu_compiler.cost_of_step(*build(tpu_compiler.pod(case.topology)))


def _rows(case: cases.Case, ours: StepCost, plain: StepCost | None) -> list[dict]:
    name = f"{case.name}, {case.topology}"
    held = [
        _row(
            f"{name}: memory", "GiB/core", ours, plain, lambda cost: (cost.argument_bytes + cost.temporary_bytes) / GIB
        ),
        _row(f"{name}: compile", "s", ours, plain, lambda cost: cost.compile_seconds, ratio_limit=1.2),
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
            lambda cost: 100 * case.flops / cost.seconds / V3_PEAK_FLOPS,
            case.least_utilisation,
        ),
        _row(f"{name}: all-reduces", "number", ours, plain, lambda cost: cost.all_reduces),
        _row(f"{name}: all-reduced", "GB", ours, plain, lambda cost: cost.all_reduce_bytes / 1e9),
        *held,
    ]


def _row(name, unit, ours, plain, value, limit=None, ratio_limit=None) -> dict:
    theirs = value(plain) if plain else None
    ratio = value(ours) / theirs if theirs else None
    return pairs.row(
        name, unit, value(ours), theirs, "plain Flax + optax" if plain else None, ratio, ratio_limit or limit
    )


def _print_parts(title: str, cost: StepCost) -> None:
    print(f"\n{title}: {1e3 * cost.seconds:.1f} ms, of which")
    rooms: dict[str, float] = collections.defaultdict(float)
    for (_, part), seconds in cost.seconds_by_part.items():
        rooms[part.split("/")[0]] += seconds
    for room, seconds in sorted(rooms.items(), key=lambda item: -item[1])[:TOP]:
        print(f"  {1e3 * seconds:8.2f} ms  {100 * seconds / cost.seconds:5.1f} %  {room}")
    print("by operation:")
    ranked = sorted(cost.seconds_by_part.items(), key=lambda item: -item[1])
    for (direction, part), seconds in ranked[:TOP]:
        print(f"  {1e3 * seconds:8.2f} ms  {100 * seconds / cost.seconds:5.1f} %  {direction:<9}{part}")
