"""How the arms stand at the study's largest batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lbopt.sweep.findings.differences import Difference, ahead_of
from lbopt.sweep.findings.groups import comparable
from lbopt.sweep.findings.limits import has_limits, of_seeds
from lbopt.sweep.findings.metric import Metric
from lbopt.sweep.findings.names import arm_name, listed
from lbopt.sweep.findings.points import Index

Arms = Sequence[Mapping[str, Any]]


class _Scored(NamedTuple):
    """An arm and the test score of each of its seeds there."""

    arm: Mapping[str, Any]
    scores: list[float]


def at_largest(
    config: Mapping[str, Any], measured: Arms, index: Index, metric: Metric
) -> list[str]:
    """Return the sentence that ranks the arms at the largest batch, and says from which the best is told apart.

    It is compared with each arm of the same data, model and loss; see `lbopt.sweep.findings.differences.ahead_of`.

    Args:
      config: the study's config as JSON data.
      measured: arms of a summary that have a tested cell.
      index: rows by cell.
      metric: what the study is judged by.

    Returns:
      One sentence; none if fewer than two arms were tested there. Of runs that stop at a target it ranks the steps they took.
    """
    largest = config["global_batch_sizes"][-1]
    if not has_limits(config):
        return _steps_at(largest, measured)
    there = [
        _Scored(arm, scores)
        for arm in measured
        if (cell := index.get((arm["arm"], largest)))
        and (scores := metric.scores(cell.final, "test"))
    ]
    if len(there) < 2:
        return []
    ranked = sorted(there, key=lambda one: metric.worse_by(1.0, metric.centre(one.scores)))
    order = ", ".join(f"{arm_name(one.arm)} {_shown(one, largest, metric)}" for one in ranked)
    return ["; ".join([f"At batch {largest}: {order}", *_told(config, ranked, metric)]) + "."]


def _shown(one: _Scored, size: int, metric: Metric) -> str:
    """Return the mean, and with how many of the seeds training diverged."""
    (point,) = (point for point in one.arm["points"] if point["global_batch_size"] == size)
    mean = metric.centre(one.scores)
    if not math.isfinite(mean):
        return metric.show(mean) + of_seeds(point)
    broken = (
        f" ({point['diverged']} of {point['seeds']} seeds diverged and count as 0)"
        if point["diverged"]
        else ""
    )
    return metric.show(mean) + broken


def _told(config: Mapping[str, Any], ranked: Sequence[_Scored], metric: Metric) -> list[str]:
    """Return the clauses that compare the best with the others of its group."""
    best = ranked[0]
    groups = comparable(config, [one.arm for one in ranked])
    (same,) = (group for group in groups if best.arm in group)
    others = [
        one for one in ranked[1:] if one.arm in same and math.isfinite(metric.centre(one.scores))
    ]
    if not others or not math.isfinite(metric.centre(best.scores)):
        return []
    found = ahead_of(metric, best.scores, [one.scores for one in others])
    names = [arm_name(one.arm) for one in others]
    clauses = _clauses(arm_name(best.arm), list(zip(names, found, strict=True)), metric)
    return [
        *clauses,
        *["compared are only arms with the same data, model and loss"] * (len(groups) > 1),
    ]


def _clauses(best: str, found: Sequence[tuple[str, Difference]], metric: Metric) -> list[str]:
    apart, same, unknown = (
        [(name, one) for name, one in found if one.apart is kind] for kind in (True, False, None)
    )
    tests = len(apart) + len(same)
    how = (
        "its 95 % interval by Welch"
        if tests == 1
        else f"intervals by Welch at Holm's levels, 95 % for the {tests} comparisons together"
    )
    clauses = []
    if same:
        behind = ", ".join(f"{name} ({_interval(one, metric)})" for name, one in same)
        clauses.append(f"the seeds do not tell {best} apart from {behind}")
    if apart:
        nearest, one = apart[0]
        rest = f", the nearest of them {nearest}" if len(apart) > 1 else ""
        clauses.append(
            f"the seeds tell {best} apart from {listed([name for name, _ in apart])}{rest} ({_interval(one, metric)})"
        )
    if clauses:
        clauses[-1] += f", {how}"
    if unknown:
        names = " or ".join(name for name, _ in unknown)
        clauses.append(f"whether {best} and {names} differ cannot be told from these seeds")
    return clauses


def _interval(one: Difference, metric: Metric) -> str:
    return (
        f"{one.low:+.2f} to {one.high:+.2f} {'points' if metric.name == 'accuracy' else 'percent'}"
    )


def _steps_at(size: int, measured: Arms) -> list[str]:
    """Say how many steps each arm takes at a batch size, as runs that stop at the target differ in nothing else."""
    there = [(arm, point["target"]["steps_median"]) for arm in measured for point in arm["points"] if point["global_batch_size"] == size]  # fmt: skip
    if len(there) < 2:
        return []
    ranked = sorted(there, key=lambda pair: math.inf if pair[1] is None else pair[1])
    said = ", ".join(
        f"{arm_name(arm)} {'not reached' if steps is None else f'{steps:,.0f}'}"
        for arm, steps in ranked
    )
    return [f"Median steps to the target at batch {size}: {said}."]
