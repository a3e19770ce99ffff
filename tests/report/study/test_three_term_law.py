"""The three-term law: planted numbers are recovered, and losses that do not tell it are refused."""

import numpy as np
import pytest
import synthetic
from synthetic import Truth

from lbopt.report.study import read_study
from lbopt.report.study._critical_measures import three_terms
from lbopt.report.study._three_term_law import NoLaw, fit_three_term_law

SIZES = np.repeat([16, 32, 64, 128, 256, 512], 4)
STEPS = np.tile([250, 500, 1000, 4000], 6)
NUMBERS = ("floor", "batch_coefficient", "batch_exponent", "step_coefficient", "step_exponent")
TRUTHS = [(1.5, 4.0, 0.6, 30.0, 0.5), (0.2, 20.0, 1.1, 6.0, 0.35)]


def losses(truth, sizes=SIZES, steps=STEPS):
    floor, batch, batch_exponent, step, step_exponent = truth
    return floor + batch / sizes**batch_exponent + step / steps**step_exponent


@pytest.mark.parametrize("truth", TRUTHS)
def test_planted_numbers_are_recovered(truth):
    law = fit_three_term_law(SIZES, STEPS, losses(truth))
    assert [getattr(law, name) for name in NUMBERS] == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("truth", TRUTHS)
def test_intervals_of_the_exponents_cover_planted_ones_under_noise(truth):
    """At 95 %, 19 of 20 are expected; by chance fewer than 15 are in one of 3000 such tests."""
    covered = np.zeros(2)
    for seed in range(20):
        noise = np.exp(0.003 * np.random.default_rng(seed).normal(size=len(SIZES)))
        law = fit_three_term_law(SIZES, STEPS, losses(truth) * noise)
        assert law.batch_exponent == pytest.approx(truth[2], rel=0.15)
        assert law.step_exponent == pytest.approx(truth[4], rel=0.15)
        covered += (
            abs(law.batch_exponent - truth[2]) <= law.batch_exponent_error,
            abs(law.step_exponent - truth[4]) <= law.step_exponent_error,
        )
    assert covered.min() >= 15


def test_the_best_batch_has_the_least_loss_of_its_examples():
    law = fit_three_term_law(SIZES, STEPS, losses(TRUTHS[0]))
    sizes = np.geomspace(1, 4096, 2001)
    found = losses(TRUTHS[0], sizes, 1e5 / sizes)
    assert law.best_batch(1e5) == pytest.approx(sizes[np.argmin(found)], rel=0.01)


EPOCHS = np.array([16, 32, 64, 128, 256, 512, 1000])
NOISE = np.exp(0.01 * np.random.default_rng(0).normal(size=len(SIZES)))


@pytest.mark.parametrize(
    ("sizes", "steps", "found", "reason"),
    [
        (SIZES[:8], STEPS[:8], losses(TRUTHS[0])[:8], "few_losses"),
        (SIZES[::5], STEPS[::5], losses(TRUTHS[0])[::5], "few_losses"),
        (EPOCHS, np.ceil(20480 / EPOCHS), losses(TRUTHS[0], EPOCHS, 20480 / EPOCHS), "same"),
        (SIZES, STEPS, (1.5 + 30 / STEPS**0.5) * NOISE, "undetermined"),
        (SIZES, STEPS, (1.5 + 4 / SIZES**0.6) * NOISE, "undetermined"),
        (SIZES, STEPS, 1.5 * NOISE, "undetermined"),
        (SIZES, STEPS, np.full(len(SIZES), 1.5), "undetermined"),
    ],
    ids=[
        "two batch sizes",
        "five points",
        "equal epochs",
        "no term of the batch",
        "no term of the steps",
        "noise",
        "constant",
    ],
)
def test_losses_that_do_not_determine_the_law_are_refused(sizes, steps, found, reason):
    law = fit_three_term_law(sizes, steps, found)
    assert isinstance(law, NoLaw)
    assert law.reason.startswith(reason)


def test_a_study_gives_the_losses_of_its_cells_and_of_its_shorter_runs():
    """The best candidate of each length counts, but one that diverged does not."""
    config, rows = synthetic.make_study({"a": Truth((0.9,) * 3)}, method="hyperband")
    seen = set()
    for row in rows:
        length = (row["global_batch_size"], row["steps"], row["phase"] == "final")
        row["validation_loss"] = float(losses(TRUTHS[0], *length[:2])) + 0.1 * (length in seen)
        if row["phase"] == "final":
            continue
        seen.add(length)
    last = {row["steps"]: row for row in rows if row["phase"] == "search"}
    for row in last.values():
        row |= {"diverged": True, "validation_loss": 0.1}

    study = read_study(config, rows)
    law = study.arms[0].law
    assert law.points == 9
    assert [getattr(law, name) for name in NUMBERS] == pytest.approx(TRUTHS[0], rel=1e-4)
    assert "1.5 + 4 / batch^0.60 + 30 / steps^0.50 (exponents within" in three_terms(study)


@pytest.mark.parametrize(("stops", "why"), [(True, "runs stop at"), (False, "the steps follow")])
def test_a_study_says_why_there_is_no_law(stops, why):
    truth = Truth((0.9,) * 3, steps_to_target=(200.0, 100.0, 60.0))
    study = read_study(*synthetic.make_study({"a": truth, "b": truth}, stops=stops))
    assert f"not fitted ({why}" in three_terms(study)
    assert three_terms(study).endswith("for every arm.")
