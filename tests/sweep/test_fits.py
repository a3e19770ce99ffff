"""Fits of the distance from the start recover planted curves, and agree with other solvers."""

import dataclasses
import json

import numpy as np
import pytest
from scipy import optimize

from lbopt.sweep import _fits

EVERY_STEP = np.arange(1, 3001)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 35, 64, 1000, 1_000_000])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 64])
def test_log_spaced_steps_are_distinct_and_as_many_as_asked(num_steps, count):
    steps = _fits.log_spaced_steps(num_steps, count)
    assert len(steps) == min(count, num_steps)
    assert all(isinstance(step, int) for step in steps)
    assert list(steps) == sorted(set(steps))
    assert steps[-1:] == ((num_steps,) if count else ())
    if count >= 2:
        assert steps[0] == 1


def test_log_spaced_steps_are_even_where_whole_numbers_allow():
    steps = np.array(_fits.log_spaced_steps(1_000_000, 64))
    ratios = steps[1:] / steps[:-1]
    late = ratios[steps[:-1] >= 100]
    assert late.max() / late.min() <= 1.02  # rounding to whole numbers at 100 is 1 percent


@pytest.mark.parametrize(
    "steps", [EVERY_STEP, _fits.log_spaced_steps(3000, 64)], ids=["every step", "log-spaced"]
)
@pytest.mark.parametrize("exponent", [0.25, 0.5, 1.0, -0.5])
def test_planted_exponents_are_recovered(steps, exponent):
    distances = 1.7 * np.asarray(steps, float) ** exponent
    power = _fits.fit_diffusion(steps, distances, 1).power
    assert dataclasses.astuple(power) == pytest.approx((1.7, exponent, 1.0), abs=1e-6)


@pytest.mark.parametrize(
    "steps", [EVERY_STEP, _fits.log_spaced_steps(3000, 64)], ids=["every step", "log-spaced"]
)
@pytest.mark.parametrize("slope", [0.25, 0.5, 1.0])
def test_planted_slopes_are_recovered(steps, slope):
    log = _fits.fit_diffusion(steps, 0.3 + slope * np.log(steps), 1).log
    assert dataclasses.astuple(log) == pytest.approx((0.3, slope, 1.0), abs=1e-6)


@pytest.mark.parametrize(("exponent", "spread"), [(0.25, 0.0015), (0.5, 0.003), (1.0, 0.008)])
def test_noise_of_two_percent_leaves_the_exponent_nearly_alone(exponent, spread):
    """The tolerance is 4 times the exponent's spread in 300 other samples."""
    steps = np.array(_fits.log_spaced_steps(3000, 64))
    for seed in range(20):
        noise = 1 + 0.02 * np.random.default_rng(1000 + seed).normal(size=64)
        power = _fits.fit_diffusion(steps, 1.7 * steps**exponent * noise, 1).power
        assert power.exponent == pytest.approx(exponent, abs=4 * spread)
        assert power.r2 > 0.98


def noisy(kind, steps):
    curve = {"log": 0.5 + np.log(steps), "power": 0.4 * np.asarray(steps, float) ** 0.5}[kind]
    return curve * (1 + 0.02 * np.random.default_rng(3).normal(size=len(steps)))


@pytest.mark.parametrize("kind", ["log", "power"])
def test_the_larger_r2_names_the_curve(kind):
    fit = _fits.fit_diffusion(EVERY_STEP, noisy(kind, EVERY_STEP), 1)
    better = "log" if fit.log.r2 > fit.power.r2 else "power"
    assert better == kind
    assert abs(fit.log.r2 - fit.power.r2) > 0.01


def trapezoid(x):
    """Return half the distance between each point's neighbours; an end is its own neighbour."""
    around = np.concatenate([x[:1], x, x[-1:]])
    return (around[2:] - around[:-2]) / 2


@pytest.mark.parametrize("kind", ["log", "power"])
def test_the_log_fit_is_numpys(kind):
    steps = np.array(_fits.log_spaced_steps(3000, 40))
    distances = noisy(kind, steps)
    weights = trapezoid(np.log(steps))
    log = _fits.fit_diffusion(steps, distances, 1).log
    expected = np.polyfit(np.log(steps), distances, 1, w=np.sqrt(weights))
    assert (log.slope, log.intercept) == pytest.approx(tuple(expected), rel=1e-9)


@pytest.mark.parametrize("kind", ["log", "power"])
def test_the_power_fit_is_scipys(kind):
    steps = np.array(_fits.log_spaced_steps(3000, 40))
    distances = noisy(kind, steps)
    weights = trapezoid(np.log(steps))
    power = _fits.fit_diffusion(steps, distances, 1).power
    # curve_fit is another method: Levenberg-Marquardt on both parameters, to 1e-12.
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
    """Three decades have one slope and the last, nine tenths of the points, another."""
    kinked = lambda t: np.log(t) + np.maximum(np.log(t / 1000), 0)  # noqa: E731
    dense = np.arange(1, 10_001)
    sparse = np.array(_fits.log_spaced_steps(10_000, 200))
    slopes = [_fits.fit_diffusion(steps, kinked(steps), 1).log.slope for steps in (dense, sparse)]
    unweighted = np.polyfit(np.log(dense), kinked(dense), 1)[0]
    assert slopes[0] == pytest.approx(slopes[1], rel=0.01)
    assert abs(unweighted - slopes[0]) > 0.3


def test_only_the_window_is_fitted():
    distances = np.where(EVERY_STEP < 100, 5.0, np.sqrt(EVERY_STEP))
    distances[2000:] = np.nan
    fit = _fits.fit_diffusion(EVERY_STEP, distances, from_step=100, to_step=2000)
    assert (fit.from_step, fit.to_step) == (100, 2000)
    assert fit.power.exponent == pytest.approx(0.5, abs=1e-6)


def test_a_distance_of_zero_is_a_point_like_any_other():
    """With warmup from zero the first step moves nothing."""
    fit = _fits.fit_diffusion([1, 2, 4, 8, 16], [0.0, 1.0, 2.0, 3.0, 4.0], 1)
    assert dataclasses.astuple(fit.log) == pytest.approx((0.0, 1 / np.log(2), 1.0), abs=1e-9)


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
    assert _fits.fit_diffusion(steps, distances, from_step) is None


def test_the_json_of_a_fit():
    fit = _fits.fit_diffusion(np.array([1, 2, 4, 8]), np.array([1.0, 2.0, 3.0, 4.5]), 1)
    data = json.loads(json.dumps(dataclasses.asdict(fit)))
    assert {name: list(data[name]) for name in ("log", "power")} == {
        "log": ["intercept", "slope", "r2"],
        "power": ["scale", "exponent", "r2"],
    }
    assert list(data) == ["from_step", "to_step", "log", "power"]
    assert (data["from_step"], data["to_step"], data["power"]["scale"]) == (1, 8, fit.power.scale)
