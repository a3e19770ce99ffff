"""The bootstrap of the limit follows the rule of the limit."""

import itertools

import numpy as np
import pytest

from lbopt.report.study._limits import find_limit, quantiles, resample_limits

SIZES = (16, 64, 256, 1024)


def interval(values, tolerance, confidence=0.95, **options):
    return quantiles(resample_limits(values, tolerance, **options), confidence)


def test_without_scatter_both_ends_are_the_limit():
    values = [
        (size, [value] * 5) for size, value in zip(SIZES, (0.98, 0.975, 0.97, 0.9), strict=True)
    ]
    assert interval(values, 0.01) == (256, 256)
    assert interval(values, 0.0049) == (16, 16)
    assert interval(values[:1], 0.01) == (16, 16)


@pytest.mark.parametrize("counts", [(5, 5, 5, 5), (1, 2, 3, 4)])
def test_every_draw_follows_the_rule_of_the_summary(counts):
    """Values of few digits, so that means often lie on the edge of the tolerance."""
    rng = np.random.default_rng(5)
    draw = np.random.Generator(np.random.Philox(7))
    values = [(size, rng.integers(95, 100, n) / 100) for size, n in zip(SIZES, counts, strict=True)]
    chosen = [one[draw.integers(len(one), size=(500, len(one)))] for _, one in values]
    expected = [
        find_limit(
            [(size, float(np.mean(one[draw]))) for size, one in zip(SIZES, chosen, strict=True)],
            1.0,
        )
        for draw in range(500)
    ]
    assert resample_limits(values, 0.01, num_resamples=500, seed=7).tolist() == expected
    assert len(set(expected)) >= 3


@pytest.mark.parametrize(("num_seeds", "low", "high"), [(4, 16, 64), (6, 64, 16)])
def test_the_interval_follows_the_binomial(num_seeds, low, high):
    """Half of the seeds at 64 fail: all draws do so (1/2)^n of the time, and as often none does.

    An interval of 95% leaves 1/40 out at each end: with four seeds (1/16) it reaches that far, with six (1/64) not.
    """
    values = [(16, [1.0]), (64, [0.0, 1.0] * (num_seeds // 2))]
    for tolerance, ends, rare in ((0.999, (low, 64), 16), (0.001, (16, high), 64)):
        limits = resample_limits(values, tolerance, num_resamples=20_000)
        probability = 0.5**num_seeds
        standard_error = np.sqrt(probability * (1 - probability) / 20_000)
        assert abs(np.mean(limits == rare) - probability) <= 4 * standard_error
        assert interval(values, tolerance, num_resamples=20_000) == ends


def test_scattered_seeds_give_a_wide_interval_that_a_larger_tolerance_narrows():
    rng = np.random.default_rng(0)
    values = [(size, 0.95 + 0.02 * rng.normal(size=5)) for size in SIZES]
    assert interval(values, 0.005) == (16, 1024)
    assert interval(values, 0.2) == (1024, 1024)


def test_a_higher_confidence_never_narrows_the_interval():
    rng = np.random.default_rng(2)
    values = [
        (size, 0.95 - 0.002 * place + 0.01 * rng.normal(size=5)) for place, size in enumerate(SIZES)
    ]
    ends = [interval(values, 0.01, confidence=confidence) for confidence in (0.1, 0.5, 0.9, 0.999)]
    assert all(
        wide[0] <= narrow[0] and narrow[1] <= wide[1] for narrow, wide in itertools.pairwise(ends)
    )
    assert ends[0] != ends[-1]


def test_losses_are_better_when_they_are_lower_and_ten_percent_of_perplexity_is_a_tenth_of_a_nat():
    values = [(16, [4.0, 4.0]), (64, [3.5, 3.5]), (256, [4.09, 4.09]), (1024, [4.1, 4.1])]
    assert interval(values, np.log(1.1), higher_is_better=False) == (256, 256)
    assert interval(values, np.log(1.1), higher_is_better=True) == (16, 16)


def test_runs_that_diverged_are_past_the_limit():
    infinite = float("inf")
    assert interval([(16, [4.0]), (64, [infinite])], 1.0, higher_is_better=False) == (16, 16)
    assert interval([(16, [infinite]), (64, [infinite])], 1.0, higher_is_better=False) == (16, 16)


def test_the_bootstrap_is_the_same_every_time():
    rng = np.random.default_rng(0)
    values = [(size, 0.95 + 0.02 * rng.normal(size=5)) for size in SIZES]
    limits = resample_limits(values, 0.005, seed=3)
    assert np.array_equal(limits, resample_limits(values, 0.005, seed=3))
    assert not np.array_equal(limits, resample_limits(values, 0.005, seed=4))


def test_draws_of_two_arms_are_independent():
    values = [(16, [1.0, 1.0]), (64, [0.0, 1.0])]
    first, second = (
        resample_limits(values, 0.6, seed=(0, index), num_resamples=20_000) for index in (0, 1)
    )
    shares = [np.mean(one == 64) for one in (first, second)]
    assert shares == pytest.approx([0.75, 0.75], abs=4 * (0.75 * 0.25 / 20_000) ** 0.5)
    assert np.mean((first == 64) & (second == 64)) == pytest.approx(
        0.75**2, abs=4 * (0.25 / 20_000) ** 0.5
    )
