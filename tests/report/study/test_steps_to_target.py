"""Steps and examples to a target, on curves whose scaling is known."""

import math

import numpy as np
import pytest

from lbopt.report.study._limit import CannotTell, Limit, NotReached
from lbopt.report.study._steps_to_target import CellSteps, measure_scaling

SIZES = 16 * 2 ** np.arange(7)


def cells_of(mean_steps, spread=0.05, num_seeds=6, num_steps=10**6):
    factors = np.exp(spread * np.linspace(-1, 1, num_seeds))
    return [
        CellSteps(int(size), steps * factors, num_steps)
        for size, steps in zip(SIZES, mean_steps, strict=True)
    ]


def test_regimes_of_a_curve_with_a_critical_batch():
    """S = S_min (1 + B_crit / B) halves at first, and ends at S_min."""
    critical = 200
    scaling = measure_scaling(cells_of(100 * (1 + critical / SIZES)))
    exponents = [saving.exponent for saving in scaling.savings]
    assert exponents == sorted(exponents, reverse=True)
    assert exponents[0] > 0.85
    assert exponents[-1] < 0.25
    assert all(saving.low <= saving.exponent <= saving.high for saving in scaling.savings)

    # Examples B S = S_min (B + B_crit), a quarter more than their geometric mean over 16, 32, 64.
    small = np.exp(np.mean(np.log(SIZES[:3] + critical)))
    until = scaling.perfect_until
    assert isinstance(until, Limit)
    assert until.low < 1.25 * small - critical < until.high
    assert until.global_batch_size == pytest.approx(1.25 * small - critical, rel=0.05)


def test_perfect_scaling_and_none_at_all():
    perfect = measure_scaling(cells_of(10**4 / SIZES))
    assert isinstance(perfect.perfect_until, NotReached)
    assert all(point.examples == pytest.approx(10**4, rel=0.01) for point in perfect.points)
    none = measure_scaling(cells_of(np.full(7, 100.0)))
    assert isinstance(none.perfect_until, CannotTell)
    assert none.perfect_until.reason == "no_plateau"
    assert [saving.exponent for saving in none.savings] == [0] * 6


@pytest.mark.parametrize("places", [range(7), [0], [6]])
def test_no_batch_whose_median_run_missed_the_target_scales_perfectly(places):
    """Whole lengths of equal examples, which were not enough, would look like perfect scaling."""
    cells = cells_of(10**4 / SIZES, num_steps=400)
    for place in places:
        size = int(SIZES[place])
        cells[place] = CellSteps(size, np.full(6, math.inf), 10**4 // size)
    until = measure_scaling(cells).perfect_until
    assert isinstance(until, CannotTell)
    assert until.reason == "target_missed"


def test_seeds_that_miss_the_target():
    """The median counts them as slowest, the end of perfect scaling as a whole run or more."""
    cells = cells_of(10**4 / SIZES, num_steps=400)
    missed = CellSteps(1024, np.array([math.inf] * 4 + [10.0, 10.0]), 40)
    scaling = measure_scaling([*cells[:-1], missed])
    point = scaling.points[-1]
    assert (point.steps, point.high, point.num_reached, point.num_seeds) == (
        math.inf,
        math.inf,
        2,
        6,
    )
    assert math.isnan(scaling.savings[-1].exponent)
    assert 512 < scaling.perfect_until.global_batch_size < 1024
