"""The power calculation agrees with simulated studies, and is what a study prints."""

import math
import re
import types

import numpy as np
import pytest
import synthetic
from refusal import refused
from scipy import stats
from synthetic import Truth, make_study

from lbopt.config import Arm, SweepConfig
from lbopt.report.study import (
    decision_lines,
    detectable_difference,
    read_study,
    score_deviation,
    seeds_needed,
)
from lbopt.report.study._claim_limits import _needed_seeds
from lbopt.report.study._critical_batch import detectable_ratio, resample_critical_batches
from lbopt.report.study._decision import _Assumed, _differences, _needed, seeds_clause
from lbopt.report.study._metric import ACCURACY, PERPLEXITY, metric_named
from lbopt.report.study._statistics import ahead_of
from lbopt.report.study._steps_to_target import CellSteps
from lbopt.sweep import ExampleScores, trial_identity

STUDIES = 500
WITHIN = 3 * math.sqrt(0.8 * 0.2 / STUDIES)
"""Three standard errors of a share of simulated studies."""
NUM_EXAMPLES = 400


@pytest.mark.parametrize(("seeds", "comparisons"), [(2, 1), (3, 4), (6, 4), (20, 1)])
def test_scipys_welch_test_sees_the_difference_with_the_stated_power(seeds, comparisons):
    difference = detectable_difference(seeds, 0.7, comparisons)
    rng = np.random.default_rng(seeds)
    ours = rng.normal(difference, 0.7, (40_000, seeds))
    theirs = rng.normal(0.0, 0.7, (40_000, seeds))
    p = stats.ttest_ind(ours, theirs, axis=1, equal_var=False).pvalue
    assert np.mean(p <= 0.05 / comparisons) == pytest.approx(0.8, abs=3 * 0.002)


def scores_of(rng, chances, seeds):
    """Return the accuracy of each seed on test examples that all arms share."""
    return (rng.random((seeds, NUM_EXAMPLES)) < chances).mean(axis=1).tolist()


@pytest.mark.parametrize("arms", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_a_report_tells_arms_apart_that_differ_by_the_detectable_difference(arms):
    """A third of the test examples are hard for all arms, and one arm is worse on these.

    The others are equally good. The best of several is that of the luckiest seeds, which is why the
    calculation is a lower bound for more than two arms.
    """
    seeds = 6
    rng = np.random.default_rng(arms)
    chances = np.where(np.arange(NUM_EXAMPLES) % 3 == 0, 0.7, 0.99)
    of_examples = math.sqrt(np.mean(chances * (1 - chances)))
    deviation = score_deviation(0.0, of_examples, NUM_EXAMPLES)
    difference = detectable_difference(seeds, deviation, arms - 1)
    worse = chances - difference * (chances == 0.7) / np.mean(chances == 0.7)

    seen = 0
    for _ in range(STUDIES):
        found = [scores_of(rng, chances, seeds) for _ in range(arms - 1)]
        found.append(scores_of(rng, worse, seeds))
        best = max(range(arms), key=lambda place: np.mean(found[place]))
        others = [place for place in range(arms) if place != best]
        told = ahead_of(ACCURACY, found[best], [found[place] for place in others])
        seen += best != arms - 1 and bool(told[others.index(arms - 1)].apart)
    if arms == 2:
        assert seen / STUDIES == pytest.approx(0.8, abs=WITHIN)
    else:
        assert 0.8 - WITHIN <= seen / STUDIES <= 0.97


@pytest.mark.parametrize("comparisons", [1, 6])
def test_the_seeds_needed_are_the_fewest_that_see_a_difference(comparisons):
    for seeds in (2, 3, 7, 40):
        difference = detectable_difference(seeds, 0.3, comparisons)
        assert seeds_needed(difference * 1.0001, 0.3, comparisons) == seeds
        assert seeds_needed(difference * 0.9999, 0.3, comparisons) == seeds + 1
    assert seeds_needed(1e-6, 1.0) is None


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ((1, 1.0), "num_seeds", 1),
        ((5, 0.0), "deviation", 0.0),
        ((5, 1.0, 0), "num_comparisons", 0),
        ((5, 1.0, 1, 1.0), "power", 1.0),
        ((5, 1.0, 1, 0.8, 0.0), "family_wise", 0.0),
    ],
)
def test_what_cannot_be_calculated_is_refused(arguments, field, value):
    with refused(field, value, "value"):
        detectable_difference(*arguments)


def test_the_seeds_that_are_said_tell_limits_a_factor_of_two_apart_with_the_stated_power():
    """As in the bootstrap: a limit is further if it is larger in 95 % of the resamples."""
    rng = np.random.default_rng(0)
    seeds = 5
    error = 1.3  # of the ratio's binary logarithm
    resampled = 2 ** rng.normal(0.4, error, 100_000)
    study = types.SimpleNamespace(config=types.SimpleNamespace(final_seeds=range(seeds)))
    said = _needed_seeds(study, resampled, np.ones_like(resampled))
    needed = int(re.search(r"with power 0.8 by some (\d+) seeds or more, and there are 5", said)[1])

    error *= math.sqrt(seeds / needed)
    found = rng.normal(1.0, error, 40_000)
    further = stats.norm.sf(0.0, found, error)
    assert np.mean(further >= 0.95) == pytest.approx(0.8, abs=0.02)
    narrow = 2 ** rng.normal(0.0, 1 / 2.6, 100_000)
    assert _needed_seeds(study, narrow, np.ones_like(narrow)).endswith("0.8 by these seeds")


def two_arms(**fields):
    arms = (Arm("a"), Arm("b"))
    return SweepConfig(arms=arms, global_batch_sizes=(16, 64, 256), **fields)


def test_without_a_pilot_the_assumptions_are_named():
    told, fall, needed, source = decision_lines(two_arms(), "accuracy", 400)
    deviation = 100 * math.hypot(0.003, math.sqrt(0.95 * 0.05 / 400))
    assert f"if they differ by {detectable_difference(5, deviation):.3g} points (Welch" in told
    half = stats.t.ppf(0.975, 8) * deviation * math.sqrt((1 + 1 / 2) / 5)
    assert f"to within {half:.3g} points (95 % interval" in fall
    assert f"of 1 point, the study's limit_points, takes {seeds_needed(1.0, deviation)} " in needed
    assert f"assumed to be {deviation:.3g} points: 0.3 points of their own" in source
    assert "400 test examples at accuracy 95.00 %; --pilot=WORKDIR" in source


def test_a_pilots_spread_is_taken_and_rescaled_to_the_test_examples():
    """Seeds that differ by single examples alone have half the spread on four times as many."""
    config, rows = synthetic.make_study({"a": Truth((0.9, 0.9, 0.9)), "b": Truth((0.9, 0.9, 0.9))})
    rng = np.random.default_rng(0)
    examples = {}
    for row in rows:
        if row["phase"] == "final":
            right = rng.random(4000) < 0.9
            row["test_accuracy"] = float(right.mean())
            examples[trial_identity(row)] = ExampleScores(
                "accuracy", right.astype(float), np.ones(4000)
            )
    pilot = read_study(config, rows, examples)

    def told(num_test_examples):
        first, *_, source = decision_lines(two_arms(), "accuracy", num_test_examples, pilot)
        sizes = first.partition("differ by ")[2].partition(" (Welch")[0]
        return [float(part.split()[0]) for part in sizes.replace(" and", ",").split(", ")], source

    same, source = told(4000)
    assert source.endswith("is that of the pilot, the median over its arms.")
    # Five seeds may by chance differ less than the noise of their examples does.
    of_examples = 0.3 / math.sqrt(4000)
    spreads = [np.std([r["test_accuracy"] for r in rows if at(r, arm)], ddof=1) for arm in "ab"]
    spread = np.median([max(one, of_examples) for one in spreads])
    assert same[0] == pytest.approx(100 * detectable_difference(5, spread), rel=0.02)
    fewer, source = told(1000)
    assert fewer == pytest.approx([2 * one for one in same], rel=0.25)
    assert source.endswith("for 1,000 test examples instead of 4,000.")


def test_a_pilot_without_a_spread_is_said_to_have_none():
    truth = Truth((0.9, 0.9, 0.9))
    for changes in ({"seeds": (1,)}, {}):
        config, rows = synthetic.make_study({"a": truth, "b": truth}, **changes)
        rows = [synthetic.diverge(row) if row["seed"] == 1 else row for row in rows]
        lines = decision_lines(two_arms(), "accuracy", 400, read_study(config, rows))
        assert lines[:-1] == decision_lines(two_arms(), "accuracy", 400)[:-1]
        assert "assumed to be" in lines[-1]
        assert "the pilot has none: no cell of it has 2 or more final seeds" in lines[-1]
        assert "--pilot" not in lines[-1]


@pytest.mark.parametrize(
    ("metric", "base", "unit", "text"),
    [
        ("accuracy", 0.9, 1.0, "0.5 points"),
        ("perplexity", 20.0, math.log(1.01), f"{100 * math.expm1(0.5):.3g} percent"),
        ("loss", -2.0, 0.02, "25 percent"),
    ],
)
def test_differences_and_seeds_are_in_the_metrics_unit(metric, base, unit, text):
    """Half a unit of the scale of means is `text`; a point or a percent is `unit` there."""
    metric = metric_named(metric)
    assert _differences(metric, [_Assumed(None, 0.25, base)], 2.0) == text
    assert _needed(metric, 1.0, _Assumed(None, unit, base), 1) == seeds_needed(1.0, 1.0)


def test_a_loss_of_zero_has_no_percent():
    of_zero = _Assumed(None, 0.1, 0.0)
    assert _needed(metric_named("loss"), 1.0, of_zero, 1) is None
    assert _differences(metric_named("loss"), [of_zero], 2.0).endswith(" percent")


def at(row, arm):
    return (row["arm"], row["global_batch_size"], row["phase"]) == (arm, 16, "final")


def test_studies_without_a_comparison_say_so():
    (alone,) = decision_lines(SweepConfig(arms=(Arm(),), global_batch_sizes=(1,)), "accuracy", 9)
    assert "none are compared" in alone
    (seed,) = decision_lines(two_arms(final_seeds=(1,)), "accuracy", 9)
    assert "give 2 or more final seeds" in seed
    config = two_arms()
    config.train.target_metric = "eval/accuracy"
    config.train.stop_at_target = True
    target = decision_lines(config, "accuracy", 9)[0]
    assert "medians of 5 seeds" in target
    assert "no scores are compared" in target


def test_the_spread_of_steps_comes_from_a_pilot():
    config = two_arms()
    config.global_batch_sizes = (16, 64, 256)
    config.train.target_metric = "eval/accuracy"
    config.train.stop_at_target = True
    *_, assumed = decision_lines(config, "accuracy", 9)
    assert assumed.startswith("The steps of seeds are assumed to vary by 15 %; --pilot=WORKDIR")

    made, rows = make_study({"a": Truth((0.9,) * 3, steps_to_target=(40.0, 20.0, 10.0))})
    factors = dict(zip(range(1, 6), (0.8, 0.9, 1.0, 1.1, 1.2), strict=True))
    *_, same = decision_lines(config, "accuracy", 9, read_study(made, rows))
    assert "assumed to vary by 15 %; the pilot has no spread of them" in same

    for row in rows:
        if row["phase"] == "final":
            row["steps_to_target"] *= factors[row["seed"]]
    spread = 100 * np.std(np.log(list(factors.values())), ddof=1)
    *_, measured = decision_lines(config, "accuracy", 9, read_study(made, rows))
    assert f"as in the pilot, by {spread:.2g} %" in measured
    assert detectable_ratio((16, 64, 256), 2, 0.8, 0.8) == math.inf


def steps_of(generator, critical, deviation, seeds=5):
    sizes = np.array([16, 64, 256, 1024])
    noise = np.exp(deviation * generator.normal(size=(len(sizes), seeds)))
    steps = 100 * (1 + critical / sizes)[:, None] * noise
    return [CellSteps(size, row, 10**6) for size, row in zip(sizes, steps, strict=True)]


def test_critical_batches_of_the_detectable_ratio_are_told_apart_as_often_as_said():
    """The bootstrap of the median of five seeds is wide, so equal ones are rarely told apart."""
    ratio = detectable_ratio((16, 64, 256, 1024), 5, 0.15, 0.8)
    generator = np.random.default_rng(3)
    shares = {1.0: [], ratio: []}
    for factor, found in shares.items():
        for study in range(120):
            ours, theirs = (
                resample_critical_batches(
                    steps_of(generator, 128 * more, 0.15), num_resamples=200, seed=(study, place)
                ).critical_batch_size
                for place, more in enumerate((factor**0.5, factor**-0.5))
            )
            found.append(np.mean(ours > theirs) >= 0.95)
    assert 0.7 < np.mean(shares[ratio]) < 0.95
    assert np.mean(shares[1.0]) < 0.08


def test_the_seeds_of_a_margin_follow_from_the_spread_and_not_from_the_difference():
    ours = [0.95, 0.96, 0.97]
    spread = 1.0  # points
    for shift in (0.0, 0.005):
        theirs = [one - shift for one in ours]
        assert seeds_clause(ACCURACY, 1.0, [(ours, theirs)], 3) == (
            "to see a difference of 1 point with power 0.8 takes "
            f"{seeds_needed(1.0, spread, 3)} seeds, and there are 3"
        )
    wide = seeds_clause(ACCURACY, 1.0, [(ours, ours), ([0.9, 0.92, 0.94], ours)], 1)
    assert f"takes {seeds_needed(1.0, math.sqrt(2.5))} seeds" in wide  # the widest pair
    assert "these seeds show a difference of 9 points" in seeds_clause(
        ACCURACY, 9.0, [(ours, ours)], 1
    )
    assert seeds_clause(ACCURACY, 1.0, [([0.9, 0.9], [0.9, 0.9])], 1) == ""
    assert seeds_clause(PERPLEXITY, 1.0, [([math.inf, 9.0], [9.0, 9.1])], 1) == ""
