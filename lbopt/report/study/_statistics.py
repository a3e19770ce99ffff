"""Tests, intervals and fits of a study by SciPy, with rules for too few seeds."""

from __future__ import annotations

import dataclasses
import math
import statistics
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from lbopt.report.study._metric import Metric
from lbopt.report.study._power import FAMILY_WISE

_RESAMPLES = 2000
_ORDERS = 10_000
_ROUNDING = 1e-9


# ---- differences of means


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """A difference of two means.

    Attributes:
      apart: Whether the difference is significant; None if these seeds cannot tell.
      low: Lower end of the interval at the level that decided; None without one that can be.
      high: Upper end of that interval; None with the lower one.
    """

    apart: bool | None = None
    low: float | None = None
    high: float | None = None


def welch_interval(
    ours: Sequence[float], theirs: Sequence[float], confidence: float = 0.95
) -> tuple[float, float] | None:
    """Return Welch's interval of the difference of two means, ours less theirs.

    None if a sample has fewer than two numbers or one that is not finite, or if neither sample
    varies and the means differ: a few equal numbers do not show how much others would vary.

    >>> [round(end, 3) for end in welch_interval([5.1, 4.9, 5.0], [4.0, 4.2, 3.8])]
    [0.584, 1.416]

    References:
      Welch, The generalization of "Student's" problem when several different population variances
      are involved, 1947.
    """
    if min(len(ours), len(theirs)) < 2 or not all(map(math.isfinite, (*ours, *theirs))):
        return None
    if len(set(ours)) == len(set(theirs)) == 1:
        return (0.0, 0.0) if ours[0] == theirs[0] else None
    interval = _welch(ours, theirs).confidence_interval(confidence)
    return float(interval.low), float(interval.high)


def _welch(ours: Sequence[float], theirs: Sequence[float]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # one sample may not vary at all
        return stats.ttest_ind(ours, theirs, equal_var=False)


def advantage(
    metric: Metric, ours: Sequence[float], theirs: Sequence[float], confidence: float = 0.95
) -> tuple[float, float] | None:
    """Return Welch's interval of how much better our mean score is than theirs.

    Returns:
      (low, high) in the metric's unit: points of accuracy, percent of their perplexity (from the
      interval of the mean logarithms) or of their mean. Above 0 is better. None if `welch_interval`
      gives None.

    >>> from lbopt.report.study._metric import ACCURACY
    >>> [round(end, 2) for end in advantage(ACCURACY, [0.99, 0.97], [0.95, 0.95])]
    [-9.71, 15.71]
    """
    interval = welch_interval(metric.on_scale(ours), metric.on_scale(theirs), confidence)
    return None if interval is None else metric.better_interval(*interval, metric.centre(theirs))


def can_be(
    metric: Metric, ours: Sequence[float], theirs: Sequence[float], confidence: float = 0.95
) -> bool:
    """Return whether both ends of `advantage` belong to scores that exist, of at most 100 % say.

    Each end stands for the pair of means with that difference that is likeliest by the two standard
    errors. A few seeds that scatter near the highest score give ends that no means can have: they
    are too few for Welch's normal means.

    >>> from lbopt.report.study._metric import ACCURACY
    >>> can_be(ACCURACY, [0.92, 0.93, 0.94], [0.91, 0.92, 0.93])
    True
    >>> can_be(ACCURACY, [0.96, 0.97, 0.98], [0.98, 0.98, 0.5])
    False
    """
    ours = metric.on_scale(ours)
    theirs = metric.on_scale(theirs)
    interval = welch_interval(ours, theirs, confidence)
    if interval is None:
        return False
    ends = metric.ends_on_scale
    errors = [statistics.variance(scores) / len(scores) for scores in (ours, theirs)]
    share = errors[0] / sum(errors) if sum(errors) else 0.5
    means = statistics.fmean(ours), statistics.fmean(theirs)
    for end in interval:
        moved = end - (means[0] - means[1])
        pair = means[0] + share * moved, means[1] - (1 - share) * moved
        if not all(ends[0] - _ROUNDING <= mean <= ends[1] + _ROUNDING for mean in pair):
            return False
    return True


def ahead_of(
    metric: Metric, best: Sequence[float], others: Sequence[Sequence[float]]
) -> list[Difference]:
    """Test the best arm against each other, with Holm's correction at a family-wise error of 5 %.

    The smallest of m p-values is compared with 5 % / m, the next one with 5 % / (m - 1), and so on
    up to the first that is not small enough. That one and all after it are not significant.

    Returns:
      One difference for each other arm, in order; its interval is `advantage` at the level that
      decided, if it `can_be`.

    Note:
      The best arm is chosen by the same seeds, which favours it slightly.

    References:
      Holm, A simple sequentially rejective multiple test procedure, 1979.
    """
    chances = []
    for place, other in enumerate(others):
        ours = metric.on_scale(best)
        theirs = metric.on_scale(other)
        if (interval := welch_interval(ours, theirs)) is not None:
            same = interval == (0.0, 0.0)
            chances.append((1.0 if same else float(_welch(ours, theirs).pvalue), place))

    found = [Difference()] * len(others)
    apart = True
    level = FAMILY_WISE
    for rank, (p, place) in enumerate(sorted(chances)):
        level = FAMILY_WISE / (len(chances) - rank) if apart else level
        apart = apart and p <= level
        interval = advantage(metric, best, others[place], 1 - level)
        told = interval is not None and can_be(metric, best, others[place], 1 - level)
        found[place] = Difference(apart, *(interval if interval and told else (None, None)))
    return found


# ---- ranks


@dataclasses.dataclass(frozen=True, slots=True)
class RankTest:
    """A permutation test of Spearman's rank correlation, one-sided.

    Attributes:
      correlation: Spearman's rank correlation, in [-1, 1].
      p: Share of all orders in which the correlation would be at least as high.
      least_p: p of the best agreement that these numbers, with their ties, could show.
    """

    correlation: float
    p: float
    least_p: float


def rank_test(pairs: Sequence[tuple[float, float]]) -> RankTest | None:
    """Test whether two orders agree; None for fewer than 3 pairs or a constant side.

    Up to 7 pairs, the test uses all orders; beyond, 10,000 random ones.

    >>> rank_test([(1, 10), (2, 20), (3, 30), (4, 40)]).p == 1 / 24
    True
    """
    ours, theirs = (stats.rankdata([pair[axis] for pair in pairs]) for axis in (0, 1))
    if len(pairs) < 3 or np.ptp(ours) == 0 or np.ptp(theirs) == 0:
        return None
    correlation = round(float(stats.spearmanr(ours, theirs).statistic), 9)
    return RankTest(correlation, _share(ours, theirs), _share(np.sort(ours), np.sort(theirs)))


def _share(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the share of orders of one side in which the ranks agree at least as well."""
    found = stats.permutation_test(
        (ours,),
        lambda ranks, axis: ranks @ theirs,  # Spearman's correlation grows with it
        permutation_type="pairings",
        alternative="greater",
        vectorized=True,
        n_resamples=_ORDERS,
        rng=np.random.Generator(np.random.Philox(0)),
    )
    return float(found.pvalue)


# ---- slopes


@dataclasses.dataclass(frozen=True, slots=True)
class Slope:
    """A least-squares slope of log y against log x, with its 95 % interval.

    Attributes:
      slope: Exponent of x.
      low: Lower end of the slope's interval; None without an interval.
      high: Upper end of the slope's interval; None without an interval.
      over: Source of the interval's uncertainty, "seeds" or "batch sizes".
    """

    slope: float
    low: float | None
    high: float | None
    over: str


def log_slope(groups: Sequence[tuple[float, Sequence[float]]], index: int = 0) -> Slope:
    """Return the slope of log y against log x, each x with the mean of its log y.

    With several y at every x the interval is a percentile bootstrap over them. With a single y at
    some x it is Student's interval of a regression through the means, which three x or more have.

    Args:
      groups: Pairs of x and the values y measured at it, for two or more different x; all > 0.
      index: Arm, so that the resamples of two arms are independent.

    >>> log_slope([(16, [64, 64]), (64, [16, 16])])
    Slope(slope=-1.0, low=-1.0, high=-1.0, over='seeds')
    """
    x = np.log([size for size, _ in groups])
    logs = [np.log(values) for _, values in groups]
    # The slope is a weighted sum of the mean logs, so that a resample needs no fit of its own.
    apart = (x - x.mean()) / np.sum((x - x.mean()) ** 2)
    slope = float(apart @ [values.mean() for values in logs])

    if min(map(len, logs)) > 1:
        interval = stats.bootstrap(
            logs,
            lambda *samples, axis: sum(
                weight * values.mean(axis) for weight, values in zip(apart, samples, strict=True)
            ),
            n_resamples=_RESAMPLES,
            method="percentile",
            rng=np.random.Generator(np.random.Philox([0, index])),
        ).confidence_interval
        low, high = interval
        return Slope(round(slope, 9), round(float(low), 9), round(float(high), 9), "seeds")

    if len(x) < 3:
        return Slope(round(slope, 9), None, None, "batch sizes")
    line = stats.linregress(x, [values.mean() for values in logs])
    half = float(stats.t.ppf(0.975, len(x) - 2) * line.stderr)
    low = slope - half
    high = slope + half
    return Slope(round(slope, 9), round(low, 9), round(high, 9), "batch sizes")


def pooled_slope(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the least-squares slope of log2 y against log2 x; None without spread in x.

    >>> pooled_slope([(16, 64), (64, 16)])
    -1.0
    """
    if len({x for x, _ in pairs}) < 2:
        return None
    xs, ys = (np.log2([pair[axis] for pair in pairs]) for axis in (0, 1))
    return float(statistics.linear_regression(xs.tolist(), ys.tolist()).slope)
