"""Intervals of differences agree with SciPy; simultaneous ones keep their level."""

import math

import numpy as np
import pytest
from scipy import stats

from lbopt.report.study._metric import ACCURACY, PERPLEXITY, Metric
from lbopt.report.study._statistics import Difference, advantage, ahead_of, welch_interval

OURS = [1.0, 2.0, 4.0, 3.5]
THEIRS = [0.5, 1.5, 0.7]


def test_welch_agrees_with_scipy():
    interval = stats.ttest_ind(OURS, THEIRS, equal_var=False).confidence_interval(0.9)
    assert welch_interval(OURS, THEIRS, 0.9) == pytest.approx(tuple(interval), rel=1e-9)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [([1.0], [2.0, 3.0]), ([1.0, math.inf], [2.0, 3.0]), ([1.0, 1.0], [2.0, 2.0])],
    ids=["one seed", "diverged", "no variance and another mean"],
)
def test_what_seeds_cannot_tell(ours, theirs):
    assert welch_interval(ours, theirs) is None
    assert ahead_of(ACCURACY, ours, [theirs]) == [Difference(None, None, None)]


def test_equal_numbers_do_not_differ():
    assert welch_interval([1.0, 1.0], [1.0, 1.0]) == (0.0, 0.0)
    assert ahead_of(ACCURACY, [1.0, 1.0], [[1.0, 1.0]]) == [Difference(False, 0.0, 0.0)]


def test_an_advantage_in_perplexity_is_in_percent_of_theirs():
    ours = [90.0, 91.0, 92.0]
    theirs = [100.0, 102.0, 101.0]
    low, high = stats.ttest_ind(np.log(ours), np.log(theirs), equal_var=False).confidence_interval(
        0.95
    )
    assert advantage(PERPLEXITY, ours, theirs) == pytest.approx(
        (100 * (1 - np.exp(high)), 100 * (1 - np.exp(low)))
    )
    assert advantage(PERPLEXITY, ours, theirs)[0] > 0 > advantage(PERPLEXITY, theirs, ours)[1]


def test_levels_are_holms():
    """Holm's thresholds for three p values are 0.05 / 3, / 2 and / 1, up to the first miss."""
    best = [0.0, 1.0, 2.0, 3.0]

    def other(p):
        """Return a sample of equal spread, shifted down until its p value is `p`."""
        error = stats.sem(best) * 2**0.5
        return [x - error * stats.t.isf(p / 2, 6) for x in best]

    def apart(*chances):
        return [one.apart for one in ahead_of(ACCURACY, best, [other(p) for p in chances])]

    assert apart(0.04, 0.001, 0.02) == [True, True, True]
    assert apart(0.04, 0.001, 0.03) == [False, True, False]
    assert apart(0.02, 0.02, 0.02) == [False, False, False]
    assert apart(0.02) == [True]


def test_an_interval_says_what_its_level_decided():
    best = [3.0, 4.0, 5.0, 6.0]
    others = [[2.0, 1.0, 0.0, 1.0], [3.0, 2.0, 4.0, 3.0], [3.0, 4.0, 5.0, 5.5]]
    found = ahead_of(Metric("own", "own", "percent"), best, others)  # it has no highest score
    assert {one.apart for one in found} == {True, False}
    for one, scores in zip(found, others, strict=True):
        assert one.apart is (one.low > 0)
        assert (one.low + one.high) / 2 == pytest.approx(100 * (np.mean(best) - np.mean(scores)))


@pytest.mark.slow
def test_of_equal_arms_few_are_told_apart():
    """The best of five equal arms is compared with four; 5 % each would reject too often."""
    draw = np.random.default_rng(0)
    false = 0
    for _ in range(300):
        first, *others = draw.normal(size=(5, 6)).tolist()
        false += any(one.apart for one in ahead_of(ACCURACY, first, others))
    assert false <= 0.05 * 300 + 3 * (0.05 * 0.95 * 300) ** 0.5
