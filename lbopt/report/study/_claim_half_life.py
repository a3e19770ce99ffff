"""Claim: as the batch changes, b2's half-life in examples is to be kept, and not b2 itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from lbopt.config import TrainConfig
from lbopt.report.study._power import FAMILY_WISE
from lbopt.report.study._statistics import advantage, can_be
from lbopt.report.study._study import ArmResults, CellResults, Study, comparable
from lbopt.report.study._words import HELD, NOT_HELD, UNKNOWN, Claim, judged, say

_RULE = "+token_half_life"
_WHAT = "keeping the half-life of b2 in examples is better than keeping b2"
_TOLD = """at batch {{ size }} {{ arm | name }} is {{ "%.2f" % low }} to {{ "%.2f" % high }}
    {{ units }} {{ word }} than {{ other | name }}"""
_NOTHING = 'the seeds tell {{ arms | map("name") | listed }} apart at no batch size'
_LEVEL = "intervals by Welch at Bonferroni's level, 95 % for all {} comparisons together"


def half_life_of_b2_is_better(study: Study) -> Claim | None:
    """Judge arms with the rule "X+token_half_life" beside the same arms with the rule X.

    The claim holds if they are better at one batch size or more and worse at none, and does not if
    they are worse at one or more and better at none.

    Returns:
      The claim; None without two arms that differ in that alone and have the same search.

    References:
      Marek et al., arXiv 2507.07101v2.
    """
    pairs = list(_pairs(study))
    if not pairs:
        return None
    metric = study.metric
    confidence = 1 - FAMILY_WISE / len(pairs)
    signs = set()
    told = []
    for (arm, ours), (other, theirs) in pairs:
        scores = ours.scores, theirs.scores
        interval = advantage(metric, *scores, confidence)
        if interval is None or not can_be(metric, *scores, confidence):
            continue
        if interval[0] <= 0 <= interval[1]:
            continue
        better = interval[0] > 0
        signs.add(better)
        low, high = sorted(map(abs, interval))
        word = "better" if better else "worse"
        names = {"arm": arm.name, "other": other.name, "size": ours.global_batch_size}
        told.append(say(_TOLD, low=low, high=high, units=metric.units, word=word, **names))

    verdict = HELD if signs == {True} else NOT_HELD if signs == {False} else UNKNOWN
    arms = [arm.name for arm, _ in pairs[0]]
    return judged(
        "half_life_of_b2_is_better",
        verdict,
        _WHAT,
        *(told or [say(_NOTHING, arms=arms)]),
        _LEVEL.format(len(pairs)),
    )


_Cell = tuple[ArmResults, CellResults]


def _pairs(study: Study) -> Iterator[tuple[_Cell, _Cell]]:
    """Yield each measured cell of an arm with the half-life beside that of the arm without it."""
    for group in comparable(study.measured, same_budget=True):
        for arm in group:
            rule = arm.config.schedule.scaling_rule
            if arm.grows or not rule.endswith(_RULE):
                continue
            wanted = _with_rule(arm.train, rule.removesuffix(_RULE))
            for other in (one for one in group if one.train == wanted):
                cells = ((cell, other.cell(cell.global_batch_size)) for cell in arm.cells)
                yield from (((arm, ours), (other, theirs)) for ours, theirs in cells if theirs)


def _with_rule(train: TrainConfig, rule: str) -> TrainConfig:
    schedule = dataclasses.replace(train.schedule, scaling_rule=rule)
    return dataclasses.replace(train, schedule=schedule)
