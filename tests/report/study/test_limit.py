"""The batch-size limit and its interval, on curves whose limit is known."""

import math

import numpy as np
import pytest
from scipy import optimize, special

from lbopt.errors import UserError
from lbopt.report.study._limit import (
    CannotTell,
    CellScores,
    Limit,
    NotReached,
    estimate_limit,
    isotonic_decreasing,
    resample_limits,
)

SIZES = 16 * 2 ** np.arange(7)
FLAT_THEN_FALLING = np.array([0.986, 0.986, 0.986, 0.986, 0.980, 0.965, 0.900])
CURVES = {
    "flat": FLAT_THEN_FALLING,
    "slow": np.array([0.990, 0.989, 0.988, 0.985, 0.980, 0.972, 0.955]),
    "early": np.array([0.986, 0.986, 0.985, 0.970, 0.950, 0.920, 0.880]),
    "cliff": np.array([0.986, 0.986, 0.986, 0.986, 0.986, 0.940, 0.500]),
}
POINT = 0.01


def cells_of(values, weights=None):
    """Return the cells of values [cells, seeds] or [cells, seeds, examples]."""
    return [
        CellScores(int(size), each, weights)
        for size, each in zip(SIZES, np.asarray(values, float), strict=False)
    ]


def known_limit(scores, tolerance):
    """Return the noiseless curve's limit: its crossing, interpolated in log2 of the batch size."""
    threshold = (
        np.mean(scores[:3]) - tolerance
    )  # 16, 32, 64: the batches up to 4 times the smallest
    return 2 ** np.interp(-threshold, -np.asarray(scores), np.log2(SIZES))


def plant_accuracy(rng, accuracies=FLAT_THEN_FALLING, num_seeds=6, num_examples=360):
    """Return right or wrong for seeds and examples drawn from a population with these accuracies.

    An example is hard for all batch sizes, hard for one of them, or misjudged by one seed; a seed
    is better or worse than others.
    """
    shared = 0.5
    own = 0.2
    chance = 0.3
    of_seed = 0.02
    hardness = (
        math.sqrt(shared) * rng.standard_normal(num_examples)
        + math.sqrt(own) * rng.standard_normal((len(SIZES), 1, num_examples))
        + math.sqrt(chance) * rng.standard_normal((len(SIZES), num_seeds, num_examples))
        + math.sqrt(of_seed) * rng.standard_normal((len(SIZES), num_seeds, 1))
    )
    threshold = special.ndtri(accuracies) * math.sqrt(1 + of_seed)
    return cells_of(hardness < threshold[:, None, None])


def plant_losses(rng, accuracies=FLAT_THEN_FALLING, num_seeds=6, num_blocks=100):
    """Return losses of blocks of unequal length, from a population that gains as accuracy falls."""
    losses = (
        (1 - accuracies)[:, None, None]
        + 0.2 * rng.standard_normal(num_blocks)
        + 0.01 * rng.standard_normal((len(SIZES), 1, num_blocks))
        + 0.02 * rng.standard_normal((len(SIZES), num_seeds, num_blocks))
        + 0.004 * rng.standard_normal((len(SIZES), num_seeds, 1))
    )
    return cells_of(losses, rng.integers(50, 200, num_blocks))


def test_fit_is_isotonic_regression():
    values = np.random.default_rng(0).standard_normal((50, 6))
    for each, fitted in zip(values, isotonic_decreasing(values), strict=True):
        np.testing.assert_allclose(
            fitted, optimize.isotonic_regression(each, increasing=False).x, atol=1e-12
        )


@pytest.mark.everyday("flat-*")
@pytest.mark.parametrize("plant", [plant_accuracy, plant_losses])
@pytest.mark.parametrize("curve", CURVES)
def test_interval_covers_the_known_limit_at_its_level(curve, plant):
    """A 95 % interval misses the population's limit in 5 % of studies, within the test's error.

    With 1,000 studies and 1,000 resamples each, it covers (accuracy, loss) on the curve that falls
    slowly 93.6 and 95.4 %, early 95.0 and 95.9 %, as a cliff 96.8 and 97.1 %. With 500 studies of
    the flat curve: 3 seeds 98.2 and 97.6 %, 6 seeds 94.6 and 96.0 %, 10 seeds 94.2 and 94.4 %.
    """
    truth = known_limit(CURVES[curve], POINT)
    # With probability 0.99, this many of the studies are missed at a level of 95 %.
    num_studies, fewest, most = (200, 3, 18) if curve == "flat" else (500, 13, 38)
    missed = 0
    limits = 0
    for study in range(num_studies):
        found = estimate_limit(
            plant(np.random.default_rng((9, study)), CURVES[curve]),
            POINT,
            higher_is_better=plant is plant_accuracy,
            num_resamples=400,
            seed=study,
        )
        if isinstance(found, CannotTell):
            continue  # no claim is made; test_outcomes has the conditions for this
        limits += isinstance(found, Limit)
        missed += not found.low <= truth <= getattr(found, "high", math.inf)
    assert limits >= 0.8 * num_studies
    assert fewest <= missed <= most


def test_seeds_alone_cover_less_where_examples_differ():
    """Examples that are hard at some batch sizes add only their sampling noise to the interval."""
    cells = plant_accuracy(np.random.default_rng(0), num_seeds=10)
    whole = resample_limits(cells, POINT)
    seeds = resample_limits(cells_of([cell.scores for cell in cells]), POINT)
    assert np.log2(whole).std() > 1.15 * np.log2(seeds).std()


def test_hardness_that_all_batch_sizes_share_does_not_widen_the_interval():
    cells = plant_losses(np.random.default_rng(0))
    hardness = np.random.default_rng(1).standard_normal(cells[0].values.shape[1])
    harder = [
        CellScores(cell.global_batch_size, cell.values + hardness, cell.weights) for cell in cells
    ]
    limits, same = (
        resample_limits(given, POINT, higher_is_better=False) for given in (cells, harder)
    )
    np.testing.assert_allclose(limits, same)


def test_noise_of_one_seed_does_not_move_the_limit():
    """If the first mean below the smallest batch's counted, the limit would fall from 256 to 16."""
    means = np.array([0.985, 0.980, 0.984, 0.984, 0.980, 0.965, 0.90])
    scores = np.broadcast_to(means[:, None], (7, 6)) + 0.002 * np.array([-2, -1, 0, 0, 1, 2])
    noisy = scores.copy()
    noisy[1, 0] -= 0.045
    first_below = [np.argmax(each.mean(1) < each[0].mean() - POINT) for each in (scores, noisy)]
    assert first_below == [5, 1]

    before, after = (estimate_limit(cells_of(each), POINT) for each in (scores, noisy))
    assert abs(math.log2(after.global_batch_size / before.global_batch_size)) < 0.25
    assert after.low <= before.global_batch_size <= after.high


def outcome(scores, spread=0.002, num_seeds=6, sizes=slice(None)):
    noise = spread * np.linspace(-1, 1, num_seeds)
    values = np.asarray(scores)[:, None] + noise
    return estimate_limit([cells_of(values)[index] for index in np.arange(7)[sizes]], POINT)


def test_outcomes():
    limit = outcome(FLAT_THEN_FALLING)
    assert isinstance(limit, Limit)
    assert limit.low < limit.global_batch_size < limit.high < 512
    assert limit.fit.reference == pytest.approx(0.986)

    # Only the largest batch may exceed the limit.
    flat = outcome([0.98] * 6 + [0.972])
    assert isinstance(flat, NotReached)
    assert flat.low > 256

    falling = [0.98, 0.96, 0.94, 0.92, 0.90, 0.88, 0.86]
    unknown = {
        "wide_interval": outcome(FLAT_THEN_FALLING, spread=0.2),
        "few_seeds": outcome(FLAT_THEN_FALLING, num_seeds=2),
        "few_batch_sizes": outcome(FLAT_THEN_FALLING, sizes=slice(3)),
        "no_plateau": outcome(falling),
        "coarse_batch_sizes": outcome(FLAT_THEN_FALLING, sizes=[0, 1, 2, 6]),
    }
    assert all(isinstance(found, CannotTell) for found in unknown.values())
    assert [found.reason for found in unknown.values()] == list(unknown)


def test_a_limit_near_the_largest_batch_has_no_upper_end():
    found = outcome([0.98] * 6 + [0.9695], spread=0.004)
    assert isinstance(found, Limit)
    assert 512 < found.global_batch_size < 1024
    assert found.high == math.inf


@pytest.mark.parametrize(
    ("cells", "field"),
    [
        ([], "cells"),
        (cells_of(np.ones((7, 3)))[::-1], "cells"),
        (cells_of(np.full((7, 3), np.inf)), "cells.values"),
        ([*cells_of(np.ones((6, 3))), CellScores(1024, np.ones((3, 5)))], "cells.values"),
    ],
)
def test_scores_that_cannot_be_used_are_refused(cells, field):
    with pytest.raises(UserError) as raised:
        estimate_limit(cells, POINT)
    assert raised.value.field == field
