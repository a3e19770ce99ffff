"""The summary says what the rows say, also when nobody likes it."""

import pathlib

import pytest

from lbopt.cli import arguments
from lbopt.data import digits
from lbopt.sweep.summary import find_limit, summarize

SIZES = (16, 64, 256)


def study(**accuracies):
    """Return config and rows of a study with these final accuracies per arm, two seeds 0.2 points apart."""
    arms, rows = [], []
    for name, values in accuracies.items():
        warmup = "legw" if name in ("lamb", "lars") else "none"
        arms.append({"name": name, "optimizer": {"name": name}, "schedule": {"warmup_rule": warmup}})
        for size, value in zip(SIZES, values, strict=True):
            common = {"arm": name, "global_batch_size": size, "steps": 10, "warmup_steps": 1, "learning_rate": 0.1}
            for factor in (0.5, 1.0, 2.0):
                rows.append(row(common, "search", factor, 0, 0.9 if factor == 1.0 else 0.8))
            rows += [row(common, "final", 1.0, seed, value + shift) for seed, shift in ((1, -0.001), (2, 0.001))]
    config = {"name": "s", "arms": arms, "global_batch_sizes": list(SIZES), "limit_points": 1.0}
    return {**config, "learning_rate_factors": [0.5, 1.0, 2.0], "search_seeds": [0], "final_seeds": [1, 2]}, rows


def row(common, phase, factor, seed, accuracy):
    test = accuracy if phase == "final" else None
    scores = {"validation_accuracy": accuracy, "validation_loss": 1.0, "test_accuracy": test, "diverged": False}
    return {**common, "phase": phase, "learning_rate_factor": factor, "seed": seed, **scores}


@pytest.mark.parametrize(
    ("accuracies", "limit"),
    [
        ((0.98, 0.98, 0.98), 256),
        ((0.98, 0.97, 0.969), 64),
        ((0.98, 0.9699, 0.98), 16),
        ((0.98, 0.97, 0.97), 256),
        ((0.98, 0.99, 0.5), 64),
    ],
)
def test_limit(accuracies, limit):
    assert find_limit(list(zip(SIZES, accuracies, strict=True)), 1.0) == limit


def test_no_points_no_limit():
    assert find_limit([], 1.0) is None


def test_numbers():
    config, rows = study(momentum=(0.98, 0.975, 0.9), lamb=(0.98, 0.98, 0.975))
    summary = summarize(config, rows)
    assert summary["complete"]
    momentum, lamb = summary["arms"]
    assert (momentum["limit"], momentum["limit_is_largest"]) == (64, False)
    assert (lamb["limit"], lamb["limit_is_largest"]) == (256, True)
    point = lamb["points"][-1]
    assert point["test_accuracy_mean"] == pytest.approx(0.975)
    assert point["test_accuracy_std"] == pytest.approx(0.001 * 2**0.5)
    assert (point["test_accuracy_min"], point["test_accuracy_max"]) == pytest.approx((0.974, 0.976))
    assert [entry["validation_accuracy_mean"] for entry in point["search"]] == [0.8, 0.9, 0.8]
    assert not point["at_edge_of_grid"]


@pytest.mark.parametrize(
    ("lamb", "lars", "verdict"),
    [
        ((0.98, 0.98, 0.98), (0.98, 0.98, 0.98), "(at most 64) held here: lamb and lars went further."),
        ((0.98, 0.98, 0.98), (0.98, 0.9, 0.9), "(at most 64) held here: lamb went further, lars fell short."),
        ((0.98, 0.97, 0.9), (0.98, 0.9, 0.9), "(at most 64) did not hold here: lamb went as far, lars fell short."),
    ],
)
def test_findings_favour_nobody(lamb, lars, verdict):
    config, rows = study(momentum=(0.98, 0.975, 0.9), lamb=lamb, lars=lars)
    assert verdict in " ".join(summarize(config, rows)["findings"])


def test_no_verdict_when_another_arm_reaches_the_largest_batch():
    config, rows = study(momentum=(0.98, 0.98, 0.98), lamb=(0.98, 0.98, 0.98))
    text = " ".join(summarize(config, rows)["findings"])
    assert "cannot be told: another arm reached the largest batch, 256" in text
    assert "held here" not in text


def test_no_verdict_and_no_limit_past_a_gap_while_trials_are_missing():
    config, rows = study(momentum=(0.98, 0.975, 0.9), lamb=(0.98, 0.98, 0.98))
    without = [row for row in rows if (row["arm"], row["global_batch_size"]) != ("lamb", 64)]
    summary = summarize(config, without)
    assert summary["arms"][1]["limit"] == 16
    assert "That layerwise adaptation" not in " ".join(summary["findings"])
    without = [row for row in rows if (row["arm"], row["global_batch_size"]) != ("lamb", 16)]
    assert summarize(config, without)["arms"][1]["limit"] is None


def test_findings_name_the_edges_of_the_grid_and_overlapping_seeds():
    config, rows = study(momentum=(0.98, 0.975, 0.9), lamb=(0.98, 0.98, 0.901))
    rows = [
        {**row, "learning_rate_factor": 2.0} if row["phase"] == "final" and row["arm"] == "lamb" else row
        for row in rows
    ]
    text = " ".join(summarize(config, rows)["findings"])
    assert "edge of the grid for lamb at 16, lamb at 64, lamb at 256" in text
    assert "the seeds of lamb and momentum overlap" in text


def test_an_unfinished_study_says_so():
    config, rows = study(momentum=(0.98, 0.975, 0.9))
    summary = summarize(config, rows[:7])
    assert not summary["complete"]
    assert "not complete: 7 of 15 trials" in summary["findings"][0]
    assert [point["global_batch_size"] for point in summary["arms"][0]["points"]] == [16]


def test_the_shipped_study_reaches_from_16_to_the_whole_training_set():
    shipped = arguments.call_get_config(str(pathlib.Path(__file__).parents[2] / "configs/sweeps/digits_limit.py"))
    shipped.validate()
    assert shipped.global_batch_sizes[0] == 16
    assert shipped.global_batch_sizes[-1] == digits.NUM_TRAIN
    rules = {(arm.optimizer.name, arm.schedule.scaling_rule, arm.schedule.warmup_rule) for arm in shipped.arms}
    assert rules >= {("momentum", "linear", "epochs"), ("lars", "sqrt", "legw"), ("lamb", "sqrt", "legw")}
    assert {name for name, rule, _ in rules if rule == "sqrt"} >= {"adam", "adamw"}
    assert len(shipped.final_seeds) >= 5


def test_findings_say_how_far_the_scaling_rule_was_off():
    config, rows = study(momentum=(0.98, 0.975, 0.9))
    largest = [row for row in rows if row["global_batch_size"] == 256]
    rows = [{**row, "learning_rate_factor": 0.5} if row in largest and row["phase"] == "final" else row for row in rows]
    assert "0.5 to 1 for momentum" in " ".join(summarize(config, rows)["findings"])
