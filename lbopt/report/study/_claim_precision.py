"""Claim of APS (auto-precision scaling): sums of 8-bit gradients keep the accuracy of 32 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lbopt.config import AggregatorConfig
from lbopt.report.study._study import ArmResults, Study, comparable
from lbopt.report.study._within import stay_within
from lbopt.report.study._words import Claim, judged

FULL = (8, 23)
_BITS = 8
_NAME = "aps_keeps_accuracy"
_WHAT = "8-bit gradients with auto-precision scaling stay within {} of the {} of 32 bits"


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


def aps_keeps_accuracy(study: Study) -> Claim | None:
    """Judge the claim of APS by the test scores at every batch size.

    See `stay_within`.

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
    verdict, evidence = stay_within(study, whole, short, "32 bits")
    metric = study.metric
    what = _WHAT.format(metric.amount(study.config.limit_points), metric.text)
    return judged(_NAME, verdict, what, *evidence)
