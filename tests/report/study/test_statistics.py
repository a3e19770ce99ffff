"""The fit of the critical batch recovers planted values, and agrees with another solver."""

import dataclasses

import numpy as np
import pytest
from scipy import optimize

from lbopt.report.study._statistics import fit_critical_batch

BATCHES = np.array([16, 32, 64, 128, 256, 512, 1024])


@pytest.mark.parametrize("critical", [20.0, 200.0, 2000.0])
def test_planted_critical_batches_are_recovered(critical):
    fit = fit_critical_batch(BATCHES, 50 * (1 + critical / BATCHES))
    assert dataclasses.astuple(fit) == pytest.approx((50, 50 * critical, critical, 1.0), rel=1e-6)
    steps = fit.min_steps * (1 + fit.critical_batch_size / BATCHES)
    product = (steps / fit.min_steps - 1) * (steps * BATCHES / fit.min_examples - 1)
    assert product == pytest.approx(1, rel=1e-9)


def test_noise_of_five_percent_leaves_the_critical_batch_within_twelve():
    """Seven batches of five seeds: the estimate varied by 3 percent over 300 other samples."""
    sizes = np.repeat(BATCHES, 5)
    found = []
    for seed in range(50):
        noise = np.exp(0.05 * np.random.default_rng(1000 + seed).normal(size=len(sizes)))
        found.append(fit_critical_batch(sizes, 50 * (1 + 200 / sizes) * noise).critical_batch_size)
    assert np.abs(np.array(found) / 200 - 1).max() <= 0.12
    assert np.mean(found) == pytest.approx(200, rel=0.03 * 4 / 50**0.5)


def test_the_critical_batch_is_scipys():
    steps = (
        50 * (1 + 200 / BATCHES) * np.exp(0.1 * np.random.default_rng(1).normal(size=len(BATCHES)))
    )
    fit = fit_critical_batch(BATCHES, steps)
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
    assert fit_critical_batch(sizes, steps) is None


# hlzhang109/critical-batch-size@c5b509d, plots/chinchilla.ipynb: steps to the target loss of five
# language models at 64, 128, ... 16384 sequences, and the fits of log S = log(a + b / B) there.
ZHANG = {
    "85M": (
        (46000, 23000, 13282, 7000, 3840, 2528, 1917, 1600, 1600),
        (1293.827, 2834258.09),
    ),
    "151M": (
        (96000, 49000, 24000, 12000, 7128, 4350, 2940, 2400, 2300),
        (1752.421, 5677478.78),
    ),
    "302M": (
        (196000, 90000, 46000, 23400, 13300, 7224, 4980, 3400, 2879),
        (2095.350, 11383269.89),
    ),
    "604M": (
        (311000, 166000, 81000, 37440, 21320, 11400, 7199, 4700, 3800),
        (2459.927, 19449688.59),
    ),
    "1200M": (
        (642000, 331000, 176000, 94000, 46500, 25000, 15360, 8900, 6500),
        (3897.307, 43381130.22),
    ),
}


@pytest.mark.parametrize("size", ZHANG)
def test_published_fits_of_language_models_are_reproduced(size):
    steps, (least, slope) = ZHANG[size]
    fit = fit_critical_batch([64 * 2**k for k in range(9)], steps)
    assert fit.min_steps == pytest.approx(least, rel=1e-5)
    assert fit.min_examples == pytest.approx(slope, rel=1e-5)
