"""Claim of APS (auto-precision scaling): sums of 8-bit gradients keep the accuracy of 32 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lbopt.config import AggregatorConfig
from lbopt.report.study._statistics import advantage, can_be
from lbopt.report.study._study import ArmResults, Study, comparable
from lbopt.report.study._words import HELD, NOT_HELD, UNKNOWN, Claim, judged, say

FULL = (8, 23)
_BITS = 8
_NAME = "aps_keeps_accuracy"
_WHAT = "8-bit gradients with auto-precision scaling stay within {} of the {} of 32 bits"
_FAMILY_WISE = 0.05
_WORST = """at batch {{ one.size }} the difference of {{ one.arm | name }} to 32 bits is
    {{ "%+.2f" % one.low }} to {{ "%+.2f" % one.high }} {{ units }}"""
_TOO_FEW = """the seeds are too few for an interval
    {%- for arm, size in cells %}{{ "," if not loop.first }} of {{ arm | name }} at {{ size }}
    {%- endfor %}"""
_TOGETHER = "intervals by Welch at Bonferroni's level, 95 % for the {} comparisons together"


@dataclasses.dataclass(frozen=True, slots=True)
class ArmFormat:
    """The format in which an arm sends gradients.

    Attributes:
      bits: Exponent bits, mantissa bits.
      shifted: Whether each layer is shifted by a power of two; None in full precision, where it
        makes no difference.
    """

    bits: tuple[int, int]
    shifted: bool | None


def arm_format(aggregator: AggregatorConfig) -> ArmFormat | None:
    """Return the format of a plain mean or of an `aps` aggregator; None for another one."""
    if aggregator.name == "mean":
        return ArmFormat(FULL, None)
    if aggregator.name != "aps":
        return None
    return ArmFormat((aggregator.exponent_bits, aggregator.mantissa_bits), aggregator.shift)


@dataclasses.dataclass(frozen=True, slots=True)
class _Comparison:
    """An arm of 8 bits beside that of 32 at one batch size.

    Attributes:
      arm: Name of the arm of 8 bits.
      size: Global batch size.
      low: Lower end of the interval of how much better it is, in the metric's unit.
      high: Upper end.
    """

    arm: str
    size: int
    low: float
    high: float


def aps_keeps_accuracy(study: Study) -> Claim | None:
    """Judge the claim of APS by the test scores at every batch size.

    The claim holds if no interval of a difference to 32 bits reaches a loss of more than the
    study's `limit_points`. It does not if one has only such losses. Otherwise it cannot be told.

    Returns:
      The claim; None unless the study has an arm of 32 bits and one of 8 bits with APS.

    References:
      Han et al., Auto-Precision Scaling for Distributed Deep Learning, arXiv 1911.08907v3,
      abstract: 8-bit gradients with no or only a tiny loss of accuracy.
    """
    for group in comparable(study.measured):
        whole = [arm for arm in group if arm_format(arm.train.aggregator) == ArmFormat(FULL, None)]
        short = [arm for arm in group if _is_short(arm)]
        if whole and short:
            return _judge(study, whole[0], short)
    return None


def _is_short(arm: ArmResults) -> bool:
    found = arm_format(arm.train.aggregator)
    return found is not None and found.shifted is True and 1 + sum(found.bits) == _BITS


def _judge(study: Study, whole: ArmResults, short: Sequence[ArmResults]) -> Claim:
    metric = study.metric
    limit = study.config.limit_points
    pairs = [
        (arm.name, ours, theirs)
        for arm in short
        for ours in arm.cells
        if (theirs := whole.cell(ours.global_batch_size))
    ]
    confidence = 1 - _FAMILY_WISE / max(1, len(pairs))

    told: list[_Comparison] = []
    untold: list[tuple[str, int]] = []
    for name, ours, theirs in pairs:
        scores = ours.scores, theirs.scores
        interval = advantage(metric, *scores, confidence)
        if interval and can_be(metric, *scores, confidence):
            told.append(_Comparison(name, ours.global_batch_size, *interval))
        else:
            untold.append((name, ours.global_batch_size))

    lost = [one for one in told if one.high < -limit]
    kept = told and not untold and all(one.low >= -limit for one in told)
    verdict = NOT_HELD if lost else HELD if kept else UNKNOWN
    worst = min(lost or told, key=lambda one: one.low, default=None)
    return judged(
        _NAME,
        verdict,
        _WHAT.format(metric.amount(limit), metric.text),
        say(_WORST, one=worst, units=metric.units) if worst else "",
        say(_TOO_FEW, cells=untold) if untold and not lost else "",
        _TOGETHER.format(len(pairs)) if worst else "",
    )
