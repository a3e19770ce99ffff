"""The metric that judges a study: its order in the search, its fields, and what is refused."""

import json

import pytest
from refusal import refused
from tiny_study import make_config

from lbopt.config import Arm, DataConfig, LossConfig, OptimizerConfig, ScheduleConfig
from lbopt.sweep import _drive, make_cells, make_problems
from lbopt.sweep._finished_trial import REQUIRED, check_record, finished_trial
from lbopt.sweep._trials import judged_by

LOADS = """
import numpy as np
from lbopt.data import Splits


def numbers():
    x = np.ones((128, 3), np.float32)
    split = {"x": x, "target": x[:, 0]}
    return Splits(split, split, split)


def own(outputs, batch):
    return (outputs[:, 0] - batch["target"]) ** 2, {"hits": outputs[:, 0] > 0}


def percent(outputs, batch):
    return (outputs[:, 0] - batch["target"]) ** 2, {"accuracy": 100 * (outputs[:, 0] > 0)}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(LOADS)
    monkeypatch.chdir(tmp_path)
    return "own.py:"


def candidates(metric, *values, **common):
    """Return a search trial for each value, in learning rates 1, 2, ...; None diverged."""
    return [
        {
            "phase": "search",
            "fidelity": 1.0,
            "learning_rate_factor": place + 1.0,
            "warmup_factor": 1.0,
            "weight_decay_factor": 1.0,
            "metric": metric,
            "validation_loss": None if value is None else 1.0,
            f"validation_{metric}": value,
            "diverged": value is None,
            "steps": 100,
            **{name: given[place] for name, given in common.items()},
        }
        for place, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        ("r2", (-3.0, 0.4, 0.5, None), 3.0),
        ("r2", (None, -3.0), 2.0),
        ("loss", (0.3, 0.2, None), 2.0),
        ("loss", (-3.0, -4.0, None), 2.0),
        ("mean_absolute_error", (20.0, 10.0), 2.0),
        ("label_mae", (20.0, 10.0), 2.0),
        ("f1", (0.2, 0.9, None), 2.0),
        ("bleu", (20.0, 30.0, None), 2.0),
        ("perplexity", (20.0, 10.0, None), 2.0),
    ],
)
def test_the_better_score_is_chosen_and_a_run_that_diverged_never(metric, values, best):
    assert _drive.choose(candidates(metric, *values)).learning_rate == best


@pytest.mark.parametrize(
    ("metric", "values"), [("loss", (-1.0, -5.0, -7.0)), ("bleu", (10.0, 20.0, 30.0))]
)
def test_a_target_that_was_reached_is_better_than_any_that_was_not(metric, values):
    """Whatever the sign of the error; and of those that missed it, the better score is."""
    reached = candidates(metric, *values, steps_to_target=(100, None, None))
    found = [_drive.score([one]).value for one in reached]
    assert found[0] < found[2] < found[1]


def test_a_score_that_is_not_finite_is_the_worst_though_the_loss_is_finite():
    found = candidates("f1", None, 0.1)
    found[0] |= {"diverged": False, "validation_loss": 1.0}
    assert _drive.choose(found).learning_rate == 2.0


# ---- lines


def line(**fields):
    always = {name: 1 for name in REQUIRED if not name.endswith("accuracy")}
    others = {"metric": "r2", "train_r2": 0.5, "validation_r2": -2, "test_r2": None}
    return json.loads(json.dumps({**always, "arm": "a", "phase": "search", **others, **fields}))


def test_a_line_has_the_scores_of_its_metric():
    check_record(line())
    run = finished_trial(line())
    assert [run.score(split, "r2") for split in ("train", "validation", "test")] == [0.5, -2, None]
    assert run.score("validation", "loss") == 1


@pytest.mark.parametrize(("field", "value"), [("validation_r2", "x"), ("test_r2", 1e300)])
def test_a_score_of_another_type_is_named(field, value):
    with pytest.raises(ValueError, match=rf"^{field}: "):
        check_record(line(**{field: value}))


@pytest.mark.parametrize("metric", ["r2", None])
def test_a_line_without_the_scores_of_its_metric_is_damaged(metric):
    found = line(metric=metric)
    if metric:
        del found["test_r2"]
    with pytest.raises(ValueError, match="test_r2" if metric else "train_accuracy"):
        check_record(found)


# ---- what a study is judged by


def metrics_of(place, loss="", metric="", second_loss=None):
    """Return the metrics of a study of one or two arms, once its cells could be made."""
    config = make_config(metric=metric)
    config.train.data = DataConfig(place + "numbers")
    config.train.loss = LossConfig(name=loss)
    config.global_batch_sizes = (128,)
    config.arms = config.arms[:1]
    if second_loss:
        other = Arm("other", OptimizerConfig("momentum"), ScheduleConfig(0.1, warmup_rule="none"))
        other.loss = LossConfig(name=second_loss)
        config.arms += (other,)
    config.validate()
    problems = make_problems(config)
    make_cells(config, problems)
    return [judged_by(config, problem) for problem in problems]


def test_a_study_is_judged_by_the_metric_of_the_task_or_by_the_named_one(place):
    assert metrics_of(place) == ["r2"]
    assert metrics_of(place, metric="eval/mean_absolute_error") == ["mean_absolute_error"]
    own = place + "own"
    assert metrics_of(place, own, "eval/hits") == ["hits"]
    assert metrics_of(place, own, "eval/loss") == ["loss"]
    assert metrics_of(place, own, second_loss=place + "percent") == ["r2", "r2"]


def test_a_metric_that_not_all_arms_have_is_refused(place):
    with refused("config.metric", "eval/hits", "choice"):
        metrics_of(place, metric="eval/hits")
    with refused("config.metric", "eval/hits", "choice"):
        metrics_of(place, place + "own", "eval/hits", place + "percent")
    with refused("config.metric", "r2", "choice"):
        make_config(metric="r2")
    with refused("config.metric", "eval/perplexity_per_byte", "choice") as caught:
        make_config(metric="eval/perplexity_per_byte")
    assert "eval/bits_per_byte" in caught.value.reason
    make_config(metric="eval/bits_per_byte")


def test_arms_that_would_be_judged_by_different_metrics_are_refused(cells, config):
    problems = [cells[0].problem, cells[0].problem._replace(main_metric="loss")]
    with refused("config.metric", "", "conflict"):
        make_cells(config, problems)
