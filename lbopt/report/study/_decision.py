"""What a study can decide: before it runs, and where its seeds were too few."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lbopt.config import SweepConfig
from lbopt.report.study._critical_batch import FEWEST_SIZES, detectable_ratio
from lbopt.report.study._limit import REFERENCE_FACTOR
from lbopt.report.study._metric import Metric, metric_named
from lbopt.report.study._power import (
    FAMILY_WISE,
    POWER,
    detectable_difference,
    half_width,
    score_deviation,
    seeds_needed,
)
from lbopt.report.study._study import CellResults, Study
from lbopt.report.study._words import count, listed, say

_SHARE = 0.95
_SEEDS = 0.003
_RELATIVE = 0.01
_OF_STEPS = 0.15
_MOST_SIZES = 3
_NO_SCORES = """Runs stop at the target, so no scores are compared. Critical batches, fitted to the
    medians of {{ seeds | count("seed") }}, get bootstrap intervals. By the resamples those of Muon,
    SOAP and Shampoo are compared with Adam's."""
_RATIO = """Critical batches in the middle of the batch sizes are told apart, with power
    {{ power }}, if they differ by a factor of {{ "%.1f" % ratio }}."""
_NO_RATIO = "Seeds vary so much that no two critical batches are told apart."
_STEPS = """The steps of seeds are assumed to vary by {{ deviation }} %; {{ how }}."""
_STEPS_MEASURED = """The steps of seeds are taken to vary as in the pilot, by {{ deviation }} %."""
_NO_STEPS = """the pilot has no spread of them: no cell of it has 2 or more final seeds that all
    reached the target, at different steps"""
_ONE_ARM = "No two arms have the same data, model and loss: none are compared."
_ONE_SEED = "One final seed has no spread: no arm is told apart; give 2 or more final seeds."
_SEEN = """At one batch size the best of {{ arms }} arms is told apart from another, with power
    {{ power }}, if they differ by {{ difference }} (Welch's test of
    {{ seeds }} final seeds each, at {{ level }} % for {{ "the " if tests > 1 }}
    {{- tests | count("comparison") }}{{ " together, by Holm" if tests > 1 }})."""
_FALL = """The limits see the score at a batch size, less that of the small ones, to within
    {{ difference }} (95 % interval; the noise of test examples is part of the seeds' spread)."""
_NEEDED = "To see a difference of {{ margin }}, the study's limit_points, takes {{ needed }}."
_SOURCE = "The standard deviation between seeds is {{ source }}."
_ASSUMED = """assumed to be {{ total }}: {{ own }} of their own, and the noise of
    {{ examples | count("test example") }} at {{ metric.text }} {{ metric.show(share) }};
    {{ how }}"""
_GUESSED = "assumed to be {{ total }} of the score; {{ how }}"
_NO_PILOT = "--pilot=WORKDIR takes it from an earlier study"
_NO_SPREAD = """the pilot has none: no cell of it has 2 or more final seeds that differ and did not
    diverge"""
_MEASURED = "that of the pilot, the median over its arms{{ how }}"
_WITH_MORE = """to see a difference of {{ margin }} with power {{ power }} takes
    {{ needed | count("seed") }}, and there are {{ seeds }}"""
_WITH_THESE = "these seeds show a difference of {{ margin }} with power {{ power }} or more"


@dataclasses.dataclass(frozen=True, slots=True)
class _Assumed:
    """The standard deviation between seeds at one batch size.

    Attributes:
      size: Global batch size; None for all of them.
      deviation: Standard deviation on the metric's scale.
      base: Score that differences are compared with.
    """

    size: int | None
    deviation: float
    base: float


def decision_lines(
    config: SweepConfig, metric_name: str, num_test_examples: int, pilot: Study | None = None
) -> list[str]:
    """Return what a study can decide before it runs, in sentences.

    Args:
      config: The study's config.
      metric_name: Metric that judges it, "accuracy" for instance.
      num_test_examples: Number of its test examples.
      pilot: An earlier study of the same metric, for the spread of its seeds; None, or one without
        a spread, to assume 0.3 points between seeds and the noise of test examples at 95 % (for a
        score that is a share), or 1 % of the score; and 15 % between the steps to a target.

    >>> from lbopt.config import Arm
    >>> config = SweepConfig(arms=(Arm("a"), Arm("b")), global_batch_sizes=(16, 128))
    >>> print(decision_lines(config, "accuracy", 10_000)[-2])
    To see a difference of 1 point, the study's limit_points, takes 4 final seeds.
    """
    if config.train.target_metric and config.train.stop_at_target:
        return _to_target(config, pilot)
    largest = _largest_group(config)
    if largest < 2:
        return [_ONE_ARM]
    seeds = len(config.final_seeds)
    if seeds < 2:
        return [_ONE_SEED]

    metric = metric_named(metric_name)
    if pilot is None:
        assumed, source = _by_default(metric, num_test_examples, _NO_PILOT)
    else:
        assumed, source = _by_pilot(config, metric, num_test_examples, pilot)

    tests = largest - 1
    seen = detectable_difference(seeds, 1.0, tests)
    sizes = config.global_batch_sizes
    small = sum(size <= REFERENCE_FACTOR * sizes[0] for size in sizes)
    half = half_width(seeds, small)
    needed = [(_needed(metric, config.limit_points, one, tests), one.size) for one in assumed]
    lines = [
        say(
            _SEEN,
            arms=largest,
            power=POWER,
            difference=_differences(metric, assumed, seen),
            seeds=seeds,
            level=f"{100 * FAMILY_WISE:g}",
            tests=tests,
        ),
        say(_FALL, difference=_differences(metric, assumed, half)) if small < len(sizes) else "",
        say(
            _NEEDED,
            margin=metric.amount(config.limit_points),
            needed=_over_sizes(needed, _seeds_text),
        ),
        say(_SOURCE, source=source),
    ]
    return [line for line in lines if line]


def _to_target(config: SweepConfig, pilot: Study | None) -> list[str]:
    """Return what a study whose runs stop at their target can decide."""
    lines = [say(_NO_SCORES, seeds=len(config.final_seeds))]
    sizes = config.global_batch_sizes
    if len(sizes) < FEWEST_SIZES or len(config.final_seeds) < 2:
        return lines

    cells = [cell for arm in pilot.measured for cell in arm.cells] if pilot else []
    steps = [cell.steps_of_seeds.steps for cell in cells if cell.seeds > 1 and cell.target]
    spreads = [statistics.stdev(np.log(each)) for each in steps if np.isfinite(each).all()]
    measured = statistics.median(spreads) if spreads else 0.0
    deviation = measured or _OF_STEPS
    ratio = detectable_ratio(sizes, len(config.final_seeds), deviation, POWER)
    told = say(_RATIO, power=POWER, ratio=ratio) if math.isfinite(ratio) else _NO_RATIO
    how = say(_NO_STEPS) if pilot else _NO_PILOT
    source = say(
        _STEPS_MEASURED if measured else _STEPS, deviation=f"{100 * deviation:.2g}", how=how
    )
    return [*lines, told, source]


def seeds_clause(
    metric: Metric,
    margin: float,
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]],
    num_comparisons: int,
) -> str:
    """Return how many seeds it takes to see a margin, for arms that seeds do not tell apart.

    It follows from the spread of the seeds, not from the difference that was found.

    Args:
      metric: The metric.
      margin: A difference that matters, in the metric's unit.
      pairs: Scores of both arms of each comparison that was not decided; the widest counts.
      num_comparisons: Number of comparisons that share the error rate.

    Returns:
      A clause; "" if no pair has a spread.
    """
    found = []
    for ours, theirs in pairs:
        scaled = metric.on_scale(ours), metric.on_scale(theirs)
        if min(map(len, scaled)) < 2 or not all(map(math.isfinite, (*scaled[0], *scaled[1]))):
            continue
        pooled = math.sqrt(statistics.fmean(statistics.variance(one) for one in scaled))
        if pooled > 0:
            one = _Assumed(None, pooled, metric.centre(theirs))
            found.append((_needed(metric, margin, one, num_comparisons), min(map(len, scaled))))
    if not found:
        return ""
    needed, seeds = max(found, key=lambda pair: math.inf if pair[0] is None else pair[0])
    text = metric.amount(margin)
    if needed is None:
        return f"no number of seeds that can be run shows a difference of {text}"
    if needed <= seeds:
        return say(_WITH_THESE, margin=text, power=POWER)
    return say(_WITH_MORE, margin=text, power=POWER, needed=needed, seeds=seeds)


# ---- assumptions


def _largest_group(config: SweepConfig) -> int:
    """Return the largest number of arms with the same data, model and loss."""
    trains = [config.arm_train(index) for index in range(len(config.arms))]
    keys = [repr((train.data, train.model, train.loss)) for train in trains]
    return max(map(keys.count, keys))


def _by_default(metric: Metric, num_test_examples: int, how: str) -> tuple[list[_Assumed], str]:
    """Return the spread that is assumed of every study, and its source, which ends with `how`."""
    if metric.scale != "percent":
        total = f"{100 * _RELATIVE:g} %"
        return [_Assumed(None, _RELATIVE, 1.0)], say(_GUESSED, total=total, how=how)
    of_examples = math.sqrt(_SHARE * (1 - _SHARE))
    deviation = 100 * score_deviation(_SEEDS, of_examples, num_test_examples)
    words = {
        "total": metric.amount(deviation),
        "own": metric.amount(100 * _SEEDS),
        "examples": num_test_examples,
        "share": _SHARE,
        "how": how,
    }
    return [_Assumed(None, deviation, _SHARE)], say(_ASSUMED, metric=metric, **words)


def _by_pilot(
    config: SweepConfig, metric: Metric, num_test_examples: int, pilot: Study
) -> tuple[list[_Assumed], str]:
    """Return the spread of a pilot's seeds at the batch size nearest to each of the study's."""
    found: dict[int, _Assumed] = {}
    others: set[int] = set()
    for size in pilot.sizes:
        cells = [cell for arm in pilot.measured if (cell := arm.cell(size))]
        whole = [cell for cell in cells if cell.seeds > 1 and not cell.diverged]
        kept = [cell for cell in whole if cell.test.mean is not None]
        spreads = [_deviation(cell, metric, num_test_examples) for cell in kept]
        if kept and (median := statistics.median(spreads)) > 0:
            base = statistics.median(cell.test.mean for cell in kept if cell.test.mean is not None)
            found[size] = _Assumed(size, median, base)
            others |= {
                len(one.values) for cell in kept for one in cell.examples if one is not None
            } - {num_test_examples}
    if not found:
        return _by_default(metric, num_test_examples, say(_NO_SPREAD))

    def nearest(size: int) -> _Assumed:
        return found[min(found, key=lambda one: abs(math.log(one / size)))]

    how = ""
    if others:
        theirs = listed(f"{number:,}" for number in sorted(others))
        how = f", for {num_test_examples:,} test examples instead of {theirs}"
    assumed = [dataclasses.replace(nearest(size), size=size) for size in config.global_batch_sizes]
    return assumed, say(_MEASURED, how=how)


def _deviation(cell: CellResults, metric: Metric, num_test_examples: int) -> float:
    """Return the deviation between a cell's seeds, as another number of test examples gives it.

    The variance that single examples add is known where their scores were recorded. It is that of
    the seeds' scores on one example, on average.
    """
    measured = statistics.stdev(metric.on_scale(cell.scores))
    examples = [one.values for one in cell.examples if one is not None]
    if metric.scale != "percent" or len(examples) < cell.seeds:
        return measured
    each = np.stack(examples)
    of_examples = 100 * math.sqrt(float(np.mean(np.var(each, axis=0, ddof=1))))
    own = max(0.0, measured**2 - of_examples**2 / each.shape[1])
    return score_deviation(math.sqrt(own), of_examples, num_test_examples)


# ---- words


def _needed(metric: Metric, margin: float, one: _Assumed, tests: int) -> int | None:
    """Return the seeds that show a margin, given in the metric's unit."""
    difference = metric.tolerance(margin, one.base)
    if metric.scale == "percent":
        difference *= 100  # of a share; the deviation is in points
    return seeds_needed(difference, one.deviation, tests) if difference > 0 else None


def _differences(metric: Metric, assumed: Sequence[_Assumed], deviations: float) -> str:
    """Return a difference, given in standard deviations, as text in the metric's unit."""
    pairs = [(deviations * one.deviation, one) for one in assumed]
    found = [
        (abs(metric.better_interval(difference, difference, one.base)[0]), one.size)
        for difference, one in pairs
    ]
    return _over_sizes(found, metric.amount)


def _seeds_text(needed: float | None) -> str:
    return (
        "more final seeds than can be run" if needed is None else count(int(needed), "final seed")
    )


def _over_sizes(found: Sequence[tuple[Any, int | None]], text: Callable[[Any], str]) -> str:
    """Return numbers with the batch sizes at which they hold; of many the least and the most.

    A number is None where it is larger than any.
    """

    def named(pair: tuple[Any, int | None]) -> str:
        return f"{text(pair[0])} at batch {pair[1]}"

    if len({text(value) for value, _ in found}) == 1:
        return text(found[0][0])
    if len(found) <= _MOST_SIZES:
        return listed(map(named, found))
    ordered = sorted(found, key=lambda pair: math.inf if pair[0] is None else pair[0])
    return f"between {named(ordered[0])} and {named(ordered[-1])}"
