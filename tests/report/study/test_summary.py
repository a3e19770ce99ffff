"""The summary states what the records show, including unwelcome results."""

import json
import math
import pathlib
import time

import numpy as np
import pytest
import synthetic
from synthetic import SIZES, Truth, diverge, legw, summarize

from lbopt.cli import call_get_config
from lbopt.config import SearchConfig
from lbopt.data import _digits
from lbopt.report.study import read_study
from lbopt.report.study._arm_limit import failure
from lbopt.report.study._limit import CellScores, estimate_limit
from lbopt.report.study._metric import ACCURACY, PERPLEXITY
from lbopt.sweep import ExampleScores, _fits, trial_identity
from lbopt.sweep.search import edge_of


def only(truth, **options):
    """Return the summary of a study's single arm."""
    return summarize(*synthetic.make_study({"arm": truth}, **options))["arms"][0]


def cells_of(truth, **options):
    """Return the cells of a study's single arm."""
    return read_study(*synthetic.make_study({"arm": truth}, **options)).arms[0].cells


# ---- limits


def shifted(means, shifts):
    """Return the cells of seeds that are shifted from a mean."""
    return [
        CellScores(size, np.array([mean + shift for shift in shifts]))
        for size, mean in zip(SIZES, means, strict=True)
    ]


def assert_is(found, expected):
    assert found["outcome"] == "limit"
    ends = [found[name] for name in ("global_batch_size", "low", "high")]
    assert ends == pytest.approx([expected.global_batch_size, expected.low, expected.high])


def test_the_limit_of_an_arm_is_that_of_its_seeds():
    truth = Truth((0.98, 0.975, 0.9), spread=0.02)
    cells = shifted(truth.test, [-0.01, -0.005, 0.0, 0.005, 0.01])
    arm = only(truth)
    assert_is(arm["limit"], estimate_limit(cells, 0.01, seed=(0, 0)))
    assert not arm["limit_over_examples"]
    fit = arm["limit"]["fit"]
    assert (fit["threshold"], fit["first_past"]) == (pytest.approx(0.9675), 256)


def test_the_order_in_which_trials_ended_does_not_matter():
    config, rows = synthetic.make_study({"arm": Truth((0.98, 0.975, 0.9), spread=0.02)})
    assert summarize(config, rows[::-1])["arms"] == summarize(config, rows)["arms"]


def test_the_limit_of_a_perplexity_is_in_percent_of_it():
    truth = Truth((100.0, 104.0, 130.0), spread=0.05)
    found = only(truth, perplexity=True)["limit"]
    losses = [
        CellScores(size, np.log(value * (1 - np.array([-0.025, -0.0125, 0.0, 0.0125, 0.025]))))
        for size, value in zip(SIZES, truth.test, strict=True)
    ]
    tolerance = math.log(1.05)
    expected = estimate_limit(losses, tolerance, higher_is_better=False, seed=(0, 0))
    assert_is(found, expected)


@pytest.fixture
def study_with_examples():
    """Return config, rows and the scores of 400 test examples; wrong ones depend on the batch."""
    config, rows = synthetic.make_study({"arm": Truth((0.98, 0.975, 0.9), spread=0.0)})
    examples = {}
    for row in rows:
        if row["phase"] == "final":
            wrong = round(400 * (1 - row["test_accuracy"]))
            right = np.roll(np.arange(400) >= wrong, 50 * SIZES.index(row["global_batch_size"]))
            examples[trial_identity(row)] = ExampleScores(
                "accuracy", right.astype(float), np.ones(400)
            )
    return config, rows, examples


def test_where_test_examples_are_recorded_the_interval_is_over_them_too(study_with_examples):
    config, rows, examples = study_with_examples
    (arm,) = read_study(config, rows, examples).arms
    (alone,) = read_study(config, rows).arms
    assert (arm.limit_over_examples, alone.limit_over_examples) == (True, False)
    assert arm.limit.global_batch_size == pytest.approx(alone.limit.global_batch_size)
    assert alone.limit.low == pytest.approx(alone.limit.high)
    assert arm.limit.low < 0.9 * arm.limit.global_batch_size

    examples.popitem()
    (arm,) = read_study(config, rows, examples).arms
    assert not arm.limit_over_examples


@pytest.mark.parametrize("recorded", [True, False])
def test_all_examples_are_wrong_in_a_run_that_diverged(recorded, study_with_examples):
    """This holds whether or not the outputs are finite and the record has scores."""
    config, rows, examples = study_with_examples
    last = rows[-1]
    rows[-1] = diverge(last)
    if not recorded:
        del examples[trial_identity(last)]
    (arm,) = read_study(config, rows, examples).arms
    assert arm.limit_over_examples
    assert arm.limit.fit.scores[-1] == pytest.approx(0.8 * 0.9)


@pytest.mark.parametrize(
    ("train", "kind", "share"),
    [
        ((1.0, 1.0, 0.93), "optimise", 7 / 7.75),
        ((1.0, 1.0, 0.97), "generalise", 3 / 7.75),
    ],
)
def test_what_fails_past_the_limit(train, kind, share):
    failed = only(Truth((0.98, 0.975, 0.9), train))["failure"]
    assert (failed["global_batch_size"], failed["kind"]) == (256, kind)
    assert failed["train_share"] == pytest.approx(share)
    assert (failed["test_lost"], failed["train_lost"]) == pytest.approx((7.75, 7.75 * share))


@pytest.mark.parametrize(
    ("train", "kind"), [((80.0, 80.0, 92.0), "optimise"), ((80.0, 80.0, 81.0), "generalise")]
)
def test_what_fails_in_a_language_model(train, kind):
    failed = only(Truth((100.0, 101.0, 120.0), train), perplexity=True)["failure"]
    assert (failed["global_batch_size"], failed["kind"]) == (256, kind)
    assert failed["test_lost"] == pytest.approx(math.log(1.2 / 1.01**0.5), rel=1e-3)


def test_divergence_is_a_failure_to_optimise():
    arm = only(Truth((0.98, 0.98, 0.98), diverges=(256,)))
    assert arm["limit"]["outcome"] == "limit"
    assert 64 < arm["limit"]["high"] < 65
    assert (arm["failure"]["kind"], arm["failure"]["train_share"]) == ("optimise", None)
    point = arm["points"][-1]
    assert (point["diverged"], point["divergence_step"], point["test_accuracy_mean"]) == (5, 3, 0.0)


def test_a_diverged_trial_counts_as_all_wrong_whatever_its_last_accuracy():
    config, rows = synthetic.make_study({"arm": Truth((0.98, 0.98, 0.98))})
    broken = [
        (row["seed"], row["global_batch_size"]) == (1, 256) or row["learning_rate_factor"] == 2.0
        for row in rows
    ]
    rows = [diverge(row) if hit else row for row, hit in zip(rows, broken, strict=True)]
    assert rows[-5]["train_accuracy"] == 0.1
    point = summarize(config, rows)["arms"][0]["points"][-1]
    assert (point["diverged"], point["search_diverged"], point["test_accuracy_min"]) == (1, 1, 0.0)
    assert point["search"][-1]["validation_accuracy_mean"] == 0.0


@pytest.mark.parametrize("perplexity", [False, True])
def test_the_training_accuracy_of_a_diverged_model_is_none(perplexity):
    config, rows = synthetic.make_study(
        {"arm": Truth((100.0,) * 3 if perplexity else (0.98,) * 3)}, perplexity=perplexity
    )
    rows = [
        diverge(row) if (row["seed"], row["global_batch_size"]) == (1, 256) else row for row in rows
    ]
    arm = summarize(config, rows)["arms"][0]
    point = arm["points"][-1]
    assert (point["train_accuracy_mean"], point["train_loss_mean"]) == (None, None)
    assert (arm["failure"]["kind"], arm["failure"]["train_lost"], arm["failure"]["diverged"]) == (
        "optimise",
        None,
        1,
    )


def test_a_test_loss_that_did_not_rise_is_no_divergence():
    truth = Truth((math.e,) * 3, tuple(map(math.exp, (0.5, 0.4, 0.6))), spread=0.0)
    first, *others = cells_of(truth, perplexity=True)
    for past, kind in zip(others, ("generalise", "optimise"), strict=True):
        failed = failure([first], past, PERPLEXITY)
        assert (failed.kind, failed.train_share, failed.test_lost) == (kind, None, 0.0)
        assert (failed.diverged, failed.seeds) == (0, 5)


def test_what_fails_cannot_be_told_without_a_training_score():
    first, past, _ = cells_of(Truth((0.9, 0.5, 0.5), (None, 0.9, 0.9)))
    failed = failure([first], past, ACCURACY)
    assert (failed.kind, failed.train_lost, failed.diverged) == (None, None, 0)


@pytest.mark.parametrize("seeds", [1, 2, 5])
def test_a_seed_that_diverged_at_the_smallest_batch_leaves_no_limit(seeds):
    config, rows = synthetic.make_study({"arm": Truth((0.98, 0.98, 0.5))})
    rows = [
        diverge(row) if row["seed"] <= seeds and row["global_batch_size"] == 16 else row
        for row in rows
    ]
    arm = summarize(config, rows)["arms"][0]
    assert arm["limit"] == {"outcome": "cannot_tell", "reason": "diverged", "fit": None}
    assert arm["failure"] is None


def test_nothing_fails_before_the_limit():
    assert only(Truth((0.98, 0.98, 0.98)))["failure"] is None


# ---- points


def test_numbers():
    summary = summarize(
        *synthetic.make_study(
            {"momentum": Truth((0.98, 0.975, 0.9)), "lamb": legw((0.98, 0.98, 0.975))}
        )
    )
    assert summary["complete"]
    momentum, lamb = summary["arms"]
    assert momentum["limit"]["outcome"] == "limit"
    assert lamb["limit"]["outcome"] == "not_reached"
    point = lamb["points"][-1]
    assert point["test_accuracy_mean"] == pytest.approx(0.975)
    assert point["test_accuracy_std"] == pytest.approx(0.0005 * 2.5**0.5)
    assert (point["test_accuracy_min"], point["test_accuracy_max"]) == pytest.approx((0.974, 0.976))
    assert point["train_accuracy_mean"] == 1.0
    assert [entry["validation_accuracy_mean"] for entry in point["search"]] == pytest.approx(
        [0.965, 0.975, 0.965]
    )
    assert not point["at_edge_of_grid"]
    assert (point["search_trials"], point["search_full_runs"]) == (3, 3.0)


def test_a_perplexity_is_the_exponential_of_the_mean_loss():
    config, rows = synthetic.make_study(
        {"arm": Truth((100.0, 100.0, 100.0))}, perplexity=True, seeds=(1, 2)
    )
    for row in rows:
        if row["phase"] == "final":
            row["test_perplexity"] = 50.0 if row["seed"] == 1 else 200.0
    point = summarize(config, rows)["arms"][0]["points"][0]
    assert point["test_perplexity_mean"] == pytest.approx(100.0)
    assert (point["test_perplexity_min"], point["test_perplexity_max"]) == (50.0, 200.0)


def test_candidates_are_means_over_seeds_and_kept_apart_by_fidelity():
    config, rows = synthetic.make_study(
        {"arm": Truth((0.9, 0.9, 0.9))}, search_seeds=(0, 10), method="hyperband"
    )
    shifted = [
        {**row, "validation_accuracy": row["validation_accuracy"] + 0.01 * (row["seed"] == 10)}
        for row in rows
    ]
    before, after = (
        summarize(config, found)["arms"][0]["points"][0]["search"] for found in (rows, shifted)
    )
    assert {entry["trials"] for entry in after} == {2}
    assert {entry["fidelity"] for entry in after} == {1.0, 1 / 3, 1 / 9}
    for one, other in zip(before, after, strict=True):
        assert other["validation_accuracy_mean"] - one["validation_accuracy_mean"] == pytest.approx(
            0.005
        )


@pytest.mark.parametrize(("factor", "edge"), [(0.5, True), (1.0, False), (2.0, True)])
def test_the_ends_of_a_grid_are_its_edges(factor, edge):
    search = SearchConfig("grid", learning_rate_factors=(0.5, 1.0, 2.0))
    assert (edge_of(search, "learning_rate", factor) != 0) is edge


@pytest.mark.parametrize(("factor", "edge"), [(0.0, False), (1.0, False), (4.0, True)])
def test_nothing_lies_beyond_no_warmup(factor, edge):
    search = SearchConfig("grid", warmup_factors=(0.0, 1.0, 4.0))
    assert (edge_of(search, "warmup", factor) != 0) is edge


def test_the_edges_of_every_factor_are_told():
    ranges = {"warmup_range": [0.25, 4.0], "weight_decay_range": [0.1, 10.0]}
    config, rows = synthetic.make_study({"arm": Truth((0.98,) * 3)}, method="halton", **ranges)
    for row in rows:
        row["warmup_factor"] = 4.0
        row["warmup_steps"] = 32.0
        row["weight_decay_factor"] = 0.1
    point = summarize(config, rows)["arms"][0]["points"][0]
    assert (point["at_edge_of_grid"], point["warmup_at_edge"], point["weight_decay_at_edge"]) == (
        False,
        True,
        True,
    )
    for row in rows:
        row["warmup_steps"] = row["weight_decay"] = 0  # a factor of zero
    point = summarize(config, rows)["arms"][0]["points"][0]
    assert (point["warmup_at_edge"], point["weight_decay_at_edge"]) == (False, False)


def test_a_warmup_that_would_outlast_the_run_is_cut_and_nothing_lies_beyond_it():
    config, rows = synthetic.make_study(
        {"arm": Truth((0.98,) * 3)}, method="grid", warmup_factors=[1.0, 4.0, 16.0]
    )
    of_factor = {1.0: 8.0, 4.0: 32.0, 16.0: 39.0}
    searched = [row for row in rows if row["phase"] == "search"]
    tried = [{**row, "warmup_factor": factor} for factor in of_factor for row in searched]
    tried += [{**row, "warmup_factor": 16.0} for row in rows if row["phase"] == "final"]
    for row in tried:
        row["warmup_steps"] = of_factor[row["warmup_factor"]]
    cell = read_study(config, tried).arms[0].cells[0]
    assert cell.cut_warmups == {16.0}
    assert not cell.edges.warmup
    for row in tried:
        row["warmup_steps"] = 8.0 * row["warmup_factor"]
    cell = read_study(config, tried).arms[0].cells[0]
    assert cell.cut_warmups == set()
    assert cell.edges.warmup


def test_a_grid_of_one_has_no_edge():
    assert not edge_of(SearchConfig("grid", learning_rate_factors=(1.0,)), "learning_rate", 1.0)


@pytest.mark.parametrize(
    ("factor", "edge"),
    [
        (0.1, True),
        (0.15, True),
        (0.17, False),
        (1.0, False),
        (6.0, False),
        (6.5, True),
        (10.0, True),
    ],
)
def test_a_tenth_of_a_range_is_its_edge(factor, edge):
    search = SearchConfig("optuna", learning_rate_range=(0.1, 10.0))
    assert (edge_of(search, "learning_rate", factor) != 0) is edge


def test_the_noise_scale_is_the_median_over_the_steps_of_what_all_seeds_give():
    points = only(Truth((0.9,) * 3, noise_scale=(100.0, 200.0, 400.0)))["points"]
    assert [point["noise_scale"] for point in points] == pytest.approx([100.0, 200.0, 400.0])
    planted = [100 * 4.0**place for place in range(-4, 5)]
    over_steps = points[0]["noise_scale_over_steps"]
    assert over_steps["noise_scale"] == pytest.approx(planted)
    assert over_steps["step"] == list(_fits.log_spaced_steps(512, 9))
    assert points[0]["noise_scale_range"] == pytest.approx([planted[0], planted[-1]])


def with_square_norms(norms):
    """Return the first point of a study whose probes have these |G|^2; None keeps them."""
    config, rows = synthetic.make_study({"arm": Truth((0.9,) * 3, noise_scale=(100.0,) * 3)})
    for row in rows:
        if row["phase"] == "final":
            old = row["probes"]["gradient_square_norm"]
            row["probes"]["gradient_square_norm"] = [
                was if new is None else new for was, new in zip(old, norms, strict=True)
            ]
    return summarize(config, rows)["arms"][0]["points"][0]


def test_a_noise_scale_without_signal_is_infinite():
    point = with_square_norms([-1.0] * 9)
    assert (point["noise_scale"], point["noise_scale_range"]) == (None, [None, None])
    assert point["noise_scale_over_steps"]["noise_scale"] == [None] * 9


def test_a_step_without_signal_is_one_above_all_others():
    point = with_square_norms([None] * 8 + [-1.0])
    assert point["noise_scale"] == pytest.approx(100.0)
    assert point["noise_scale_range"] == [pytest.approx(100 / 4**4), None]


def test_what_was_not_probed_has_no_noise_scale():
    point = only(Truth((0.9,) * 3))["points"][0]
    assert [
        point[name] for name in ("noise_scale", "noise_scale_range", "noise_scale_over_steps")
    ] == [None] * 3


@pytest.mark.parametrize(("growth", "better"), [("log", "log_r2"), (0.6, "power_r2")])
def test_diffusion_is_told_apart(growth, better):
    for point in only(Truth((0.9,) * 3, growth=growth))["points"]:
        fit = point["diffusion"]
        assert fit[better] == pytest.approx(1.0, abs=1e-6)
        assert fit[better] == max(fit["log_r2"], fit["power_r2"])
        if growth != "log":
            assert fit["exponent"] == pytest.approx(0.6, abs=1e-4)


def test_the_peak_of_the_lipschitz_constant_is_found():
    config, rows = synthetic.make_study(
        {"arm": Truth((0.9,) * 3, peak_step=lambda size: 512 // size)}
    )
    for point in summarize(config, rows)["arms"][0]["points"]:
        probed = next(
            r
            for r in rows
            if r["phase"] == "final" and r["global_batch_size"] == point["global_batch_size"]
        )
        nearest = min(
            probed["probes"]["step"],
            key=lambda step: abs(math.log2(step / (512 / point["global_batch_size"]))),
        )
        assert point["lipschitz_peak_step"] == nearest
        assert point["lipschitz_first_step"] == 1
        assert point["lipschitz_steps"] == probed["probes"]["step"]
        assert point["lipschitz_peaks"] == [{"step": nearest, "at_edge": False}] * 5


def test_a_run_that_diverged_has_no_peak():
    config, rows = synthetic.make_study(
        {"arm": Truth((0.9,) * 3, peak_step=lambda size: 8, diverges=(64,))}
    )
    assert [
        len(point["lipschitz_peaks"]) for point in summarize(config, rows)["arms"][0]["points"]
    ] == [5, 0, 5]


def test_steps_to_the_target_are_medians_and_a_miss_is_slowest():
    config, rows = synthetic.make_study(
        {"arm": Truth((0.9,) * 3, steps_to_target=(200.0, 60.0, 20.0))}
    )
    missing = {(64, 1), (64, 2), (256, 1), (256, 2), (256, 3)}
    for row in rows:
        if row["phase"] == "final" and (row["global_batch_size"], row["seed"]) in missing:
            row["steps_to_target"] = row["examples_to_target"] = None
    found = [point["target"] for point in summarize(config, rows)["arms"][0]["points"]]
    assert [one["steps_median"] for one in found] == [200.0, 60.0, None]
    assert [one["examples_median"] for one in found] == [3200.0, 3840.0, None]
    assert [one["reached"] for one in found] == [5, 3, 2]


def test_the_planted_critical_batch_is_found():
    steps = tuple(30 * (1 + 100 / size) for size in SIZES)
    fit = only(Truth((0.9,) * 3, steps_to_target=steps))["critical_batch"]
    assert (fit["min_steps"], fit["critical_batch_size"]) == pytest.approx((30, 100), rel=1e-4)


def test_no_critical_batch_without_three_that_reach_the_target():
    assert only(Truth((0.9,) * 3, steps_to_target=(200.0, 100.0, None)))["critical_batch"] is None


def test_runs_that_stop_at_the_target_have_no_limit():
    arm = only(Truth((0.9, 0.9, 0.5), steps_to_target=(200.0, 100.0, None)), stops=True)
    assert (arm["limit"], arm["failure"]) == (None, None)


# ---- waterfall


def test_the_waterfall_is_of_the_largest_batch_in_the_order_of_the_config():
    truths = {
        "a": Truth((0.98, 0.9, 0.8)),
        "b": Truth((0.98, 0.9, 0.85)),
        "c": Truth((0.98, 0.9, 0.8505)),
    }
    found = summarize(*synthetic.make_study(truths, waterfall=("c", "a", "b")))["waterfall"]
    assert found["global_batch_size"] == 256
    assert [step["arm"] for step in found["steps"]] == ["c", "a", "b"]
    assert [step["gain"] for step in found["steps"][1:]] == pytest.approx([-5.05, 5.0])
    noise = 100 * 0.0005 * 2.5**0.5 * 2**0.5
    assert [step["gain_spread"] for step in found["steps"][1:]] == pytest.approx([noise, noise])


@pytest.mark.parametrize(("gain", "apart"), [(0.0005, False), (0.0015, True), (-0.0015, True)])
def test_a_gain_is_told_apart_by_the_interval_of_the_means(gain, apart):
    """Its half-width is 0.115 points; the difference of two single seeds deviates by 0.112."""
    truths = {"a": Truth((0.9, 0.9, 0.8)), "b": Truth((0.9, 0.9, 0.8 + gain))}
    step = summarize(*synthetic.make_study(truths, waterfall=("a", "b")))["waterfall"]["steps"][1]
    half = 2.306 * 0.0005 * 2.5**0.5 * (2 / 5) ** 0.5
    assert (step["gain_low"], step["gain_high"]) == pytest.approx(
        (100 * (gain - half), 100 * (gain + half)), abs=1e-4
    )
    assert step["told_apart"] is apart


def test_a_gain_between_one_and_two_seeds_worth_is_told_apart_with_many_seeds():
    truths = {"a": Truth((0.9, 0.9, 0.8)), "b": Truth((0.9, 0.9, 0.8006))}
    few, many = (
        summarize(*synthetic.make_study(truths, waterfall=("a", "b"), seeds=range(1, 1 + count)))[
            "waterfall"
        ]["steps"][1]
        for count in (3, 30)
    )
    assert (few["told_apart"], many["told_apart"]) == (False, True)
    assert many["gain"] < many["gain_spread"]


def test_seeds_that_do_not_vary_tell_no_gain():
    truths = {"a": Truth((0.9, 0.9, 0.8), spread=0.0), "b": Truth((0.9, 0.9, 0.85), spread=0.0)}
    step = summarize(*synthetic.make_study(truths, waterfall=("a", "b")))["waterfall"]["steps"][1]
    assert (step["gain_low"], step["gain_high"], step["told_apart"]) == (None, None, None)


def test_one_seed_has_no_spread_of_gains():
    truths = {"a": Truth((0.9, 0.9, 0.8)), "b": Truth((0.9, 0.9, 0.85))}
    step = summarize(*synthetic.make_study(truths, waterfall=("a", "b"), seeds=(1,)))["waterfall"][
        "steps"
    ][1]
    assert [step[name] for name in ("gain_low", "gain_high", "gain_spread", "told_apart")] == [
        None
    ] * 4
    assert step["gain"] == pytest.approx(5.0)


def test_a_gain_of_a_language_model_is_in_percent_of_its_perplexity():
    truths = {"a": Truth((100.0,) * 3), "b": Truth((100.0, 100.0, 90.0))}
    step = summarize(*synthetic.make_study(truths, waterfall=("a", "b"), perplexity=True))[
        "waterfall"
    ]["steps"][1]
    assert step["gain"] == pytest.approx(10.0, abs=1e-4)
    assert step["gain_low"] < 10 < step["gain_high"] < 10.2


def test_no_waterfall_without_all_its_arms():
    config, rows = synthetic.make_study(
        {"a": Truth((0.9,) * 3), "b": Truth((0.9,) * 3)}, waterfall=("a", "b")
    )
    assert summarize(config, [row for row in rows if row["arm"] == "a"])["waterfall"] is None


# ---- completeness


def test_no_limit_past_a_gap_while_trials_are_missing():
    config, rows = synthetic.make_study(
        {"momentum": Truth((0.98, 0.975, 0.9)), "lamb": legw((0.98,) * 3)}
    )
    without = [row for row in rows if (row["arm"], row["global_batch_size"]) != ("momentum", 64)]
    summary = summarize(config, without)
    assert not summary["complete"]
    assert summary["arms"][0]["limit"]["reason"] == "few_batch_sizes"
    assert summary["arms"][0]["failure"] is None
    assert summary["claims"] == []
    without = [row for row in rows if (row["arm"], row["global_batch_size"]) != ("lamb", 16)]
    assert summarize(config, without)["arms"][1]["limit"] is None


def test_complete_is_every_final_seed_of_every_cell():
    config, rows = synthetic.make_study({"arm": Truth((0.98,) * 3)})
    last = max(place for place, row in enumerate(rows) if row["phase"] == "final")
    first = next(place for place, row in enumerate(rows) if row["phase"] == "search")
    assert not summarize(config, rows[:last] + rows[last + 1 :])["complete"]
    assert summarize(config, rows[:first] + rows[first + 1 :])[
        "complete"
    ]  # no config determines the length of a search


def test_an_unfinished_study_has_the_points_that_it_has():
    config, rows = synthetic.make_study({"arm": Truth((0.98,) * 3)})
    summary = summarize(config, rows[:9])
    assert (summary["cells"], summary["cells_complete"]) == (3, 1)
    assert [point["global_batch_size"] for point in summary["arms"][0]["points"]] == [16]


def test_the_summary_is_json_without_nan():
    truths = {
        "a": Truth((100.0,) * 3, diverges=(64, 256)),
        "b": Truth((100.0,) * 3, growth=0.5, noise_scale=(9.0,) * 3),
    }
    json.dumps(summarize(*synthetic.make_study(truths, perplexity=True)), allow_nan=False)


def test_the_time_grows_with_the_trials_and_no_faster():
    config, rows = synthetic.make_study({str(arm): Truth((0.98,) * 3) for arm in range(10)})

    def seconds(copies):
        many = rows * copies
        start = time.perf_counter()
        summarize(config, many)
        return time.perf_counter() - start

    seconds(1)
    assert (
        seconds(21) < 5
    )  # 5,040 trials; reading all of them for every cell would take 30 times as long


def test_the_shipped_study_reaches_from_16_to_the_whole_training_set():
    shipped = call_get_config(
        str(pathlib.Path(__file__).parents[3] / "configs/sweeps/digits_limit.py")
    )
    shipped.validate()
    assert shipped.global_batch_sizes[0] == 16
    assert shipped.global_batch_sizes[-1] == _digits.NUM_TRAIN
    rules = {
        (arm.optimizer.name, arm.schedule.scaling_rule, arm.schedule.warmup_rule)
        for arm in shipped.arms
    }
    assert rules >= {
        ("momentum", "linear", "epochs"),
        ("lars", "sqrt", "legw"),
        ("lamb", "sqrt", "legw"),
    }
    assert {name for name, rule, _ in rules if rule == "sqrt"} >= {"adam", "adamw"}
    assert len(shipped.final_seeds) >= 5
