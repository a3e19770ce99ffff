"""A recipe's step on 8 to 2048 cores of TPU v3, by the TPU compiler, at a fixed batch per core.

The recipe is ResNet-50 with LARS: 16 examples per core, batch statistics over 64 examples,
gradients summed in fp32, with a replicated ("whole") and with a sharded update. Compute is the sum
of the compiler's cycle estimates; communication is by the model of `lbopt plan`. The peer of a row
is the same step on 8 cores.
"""

import dataclasses
import functools
import subprocess
import sys
import time
from collections.abc import Iterator

import pairs

from lbopt.cli import call_get_config
from lbopt.plan import StepCost, make_plan, open_topology, words_received

RECIPE = "configs/resnet50_lars.py:32768"
PER_CORE = 16
SLICES = ("v3:2x2", "v3:4x4", "v3:8x8", "v3:16x16", "v3:32x32")
COMMANDS = (
    ("configs/resnet50_lars.py:official-32768", 120),
    ("configs/bert_large_lamb.py:mixed", 300),
)
"""Pairs of a recipe and the longest planning time that is wanted on 2 cores, in seconds."""
FLAT = 1.05
"""Most compute and bytes per core that are wanted, relative to 8 cores."""
COMPILE = 1.5
"""Most compile time that is wanted, relative to 8 cores."""
WHOLE = 0.003
"""Share of the update's traffic allowed beyond 1/N: leaves that are small (0.2 % of all words) or
do not divide by N are not sharded."""


def run() -> Iterator[dict]:
    """Compile the step for every slice, with both updates, and yield the rows."""
    for case in COMMANDS:
        yield _command(*case)

    # The first compilation of a process also loads the compiler: keep it out of the compile times.
    _cost.__wrapped__(SLICES[0], False)
    for sharded in (False, True):
        first = _cost(SLICES[0], sharded)
        for name in SLICES:
            yield from _rows(name, sharded, _cost(name, sharded), first)
    for name in SLICES:
        yield _split(name)
    for name in SLICES[1:]:
        yield from _scattered(name)


@functools.cache
def _cost(name: str, sharded: bool, scattered: bool = False) -> StepCost:
    place = open_topology(name)
    config = call_get_config(RECIPE)
    config.global_batch_size = PER_CORE * len(place.devices)
    config.parallel = dataclasses.replace(
        config.parallel, shard_update=sharded, reduce_scatter=scattered, reduce_dtype="float32"
    )
    config.schedule.warmup_rule = "epochs"
    config.schedule.base_warmup_epochs = 1.0
    print(f"compiling for {name}, {'sharded' if sharded else 'whole'} update ...", file=sys.stderr)
    return make_plan(config, RECIPE, place, with_evaluation=False).phases[0].step


def _rows(name: str, sharded: bool, cost: StepCost, first: StepCost) -> list[dict]:
    cores = len(open_topology(name).devices)
    title = f"{cores} cores, {'sharded' if sharded else 'whole'} update"

    def row(what, unit, value, most=None):
        ours = value(cost)
        theirs = value(first)
        # A whole update exchanges no parameters: there is no ratio.
        ratio = aim = None
        if theirs:
            ratio = ours / theirs
            aim = most and ("ratio", "<=", most)
        return pairs.row(f"{title}: {what}", unit, ours, theirs, "8 cores", ratio, aim)

    return [
        row("compute", "ms", lambda cost: 1e3 * (cost.seconds - cost.update_seconds), FLAT),
        row("optimizer", "ms", lambda cost: 1e3 * cost.update_seconds),
        row(
            "optimizer's HBM traffic",
            "MB/core",
            lambda cost: cost.update_hbm_bytes / 1e6,
            FLAT if not sharded else None,
        ),
        row("optimizer's state and batch", "MB/core", lambda cost: cost.argument_bytes / 1e6),
        row("gradients exchanged", "MB/core", lambda cost: _exchanged(cost, "gradients"), FLAT),
        row("parameters exchanged", "MB/core", lambda cost: _exchanged(cost, "parameters"), FLAT),
        row("exchanged in all", "MB/core", lambda cost: _exchanged(cost, ""), FLAT),
        row("communication by the model", "ms", lambda cost: 1e3 * cost.collective_seconds),
        row("compile", "s", lambda cost: cost.compile_seconds, COMPILE),
    ]


def _split(name: str) -> dict:
    """Return the HBM traffic of a sharded update beside a replicated one on the same cores."""
    ours, theirs = (_cost(name, sharded).update_hbm_bytes / 1e6 for sharded in (True, False))
    cores = len(open_topology(name).devices)
    title = f"{cores} cores, sharded update: optimizer's HBM traffic, beside a whole one's"
    return pairs.row(
        title,
        "MB/core",
        ours,
        theirs,
        "whole update",
        ours / theirs,
        ("ratio", "<=", 1 / cores + WHOLE),
    )


def _scattered(name: str) -> list[dict]:
    """Compare reduce-scatters along the torus with all-reduces followed by slices."""
    ours = _cost(name, True, True)
    theirs = _cost(name, True)
    title = f"{len(open_topology(name).devices)} cores, sums scattered along the torus"

    def row(what, unit, value):
        return pairs.row(
            f"{title}: {what}",
            unit,
            value(ours),
            value(theirs),
            "sums, then slices",
            value(ours) / value(theirs),
            None,
        )

    return [
        row(
            "words received",
            "M/core",
            lambda cost: sum(map(words_received, cost.collectives)) / 1e6,
        ),
        row("communication by the model", "ms", lambda cost: 1e3 * cost.collective_seconds),
        row("step", "ms", lambda cost: 1e3 * cost.step_seconds),
    ]


def _exchanged(cost: StepCost, source: str) -> float:
    return (
        sum(one.num_bytes for one in cost.collectives if one.source == source or not source) / 1e6
    )


def _command(recipe: str, most_s: float) -> dict:
    """Return a row with the time of the command `lbopt plan` for one recipe."""
    print(f"lbopt plan --config={recipe} ...", file=sys.stderr)
    begin = time.perf_counter()
    command = [sys.executable, "-m", "lbopt", "plan", f"--config={recipe}"]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    aim = ("lbopt", "<=", most_s)
    return pairs.row(
        f"lbopt plan {recipe}", "s", time.perf_counter() - begin, None, None, None, aim
    )
