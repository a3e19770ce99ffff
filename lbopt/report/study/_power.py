"""Power of the comparison of two arms: the difference that some seeds show, and the seeds it takes.

The comparison is that of `lbopt.report.study._statistics.ahead_of`: Welch's test of the final
seeds' scores on one test set, at the level of Holm's first step. Seeds are normal with one standard
deviation in both arms. Test examples that are hard for both arms add nothing to their difference;
what an example adds by chance, run by run, is part of that standard deviation.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import optimize, special, stats

from lbopt.errors import require

FAMILY_WISE = 0.05
"""Error rate of all comparisons that a finding makes, together."""
POWER = 0.8
"""Share of studies in which a difference has to be seen."""
_NODES = 64
_MOST_SEEDS = 100_000


def score_deviation(between_seeds: float, of_examples: float, num_test_examples: int) -> float:
    """Return the standard deviation between the measured scores of seeds.

    Args:
      between_seeds: Standard deviation of the seeds' scores on endless test data.
      of_examples: Standard deviation of the scores of one run on single test examples, as far as
        seeds differ in them; sqrt(a (1 - a)) at most for accuracy a.
      num_test_examples: Number of test examples.

    >>> round(score_deviation(0.002, math.sqrt(0.95 * 0.05), 10_000), 5)
    0.00296
    """
    require(num_test_examples >= 1, "num_test_examples", num_test_examples, "give a number >= 1")
    return math.sqrt(between_seeds**2 + of_examples**2 / num_test_examples)


def welch_power(difference: float, deviation: float, num_seeds: int, level: float) -> float:
    """Return the probability that Welch's test sees a difference of two arms.

    With r the share of one sample variance in the sum of both, which is Beta((n - 1) / 2,
    (n - 1) / 2), and independent of that sum, the statistic is noncentral t with 2 (n - 1) degrees
    of freedom, and Welch's critical value has (n - 1) / (r^2 + (1 - r)^2) of them.

    Args:
      difference: Difference of the arms' expected scores.
      deviation: Standard deviation between seeds, in the same unit, > 0.
      num_seeds: Number of seeds of each arm, >= 2.
      level: Significance level of the two-sided test, in (0, 1).

    >>> round(welch_power(0.5, 1.0, 64, 0.05), 2)
    0.8
    """
    half = (num_seeds - 1) / 2
    roots, weights = special.roots_jacobi(_NODES, half - 1, half - 1)
    share = (1 + roots) / 2
    freedom = (num_seeds - 1) / (share**2 + (1 - share) ** 2)
    critical = stats.t.ppf(1 - level / 2, freedom)

    shift = difference / (deviation * math.sqrt(2 / num_seeds))
    pooled = 2 * (num_seeds - 1)
    seen = stats.nct.sf(critical, pooled, shift) + stats.nct.sf(critical, pooled, -shift)
    return float(np.average(seen, weights=weights))


def detectable_difference(
    num_seeds: int,
    deviation: float,
    num_comparisons: int = 1,
    power: float = POWER,
    family_wise: float = FAMILY_WISE,
) -> float:
    """Return the smallest difference between two arms at a batch size that is seen.

    Args:
      num_seeds: Number of final seeds of each arm, >= 2.
      deviation: Standard deviation between seeds, > 0, see `score_deviation`.
      num_comparisons: Number of arms that the best one is compared with. Holm's first step tests at
        `family_wise` over it; a later step sees more.
      power: Probability with which the difference is seen, in (0, 1).
      family_wise: Error rate of all comparisons together, in (0, 1).

    Returns:
      The difference, in the unit of `deviation`.

    Raises:
      UserError: Naming the argument, if it is out of its range.

    >>> round(detectable_difference(6, 1.0), 2), round(detectable_difference(6, 1.0, 4), 2)
    (1.83, 2.37)
    """
    _check(deviation, num_comparisons, power, family_wise)
    require(num_seeds >= 2, "num_seeds", num_seeds, "one seed has no spread; give 2 or more")
    level = family_wise / num_comparisons

    def missing(difference: float) -> float:
        return welch_power(difference, 1.0, num_seeds, level) - power

    high = 1.0
    while missing(high) < 0:
        high *= 2
    return deviation * float(optimize.brentq(missing, 0.0, high, xtol=1e-6))


def seeds_needed(
    difference: float,
    deviation: float,
    num_comparisons: int = 1,
    power: float = POWER,
    family_wise: float = FAMILY_WISE,
) -> int | None:
    """Return the fewest final seeds with which a difference is seen; the inverse of the above.

    Args:
      difference: Difference of two arms, > 0.
      deviation: Standard deviation between seeds, in the same unit, > 0.
      num_comparisons: Number of arms that the best one is compared with.
      power: Probability with which the difference is seen, in (0, 1).
      family_wise: Error rate of all comparisons together, in (0, 1).

    Returns:
      Number of seeds of each arm, at least 2; None for more than 100,000.

    Raises:
      UserError: Naming the argument, if it is out of its range.

    >>> [seeds_needed(size, 1.0) for size in (0.2, 0.5, 0.8)]
    [394, 64, 26]
    """
    _check(deviation, num_comparisons, power, family_wise)
    require(difference > 0, "difference", difference, "give a number > 0")
    level = family_wise / num_comparisons

    def enough(count: int) -> bool:
        return welch_power(difference, deviation, count, level) >= power

    high = 2
    while not enough(high):
        high *= 2
        if high > _MOST_SEEDS:
            return None
    low = max(high // 2, 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def half_width(num_seeds: int, num_reference: int) -> float:
    """Return half the 95 % interval of a mean less another, in standard deviations of seeds.

    Args:
      num_seeds: Number of seeds of the mean, >= 2; Student's quantile has twice their degrees of
        freedom, as the bootstrap of the limit has.
      num_reference: Number of means of as many seeds whose mean the other one is.

    >>> round(half_width(5, 1), 2)
    1.46
    """
    quantile = float(stats.t.ppf(0.975, 2 * (num_seeds - 1)))
    return quantile * math.sqrt((1 + 1 / num_reference) / num_seeds)


def _check(deviation: float, num_comparisons: int, power: float, family_wise: float) -> None:
    fits = 0 < deviation < math.inf
    require(fits, "deviation", deviation, "give a finite number > 0")
    require(num_comparisons >= 1, "num_comparisons", num_comparisons, "give a number >= 1")
    require(0 < power < 1, "power", power, "give a number between 0 and 1")
    require(0 < family_wise < 1, "family_wise", family_wise, "give a number between 0 and 1")
