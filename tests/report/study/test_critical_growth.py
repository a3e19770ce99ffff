"""The growth of the critical batch: planted exponents are recovered from evaluations."""

import math

import numpy as np
import pytest
import synthetic
from synthetic import Truth

from lbopt.report.study import read_study
from lbopt.report.study._critical_growth import Evaluated, measure_growth
from lbopt.report.study._figure_growth import growth

BATCHES = (2, 16, 128, 1024)
SEEDS = 5
EXAMPLES = 8000
"""Examples that a batch of almost nothing takes to the target."""


def loss_after(examples):
    return examples**-0.2


def evaluated(exponent, *, noise=0.0, every=50, batches=BATCHES, seed=7):
    """Return runs whose critical batch is 200 (examples / EXAMPLES)^exponent.

    `noise` is the standard deviation of the steps to each of ten losses, as a share of them; a
    tenth of it is added to every evaluation.
    """
    noises = np.random.default_rng(seed)
    small = np.geomspace(20, 4 * EXAMPLES, 2000)
    knots = np.geomspace(20, 4 * EXAMPLES, 10)
    cells = []
    for batch in batches:
        runs = []
        for _ in range(SEEDS):
            shift = np.interp(np.log(small), np.log(knots), noise * noises.normal(size=10))
            overhead = 1 + batch / (200 * (small / EXAMPLES) ** exponent)
            steps = np.maximum.accumulate(small * overhead * np.exp(shift) / batch)
            grid = np.arange(1, 60000 // every) * every / batch
            losses = np.interp(grid, steps, loss_after(small))
            runs.append((grid, losses * (1 + 0.1 * noise * noises.normal(size=len(grid)))))
        cells.append(Evaluated(batch, tuple(runs)))
    return cells


def grown(cells, **options):
    return measure_growth(cells, loss_after(EXAMPLES), lower_is_better=True, **options)


@pytest.mark.parametrize("exponent", [0.0, 0.4, 0.8])
def test_a_planted_exponent_is_recovered_and_intervals_cover_it(exponent):
    """A bootstrap of five seeds is known to be a little short of 95 %."""
    found = [
        grown(evaluated(exponent, noise=0.1, seed=seed), num_resamples=200) for seed in range(30)
    ]
    exponents = np.array([one.exponent for one in found])
    covered = np.mean([one.interval[0] < exponent < one.interval[1] for one in found])
    assert exponents.mean() == pytest.approx(exponent, abs=3 * exponents.std() / 30**0.5 + 0.02)
    assert covered >= 0.8
    for one in found[0].milestones:
        planted = 200 * (one.examples / EXAMPLES) ** exponent
        assert one.critical_batch.critical_batch_size == pytest.approx(planted, rel=0.3)


def test_the_examples_are_those_of_the_first_time_that_a_score_is_reached():
    """With noise that is earlier than where the median score is."""
    cells = evaluated(0.4, noise=0.1)
    for one in grown(cells).milestones:
        first = [steps[np.flatnonzero(losses <= one.value)[0]] for steps, losses in cells[0].runs]
        assert one.examples == pytest.approx(np.median(first) * BATCHES[0], abs=50)


def test_without_noise_the_milestones_are_those_planted():
    """The smallest batch takes 1 + 2 / B_c times the examples of a batch of almost nothing."""
    found = grown(evaluated(0.5, every=10))
    assert found.exponent == pytest.approx(0.5, abs=0.02)
    whole = EXAMPLES * (1 + 2 / 200)
    assert [one.examples for one in found.milestones] == pytest.approx(
        [whole / 8, whole / 4, whole / 2, whole], rel=0.01
    )
    assert found.milestones[-1].value == loss_after(EXAMPLES)


def test_a_score_that_rises_is_read_like_a_loss_that_falls():
    cells = evaluated(0.4)
    turned = [
        Evaluated(
            cell.global_batch_size,
            tuple((steps, 1 - losses) for steps, losses in cell.runs),
        )
        for cell in cells
    ]
    found = measure_growth(turned, 1 - loss_after(EXAMPLES), lower_is_better=False)
    assert found.exponent == pytest.approx(grown(cells).exponent, rel=1e-6)


def test_batch_sizes_that_miss_the_target_count_for_no_milestone():
    cells = evaluated(0.4)
    last = cells[-1]
    cut = tuple((steps, np.maximum(losses, 0.2)) for steps, losses in last.runs)
    missing = grown([*cells[:-1], Evaluated(last.global_batch_size, cut)])
    assert missing == grown(cells[:-1])


@pytest.mark.parametrize(
    "cells",
    [
        evaluated(0.4, every=4000),
        evaluated(0.4, batches=(2, 8)),
        [Evaluated(cell.global_batch_size, cell.runs[:1]) for cell in evaluated(0.4)],
    ],
    ids=["targets before the first evaluation", "two batch sizes", "one seed"],
)
def test_what_the_evaluations_do_not_tell_is_not_fitted(cells):
    assert grown(cells) is None


def test_evaluations_that_are_not_finite_reach_nothing():
    cells = evaluated(0.4)
    steps, losses = cells[0].runs[0]
    broken = np.where(np.arange(len(losses)) == 3, math.nan, losses)
    runs = ((steps, broken), *cells[0].runs[1:])
    found = grown([Evaluated(cells[0].global_batch_size, runs), *cells[1:]])
    assert found.exponent == pytest.approx(grown(cells).exponent, abs=0.05)


def test_a_seed_that_diverged_at_once_never_reaches_a_target():
    cells = evaluated(0.4)
    empty = (np.empty(0), np.empty(0))
    lost = [Evaluated(cell.global_batch_size, (empty, *cell.runs[1:])) for cell in cells]
    found = grown(lost)
    assert found.exponent == pytest.approx(grown(cells).exponent, abs=0.1)
    assert found.milestones[0].critical_batch.intervals is not None


def planted_study():
    """Return a study whose runs have evaluations of the accuracy 1 - loss."""
    target = 1 - loss_after(EXAMPLES)
    truth = Truth((0.9,) * len(BATCHES), steps_to_target=(1.0,) * len(BATCHES))
    config, rows = synthetic.make_study({"grows": truth, "lacks": truth}, sizes=BATCHES, stops=True)
    config["train"]["target_value"] = target
    runs = {cell.global_batch_size: list(cell.runs) for cell in evaluated(0.4)}
    for row in rows:
        if (row["arm"], row["phase"]) == ("grows", "final"):
            steps, losses = runs[row["global_batch_size"]].pop()
            columns = {"step": steps, "validation_accuracy": 1 - losses}
            row["evaluations"] = {name: column.tolist() for name, column in columns.items()}
    return config, rows


def test_the_growth_is_in_the_summary_the_claims_and_a_figure(tmp_path):
    config, rows = planted_study()
    summary = synthetic.summarize(config, rows)
    grows, lacks = (arm["critical_growth"] for arm in summary["arms"])
    assert lacks is None
    assert grows["exponent"] == pytest.approx(0.4, abs=0.05)
    assert [one["share"] for one in grows["milestones"]] == [1 / 8, 1 / 4, 1 / 2, 1]
    (claim,) = [one for one in summary["claims"] if one["claim"] == "critical_batch_grows"]
    assert claim["verdict"] == "held"

    section = growth(read_study(config, rows), tmp_path)
    assert [row[0] for row in section.rows] == ["grows"] * 4
    assert (tmp_path / "critical_growth.png").is_file()
