"""Fits recover what was planted, agree with independent solvers, and the bootstrap follows the rule of the summary."""

import itertools
import json

import numpy as np
import pytest
from scipy import optimize

from lbopt.sweep import fits
from lbopt.sweep.findings.summary import find_limit

EVERY_STEP = np.arange(1, 3001)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 35, 64, 1000, 1_000_000])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 64])
def test_log_spaced_steps_are_distinct_and_as_many_as_asked(num_steps, count):
    steps = fits.log_spaced_steps(num_steps, count)
    assert len(steps) == min(count, num_steps)
    assert all(isinstance(step, int) for step in steps)
    assert list(steps) == sorted(set(steps))
    assert steps[-1:] == ((num_steps,) if count else ())
    if count >= 2:
        assert steps[0] == 1


def test_log_spaced_steps_are_even_where_whole_numbers_allow():
    steps = np.array(fits.log_spaced_steps(1_000_000, 64))
    ratios = steps[1:] / steps[:-1]
    late = ratios[steps[:-1] >= 100]
    assert late.max() / late.min() <= 1.02  # rounding to whole numbers at 100 is 1 percent


@pytest.mark.parametrize(
    "steps", [EVERY_STEP, fits.log_spaced_steps(3000, 64)], ids=["every step", "log-spaced"]
)
@pytest.mark.parametrize("exponent", [0.25, 0.5, 1.0, -0.5])
def test_planted_exponents_are_recovered(steps, exponent):
    distances = 1.7 * np.asarray(steps, float) ** exponent
    power = fits.fit_diffusion(steps, distances, 1).power
    assert power == pytest.approx((1.7, exponent, 1.0), abs=1e-6)


@pytest.mark.parametrize(
    "steps", [EVERY_STEP, fits.log_spaced_steps(3000, 64)], ids=["every step", "log-spaced"]
)
@pytest.mark.parametrize("slope", [0.25, 0.5, 1.0])
def test_planted_slopes_are_recovered(steps, slope):
    log = fits.fit_diffusion(steps, 0.3 + slope * np.log(steps), 1).log
    assert log == pytest.approx((0.3, slope, 1.0), abs=1e-6)


@pytest.mark.parametrize(("exponent", "spread"), [(0.25, 0.0015), (0.5, 0.003), (1.0, 0.008)])
def test_noise_of_two_percent_leaves_the_exponent_nearly_alone(exponent, spread):
    """The spread of the exponent was measured over 300 other draws; 20 draws stay within four of it."""
    steps = np.array(fits.log_spaced_steps(3000, 64))
    for seed in range(20):
        noise = 1 + 0.02 * np.random.default_rng(1000 + seed).normal(size=64)
        power = fits.fit_diffusion(steps, 1.7 * steps**exponent * noise, 1).power
        assert power.exponent == pytest.approx(exponent, abs=4 * spread)
        assert power.r2 > 0.98


def noisy(kind, steps):
    curve = {"log": 0.5 + np.log(steps), "power": 0.4 * np.asarray(steps, float) ** 0.5}[kind]
    return curve * (1 + 0.02 * np.random.default_rng(3).normal(size=len(steps)))


@pytest.mark.parametrize("kind", ["log", "power"])
def test_the_larger_r2_names_the_curve(kind):
    fit = fits.fit_diffusion(EVERY_STEP, noisy(kind, EVERY_STEP), 1)
    better = "log" if fit.log.r2 > fit.power.r2 else "power"
    assert better == kind
    assert abs(fit.log.r2 - fit.power.r2) > 0.01


def trapezoid(x):
    """Return half the distance between the neighbours of each point; its own position stands for a missing one."""
    around = np.concatenate([x[:1], x, x[-1:]])
    return (around[2:] - around[:-2]) / 2


@pytest.mark.parametrize("kind", ["log", "power"])
def test_the_log_fit_is_numpys(kind):
    steps = np.array(fits.log_spaced_steps(3000, 40))
    distances, weights = noisy(kind, steps), trapezoid(np.log(steps))
    log = fits.fit_diffusion(steps, distances, 1).log
    expected = np.polyfit(np.log(steps), distances, 1, w=np.sqrt(weights))
    assert (log.slope, log.intercept) == pytest.approx(tuple(expected), rel=1e-9)


@pytest.mark.parametrize("kind", ["log", "power"])
def test_the_power_fit_is_scipys(kind):
    steps = np.array(fits.log_spaced_steps(3000, 40))
    distances, weights = noisy(kind, steps), trapezoid(np.log(steps))
    power = fits.fit_diffusion(steps, distances, 1).power
    # curve_fit is another method, Levenberg-Marquardt on both parameters; it stops at relative changes of 1e-12.
    (scale, exponent), _ = optimize.curve_fit(
        lambda t, scale, exponent: scale * t**exponent,
        steps.astype(float),
        distances,
        p0=(1.0, 0.3),
        sigma=1 / np.sqrt(weights),
        ftol=1e-12,
        xtol=1e-12,
    )
    assert (power.scale, power.exponent) == pytest.approx((scale, exponent), rel=1e-5)
    residual = np.sum(weights * (distances - scale * steps**exponent) ** 2)
    spread = np.sum(weights * (distances - np.average(distances, weights=weights)) ** 2)
    assert power.r2 == pytest.approx(1 - residual / spread, abs=1e-9)


def test_each_decade_weighs_alike_however_dense_the_points_are():
    """Three decades of one slope and one of another: step by step, the last decade is nine tenths of the points."""
    kinked = lambda t: np.log(t) + np.maximum(np.log(t / 1000), 0)  # noqa: E731
    dense, sparse = np.arange(1, 10_001), np.array(fits.log_spaced_steps(10_000, 200))
    slopes = [fits.fit_diffusion(steps, kinked(steps), 1).log.slope for steps in (dense, sparse)]
    unweighted = np.polyfit(np.log(dense), kinked(dense), 1)[0]
    assert slopes[0] == pytest.approx(slopes[1], rel=0.01)
    assert abs(unweighted - slopes[0]) > 0.3


def test_only_the_window_is_fitted():
    distances = np.where(EVERY_STEP < 100, 5.0, np.sqrt(EVERY_STEP))
    distances[2000:] = np.nan
    fit = fits.fit_diffusion(EVERY_STEP, distances, from_step=100, to_step=2000)
    assert (fit.from_step, fit.to_step) == (100, 2000)
    assert fit.power.exponent == pytest.approx(0.5, abs=1e-6)


def test_a_distance_of_zero_is_a_point_like_any_other():
    """With warmup from zero the first step goes nowhere."""
    fit = fits.fit_diffusion([1, 2, 4, 8, 16], [0.0, 1.0, 2.0, 3.0, 4.0], 1)
    assert fit.log == pytest.approx((0.0, 1 / np.log(2), 1.0), abs=1e-9)


@pytest.mark.parametrize(
    ("steps", "distances", "from_step"),
    [
        ([1, 2, 3], [1, 2, 3], 1),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 3),
        ([1, 2, 3, 4], [1, 2, np.nan, 4], 1),
        ([1, 2, 3, 4], [1, 2, 3, np.inf], 1),
        ([1, 2, 3, 4], [2, 2, 2, 2], 1),
        ([], [], 1),
    ],
    ids=["three points", "window of three", "nan", "infinite", "at rest", "nothing"],
)
def test_no_fit_where_there_is_nothing_to_fit(steps, distances, from_step):
    assert fits.fit_diffusion(steps, distances, from_step) is None


def test_the_json_of_a_fit():
    fit = fits.fit_diffusion(np.array([1, 2, 4, 8]), np.array([1.0, 2.0, 3.0, 4.5]), 1)
    data = json.loads(json.dumps(fit.to_json()))
    assert {name: list(data[name]) for name in ("log", "power")} == {
        "log": ["intercept", "slope", "r2"],
        "power": ["scale", "exponent", "r2"],
    }
    assert list(data) == ["from_step", "to_step", "log", "power"]
    assert (data["from_step"], data["to_step"], data["power"]["scale"]) == (1, 8, fit.power.scale)


BATCHES = np.array([16, 32, 64, 128, 256, 512, 1024])


@pytest.mark.parametrize("critical", [20.0, 200.0, 2000.0])
def test_planted_critical_batches_are_recovered(critical):
    fit = fits.fit_critical_batch(BATCHES, 50 * (1 + critical / BATCHES))
    assert fit == pytest.approx((50, 50 * critical, critical, 1.0), rel=1e-6)
    steps = fit.min_steps * (1 + fit.critical_batch_size / BATCHES)
    product = (steps / fit.min_steps - 1) * (steps * BATCHES / fit.min_examples - 1)
    assert product == pytest.approx(1, rel=1e-9)


def test_noise_of_five_percent_leaves_the_critical_batch_within_twelve():
    """Seven batches of five seeds: the spread of the estimate over 300 other draws was 3 percent, a quarter of 12."""
    sizes = np.repeat(BATCHES, 5)
    found = []
    for seed in range(50):
        noise = np.exp(0.05 * np.random.default_rng(1000 + seed).normal(size=len(sizes)))
        found.append(
            fits.fit_critical_batch(sizes, 50 * (1 + 200 / sizes) * noise).critical_batch_size
        )
    assert np.abs(np.array(found) / 200 - 1).max() <= 0.12
    assert np.mean(found) == pytest.approx(200, rel=0.03 * 4 / 50**0.5)


def test_the_critical_batch_is_scipys():
    steps = (
        50 * (1 + 200 / BATCHES) * np.exp(0.1 * np.random.default_rng(1).normal(size=len(BATCHES)))
    )
    fit = fits.fit_critical_batch(BATCHES, steps)
    (least, critical), _ = optimize.curve_fit(
        lambda size, least, critical: np.log(least * (1 + critical / size)),
        BATCHES.astype(float),
        np.log(steps),
        p0=(30.0, 100.0),
    )
    assert (fit.min_steps, fit.critical_batch_size) == pytest.approx((least, critical), rel=1e-5)
    assert 0.9 < fit.r2 < 1


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [
        ([16, 32], [100, 60]),
        ([16, 16, 32, 32], [100, 101, 60, 61]),
        ([16, 64, 256], [400, 400, 400]),
        ([16, 64, 256], [400, 410, 420]),
        ([16, 64, 256], [1600, 400, 100]),
    ],
    ids=["two points", "two batches", "no scaling", "worse than none", "perfect scaling"],
)
def test_no_critical_batch_where_the_steps_do_not_tell_it(sizes, steps):
    assert fits.fit_critical_batch(sizes, steps) is None


SIZES = (16, 64, 256, 1024)


def interval(values, tolerance, confidence=0.95, **options):
    return fits.limit_quantiles(fits.resample_limits(values, tolerance, **options), confidence)


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
    assert fits.resample_limits(values, 0.01, num_resamples=500, seed=7).tolist() == expected
    assert len(set(expected)) >= 3


@pytest.mark.parametrize(("num_seeds", "low", "high"), [(4, 16, 64), (6, 64, 16)])
def test_the_interval_follows_the_binomial(num_seeds, low, high):
    """Half of the seeds at 64 fail: all draws do so (1/2)^n of the time, and as often none does.

    An interval of 95% leaves 1/40 out at each end: with four seeds (1/16) it reaches that far, with six (1/64) not.
    """
    values = [(16, [1.0]), (64, [0.0, 1.0] * (num_seeds // 2))]
    for tolerance, ends, rare in ((0.999, (low, 64), 16), (0.001, (16, high), 64)):
        limits = fits.resample_limits(values, tolerance, num_resamples=20_000)
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
    limits = fits.resample_limits(values, 0.005, seed=3)
    assert np.array_equal(limits, fits.resample_limits(values, 0.005, seed=3))
    assert not np.array_equal(limits, fits.resample_limits(values, 0.005, seed=4))


def test_draws_of_two_arms_are_independent():
    values = [(16, [1.0, 1.0]), (64, [0.0, 1.0])]
    first, second = (
        fits.resample_limits(values, 0.6, seed=(0, index), num_resamples=20_000) for index in (0, 1)
    )
    shares = [np.mean(one == 64) for one in (first, second)]
    assert shares == pytest.approx([0.75, 0.75], abs=4 * (0.75 * 0.25 / 20_000) ** 0.5)
    assert np.mean((first == 64) & (second == 64)) == pytest.approx(
        0.75**2, abs=4 * (0.25 / 20_000) ** 0.5
    )
