"""Studies that are judged by R^2, a loss or a metric of the user's own, in numbers and figures."""

import copy
import math

import numpy as np
import pytest
import synthetic
from synthetic import Truth, legw, summarize

from lbopt.report import _page
from lbopt.report.study import _style, read_study, write_study_report
from lbopt.report.study._read import learned
from lbopt.report.study._tables import terminal_table
from lbopt.sweep import ExampleScores, finished_trial, trial_identity

TRUTHS = {
    "momentum": Truth((0.98, 0.97, 0.6), best_warmup_steps=lambda size: 16),
    "lamb": legw((0.98, 0.98, 0.965)),
    "adam": Truth((0.9, 0.98, 0.97)),
}
SPLITS = ("train", "validation", "test")


def planted(metric, value=lambda accuracy: accuracy, truths=TRUTHS, **options):
    """Return a planted study that is judged by a metric, a function of the accuracy."""
    config, rows = synthetic.make_study(truths, **options)
    for row in rows:
        row["metric"] = metric
        for split in SPLITS:
            accuracy = row.pop(f"{split}_accuracy")
            row.setdefault(f"{split}_{metric}", None if accuracy is None else value(accuracy))
    return config, rows


def outcome(summary):
    """Return what a study found, without the scores themselves."""
    arms = [
        {
            "limit": {name: arm["limit"][name] for name in arm["limit"] if name != "fit"},
            "past": arm["failure"] and arm["failure"]["global_batch_size"],
            "chosen": [point["learning_rate_factor"] for point in arm["points"]],
        }
        for arm in summary["arms"]
    ]
    gains = [
        {name: step[name] for name in ("gain", "gain_low", "gain_high", "told_apart")}
        for step in summary["waterfall"]["steps"]
    ]
    verdicts = [(claim["claim"], claim["verdict"]) for claim in summary["claims"]]
    return arms, gains, verdicts


def test_r2_is_judged_in_points_as_accuracy_is():
    study = {"waterfall": tuple(TRUTHS), "warmup_factors": [0.5, 1.0, 2.0]}
    known = summarize(*synthetic.make_study(TRUTHS, **study))
    found = summarize(*planted("r2", **study))
    assert outcome(found) == outcome(known)
    for ours, theirs in zip(found["findings"], known["findings"], strict=True):
        if "fails to" not in ours:  # that is told by the loss
            assert ours == theirs.replace("accuracy", "R^2")


def test_the_signs_of_a_metric_and_of_its_order_make_no_difference():
    """A score to be raised and its negative, an error to be lowered, give the same findings."""
    study = {"waterfall": tuple(TRUTHS), "warmup_factors": [0.5, 1.0, 2.0]}
    raised = summarize(*planted("score", **study))
    lowered = summarize(*planted("error", lambda accuracy: -accuracy, **study))
    assert outcome(lowered) == outcome(raised)
    for ours, theirs in zip(lowered["findings"], raised["findings"], strict=True):
        assert ours.replace("error", "score").replace("-0.", "0.") == theirs.replace("-0.", "0.")

    momentum, lamb, _ = raised["arms"]
    assert momentum["limit"]["outcome"] == "limit"
    assert 64 < momentum["limit"]["global_batch_size"] < 256
    # 1 percent of 0.98 is a little less than a point.
    assert momentum["limit"]["fit"]["threshold"] == pytest.approx(0.975 * 0.99)
    assert lamb["limit"]["outcome"] == "limit"
    steps = raised["waterfall"]["steps"]
    assert steps[1]["gain"] == pytest.approx(100 * (0.965 - 0.6) / 0.6)
    ranking = next(text for text in raised["findings"] if text.startswith("At batch 256:"))
    assert ranking.index("adam 0.97") < ranking.index("lamb 0.965") < ranking.index("momentum 0.6")


BROKEN = {"arm": Truth((0.98, 0.98, 0.98), diverges=(256,))}


@pytest.mark.parametrize(
    ("metric", "known", "threshold"),
    [
        ("r2", {}, 0.97),
        ("f1", {}, 0.98 * 0.99),
        ("loss", {"trivial_loss": 2.3}, 0.03 * 1.01),
        ("loss", {"curve": {"step": [1, 2], "train_loss": [2.3, 1.0]}}, 0.03 * 1.01),
        ("loss", {}, None),
        ("mae", {"trivial_loss": 2.3}, None),
    ],
)
def test_a_run_that_diverged_is_past_the_limit_where_the_worst_score_is_known(
    metric, known, threshold
):
    value = (lambda accuracy: 1 - accuracy) if metric == "mae" else (lambda accuracy: accuracy)
    config, rows = planted(metric, value, BROKEN)
    for row in rows:
        if row["phase"] == "final":
            row |= known
    arm = summarize(config, rows)["arms"][0]
    if threshold is None:
        assert arm["limit"] == {"outcome": "cannot_tell", "reason": "diverged", "fit": None}
        return
    assert arm["limit"]["outcome"] == "limit"
    assert arm["limit"]["fit"]["threshold"] == pytest.approx(threshold)
    assert arm["failure"]["kind"] == "optimise"
    assert arm["points"][-1][f"test_{metric}_mean"] is None


def test_a_diverged_run_is_no_better_than_one_that_fits_worse_than_the_mean():
    truths = {"arm": Truth((-1.0, -1.0, -1.0), diverges=(256,), spread=0.0)}
    config, rows = planted("r2", lambda accuracy: accuracy - 1.0, truths)
    fit = summarize(config, rows)["arms"][0]["limit"]["fit"]
    assert list(fit["scores"]) == [-1.0, -1.0, -1.0]


@pytest.mark.parametrize(("changed", "over_examples"), [(False, True), (True, False)])
def test_examples_that_runs_weight_differently_are_not_resampled(changed, over_examples):
    config, rows = planted("f1", truths={"arm": Truth((0.98, 0.98, 0.6))})
    rng = np.random.default_rng(0)
    finals = [row for row in rows if row["phase"] == "final"]
    examples = {
        trial_identity(row): ExampleScores("f1", row["test_f1"] + rng.normal(size=8), np.ones(8))
        for row in finals
    }
    if changed:
        examples[trial_identity(finals[-1])].weights[0] = 3.0
    (arm,) = read_study(config, rows, examples).arms
    assert arm.limit_over_examples is over_examples


@pytest.mark.parametrize(
    ("first", "trivial", "last", "falls"),
    [
        (-1.0, None, -0.97, False),
        (-1.0, None, -1.02, False),
        (-1.0, None, -1.1, True),
        (9.0, 2.0, 1.95, False),
        (9.0, 2.0, 1.85, True),
        (9.0, None, 1.95, True),
    ],
)
def test_a_loss_has_to_fall_below_that_of_a_model_that_ignores_its_input(
    first, trivial, last, falls
):
    _, rows = planted("loss")
    row = copy.deepcopy(next(row for row in rows if row["phase"] == "final"))
    row |= {"curve": {"step": [1], "train_loss": [first]}, "last_epoch_loss": last}
    # A number of classes says nothing about a loss of the user's own.
    row |= {"trivial_loss": trivial, "outputs": 1000}
    assert learned([finished_trial(row)]) is falls


# ---- figures and tables


@pytest.mark.parametrize(
    ("metric", "value", "label", "scale", "kinds"),
    [
        ("r2", lambda accuracy: accuracy - 1, "R^2, %", "linear", 2),
        ("loss", lambda accuracy: accuracy, "loss", "log", 1),
        ("label_error", lambda accuracy: 1.1 - accuracy, "label error", "log", 2),
        ("own_error", lambda accuracy: 0.5 - accuracy, "own error", "linear", 2),
        ("f1$2$", lambda accuracy: accuracy, "f1$2$", "linear", 2),
    ],
)
def test_figures_name_the_metric_and_their_axis_fits_it(
    metric, value, label, scale, kinds, tmp_path, monkeypatch
):
    figures = {}
    monkeypatch.setattr(
        _page, "save_figure", lambda figure, file: figures.update({file.stem: figure}) or "QQ=="
    )
    config, rows = planted(metric, value, waterfall=tuple(TRUTHS))
    study = write_study_report(tmp_path, synthetic.save_study(tmp_path, config, rows)).study
    (axes,) = figures["score_vs_batch_size"].axes
    assert (axes.get_ylabel(), axes.get_yscale()) == (_style.label(f"test {label}"), scale)
    beside = figures["train_and_test"].axes
    assert len(beside) == kinds * len(TRUTHS)
    assert beside[0].get_title("left").startswith(_style.label(f"momentum: {label}"))
    assert any("fails to" in panel.get_title("left") for panel in beside)
    assert [len(line.get_xdata()) for line in beside[0].lines[:2]] == [3, 3]
    assert figures["waterfall"].axes[0].get_xlabel() == axes.get_ylabel()
    low, high = figures["waterfall"].axes[0].get_xlim()
    for step in study.waterfall.steps:
        assert low < study.metric.shown(step.mean) < high
    assert figures["learning_rate_search"].axes[0].get_yscale() == scale

    header, _, line, *_ = terminal_table(study).split("\n")
    assert header.startswith(f"test {label} (mean over seeds)")
    for shown, cell in zip(line.split()[1:], study.arms[0].cells, strict=False):
        assert float(shown) == pytest.approx(study.metric.shown(cell.test.mean), rel=1e-3)


def test_small_numbers_have_a_column_each():
    study = read_study(*planted("error", lambda accuracy: 1.2345e-7 * math.exp(-accuracy)))
    _, _, line, *_ = terminal_table(study).split("\n")
    assert len(line.split()) == 1 + 3 + 1
