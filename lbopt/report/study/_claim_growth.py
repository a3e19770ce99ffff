"""Claim: the critical batch grows with the examples that a run has seen."""

from __future__ import annotations

import math

from lbopt.report.study._critical_growth import CriticalGrowth
from lbopt.report.study._study import Study
from lbopt.report.study._words import HELD, NOT_HELD, UNKNOWN, Claim, judged, quoted, say

_WHAT = "the critical batch grows with the examples that it takes to reach the target"
_HOW = """p is the exponent of critical batch ~ examples^p over the target and easier ones of the
    same runs, with its 95 % interval by a bootstrap over the seeds"""


def critical_batch_grows(study: Study) -> Claim | None:
    """Judge whether the critical batch is larger for targets that take more examples.

    It holds if the exponents of most arms are above 0 by their intervals and no arm's is below. It
    does not if most are at 0 or below. Otherwise it cannot be told.

    Returns:
      The claim; None if no arm has a growth, see `measure_growth`.

    References:
      McCandlish et al., arXiv 1812.06162v1; Zhang et al., arXiv 2410.21676.
    """
    growths = [(arm.name, arm.growth) for arm in study.measured if arm.growth]
    if not growths:
        return None
    ends = [growth.interval for _, growth in growths]
    grown = sum(low > 0 for low, _ in ends)
    shrunk = sum(high <= 0 for _, high in ends)
    verdict = UNKNOWN
    if 2 * grown > len(ends) and not shrunk:
        verdict = HELD
    elif 2 * shrunk > len(ends):
        verdict = NOT_HELD

    exponents = [f"p is {exponent_text(growth)} for {quoted(name)}" for name, growth in growths]
    others = [quoted(arm.name) for arm in study.measured if arm.growth is None]
    left_out = f"not fitted for {', '.join(others)}" if others else ""
    return judged("critical_batch_grows", verdict, _WHAT, *exponents, left_out, say(_HOW))


def exponent_text(growth: CriticalGrowth) -> str:
    """Return the exponent of a growth with its interval."""
    ends = [
        f"{'-' * (end < 0)}infinity" if math.isinf(end) else f"{end:.2f}" for end in growth.interval
    ]
    return f"{growth.exponent:.2f} ({' to '.join(ends)})"
