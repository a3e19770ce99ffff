"""Whether arms stay within the study's `limit_points` of another arm, batch size by batch size."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lbopt.report.study._decision import seeds_clause
from lbopt.report.study._power import FAMILY_WISE
from lbopt.report.study._statistics import advantage, can_be
from lbopt.report.study._study import ArmResults, Study
from lbopt.report.study._words import HELD, NOT_HELD, UNKNOWN, say

_WORST = """at batch {{ one.size }} the difference of {{ one.arm | name }} to {{ other }} is
    {{ "%+.2f" % low }} to {{ "%+.2f" % high }} {{ units }}"""
_TOO_FEW = """the seeds are too few for an interval
    {%- for arm, size in cells %}{{ "," if not loop.first }} of {{ arm | name }} at {{ size }}
    {%- endfor %}"""
_ALONE = "the interval is Welch's, at 95 %"
_TOGETHER = "intervals by Welch at Bonferroni's level, 95 % for the {} comparisons together"


@dataclasses.dataclass(frozen=True, slots=True)
class _Comparison:
    """An arm beside another one at one batch size.

    Attributes:
      arm: Name of the arm.
      size: Global batch size.
      low: Lower end of the interval of how much better it is, in the metric's unit.
      high: Upper end.
    """

    arm: str
    size: int
    low: float
    high: float


def stay_within(
    study: Study, whole: ArmResults, others: Sequence[ArmResults], called: str
) -> tuple[str, list[str]]:
    """Return a verdict on arms that should score as another one does, and its evidence.

    It holds if no interval of a difference reaches a loss of more than the study's `limit_points`.
    It does not if one has only such losses. Otherwise it cannot be told.

    Args:
      study: The study.
      whole: The arm to compare with.
      others: The arms.
      called: Name of the arm to compare with, in the evidence.

    Returns:
      The verdict, and the clauses it rests on.
    """
    metric = study.metric
    limit = study.config.limit_points
    pairs = [
        (arm.name, ours, theirs)
        for arm in others
        for ours in arm.cells
        if (theirs := whole.cell(ours.global_batch_size))
    ]
    confidence = 1 - FAMILY_WISE / max(1, len(pairs))
    undecided = []

    told: list[_Comparison] = []
    untold: list[tuple[str, int]] = []
    for name, ours, theirs in pairs:
        scores = ours.scores, theirs.scores
        interval = advantage(metric, *scores, confidence)
        if interval and can_be(metric, *scores, confidence):
            told.append(_Comparison(name, ours.global_batch_size, *interval))
            diverged = ours.diverged or theirs.diverged  # such seeds have no spread
            if interval[0] < -limit <= interval[1] and not diverged:
                undecided.append(scores)
        else:
            untold.append((name, ours.global_batch_size))

    lost = [one for one in told if one.high < -limit]
    kept = told and not untold and all(one.low >= -limit for one in told)
    verdict = NOT_HELD if lost else HELD if kept else UNKNOWN
    worst = min(lost or told, key=lambda one: one.low, default=None)
    told_worst = ""
    if worst:
        # The difference of scores, which is above 0 for a worse one where lower is better.
        better = (worst.low, worst.high)
        low, high = sorted(-end for end in better) if metric.lower_is_better else better
        told_worst = say(_WORST, one=worst, other=called, units=metric.units, low=low, high=high)
    return verdict, [
        told_worst,
        say(_TOO_FEW, cells=untold) if untold and not lost else "",
        (_TOGETHER.format(len(pairs)) if len(pairs) > 1 else _ALONE) if worst else "",
        seeds_clause(metric, limit, undecided, len(pairs)) if verdict == UNKNOWN else "",
    ]
