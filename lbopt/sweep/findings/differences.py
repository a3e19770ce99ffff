"""How sure the difference of two means is, and the differences of several from the best."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scipy import special

from lbopt.sweep.findings.metric import ACCURACY, Metric

_FAMILY_WISE = 0.05


class Difference(NamedTuple):
    """What is known of a difference.

    Attributes:
      apart: whether it is told from none; None if that cannot be told.
      low: end of the interval that told it; None as well.
      high: the other end.
    """

    apart: bool | None
    low: float | None
    high: float | None


def welch_interval(
    ours: Sequence[float], theirs: Sequence[float], confidence: float = 0.95
) -> tuple[float, float] | None:
    """Return the interval of the difference of two means, ours less theirs, of samples with variances of their own.

    Args:
      ours: at least two finite numbers.
      theirs: as well.
      confidence: in (0, 1).

    Returns:
      (low, high), in the unit of the numbers; None if there are fewer, if one is not finite, or if neither sample varies and
      their means differ: so few equal numbers do not tell how much others would vary.

    >>> [round(end, 3) for end in welch_interval([5.1, 4.9, 5.0], [4.0, 4.2, 3.8])]
    [0.584, 1.416]

    References:
      Welch, The generalization of "Student's" problem when several different population variances are involved, 1947.
    """
    found = _welch(ours, theirs)
    if found is None:
        return None
    middle, error, freedom = found
    half = student_half_width(error, freedom, confidence)
    return middle - half, middle + half


def student_half_width(error: float, freedom: float, confidence: float = 0.95) -> float:
    """Return the half-width of an interval by Student's t.

    Args:
      error: standard error, in any unit.
      freedom: degrees of freedom, > 0.
      confidence: in (0, 1).

    >>> round(student_half_width(1.0, 4), 3)
    2.776
    """
    return float(special.stdtrit(freedom, (1 + confidence) / 2)) * error


def _welch(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the difference of the means, its standard error and its degrees of freedom."""
    if min(len(ours), len(theirs)) < 2 or not all(map(math.isfinite, (*ours, *theirs))):
        return None
    middle = statistics.fmean(ours) - statistics.fmean(theirs)
    parts = [statistics.variance(values) / len(values) for values in (ours, theirs)]
    if sum(parts) == 0:
        return None if middle else (0.0, 0.0, 1.0)
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (ours, theirs), strict=True)
    )
    return middle, math.sqrt(sum(parts)), freedom


def _probability(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Return the two-sided p of no difference by Welch's test."""
    found = _welch(ours, theirs)
    if found is None:
        return None
    middle, error, freedom = found
    return 2 * float(special.stdtr(freedom, -abs(middle) / error)) if error else 1.0


def advantage(
    metric: Metric, ours: Sequence[float], theirs: Sequence[float], confidence: float = 0.95
) -> tuple[float, float] | None:
    """Return the Welch interval of how much better our mean is than theirs.

    Args:
      metric: what the study is judged by.
      ours: score of every seed, accuracies in [0, 1] or perplexities.
      theirs: as well.
      confidence: in (0, 1).

    Returns:
      (low, high), points of accuracy, or percent of their perplexity (from the interval of the mean logarithms); above 0 is
      better. None where `welch_interval` is.

    >>> [round(end, 2) for end in advantage(ACCURACY, [0.99, 0.97], [0.95, 0.95])]
    [-9.71, 15.71]
    """
    interval = welch_interval(_scale(metric, ours), _scale(metric, theirs), confidence)
    if interval is None or metric is ACCURACY:
        return interval
    low, high = interval
    return -100 * math.expm1(high), -100 * math.expm1(low)


def _scale(metric: Metric, scores: Sequence[float]) -> list[float]:
    """Return scores on the scale on which their mean is taken."""
    return [100 * score if metric is ACCURACY else math.log(score) for score in scores]


def ahead_of(
    metric: Metric, best: Sequence[float], others: Sequence[Sequence[float]]
) -> list[Difference]:
    """Tell the best from each of the others, so that with 95 % none of all is told apart by chance (Holm's method).

    The smallest p of m is held against 5 % / m, the next one against 5 % / (m - 1), and so on up to the first that is not
    small enough; that one and all after it are not told apart.

    Args:
      metric: what the study is judged by.
      best: score of every seed.
      others: likewise of each other.

    Returns:
      One for each other, in order; the interval is that of `advantage` at the level at which it was decided.

    Note:
      The best is the best of these very seeds, so that it is ahead of the others by a little chance too.

    References:
      Holm, A simple sequentially rejective multiple test procedure, 1979.
    """
    chances = [_probability(_scale(metric, best), _scale(metric, one)) for one in others]
    tested = sorted((p, place) for place, p in enumerate(chances) if p is not None)
    found = [Difference(None, None, None)] * len(others)
    apart, level = True, _FAMILY_WISE
    for rank, (p, place) in enumerate(tested):
        level = _FAMILY_WISE / (len(tested) - rank) if apart else level
        apart = apart and p <= level
        interval = advantage(metric, best, others[place], 1 - level)
        found[place] = Difference(apart, *(interval or (None, None)))
    return found
