"""Studies of the user's own data, network and loss, from a config file to the report."""

import json

import numpy as np
import pytest
from sklearn.datasets import load_diabetes

from lbopt.cli import main

NET = """
import flax.linen as nn
import jax.numpy as jnp


class Net(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.outputs)(nn.tanh(nn.Dense(8)(x)))


def focal(outputs, batch):
    right = jnp.where(batch["label"] > 0, outputs, -outputs)
    each = jnp.mean((1 - nn.sigmoid(right)) ** 2 * nn.softplus(-right), -1)
    return (jnp.sum(each), 1.0 * len(each)), {"label_error": jnp.mean(right < 0, -1)}
"""
STUDY = """
from lbopt.config import *


def get_config(arg):
    arms = tuple(
        Arm(name, OptimizerConfig(name), ScheduleConfig(0.03, warmup_rule="none"))
        for name in ("momentum", "adamw")
    )
    config = SweepConfig(
        name=arg,
        train=TrainConfig(num_epochs=3.0, model="net.py:Net"),
        arms=arms,
        search=SearchConfig(learning_rate_factors=(0.1, 1.0), widen_candidates=0),
        final_seeds=(7, 8, 9),
    )
    if arg == "numbers":
        config.train.data = ArraysConfig("diabetes.csv", target="progression")
        config.global_batch_sizes = (16, 128)
    else:
        config.arms = arms[1:]
        config.train.data = ArraysConfig("labels.npz")
        config.train.loss = LossConfig(name="net.py:focal")
        config.train.target_metric = config.metric = "eval/label_error"
        config.train.target_value = 0.4
        config.train.eval_every_epochs = 1.0
        config.global_batch_sizes = (32,)
        search = {"num_candidates": 3, "candidates_at_once": 1, "widen_candidates": 0}
        config.search = SearchConfig("optuna", **search)
        config.measure = MeasureConfig(num_probes=2, probe_parts=2, probe_part_size=8)
    return config
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "net.py").write_text(NET)
    (folder / "study.py").write_text(STUDY)
    features, target = load_diabetes(return_X_y=True)
    lines = [",".join(map(str, line)) for line in np.column_stack([features, target / 100])]
    header = ",".join([*map("x{}".format, range(features.shape[1])), "progression"])
    (folder / "diabetes.csv").write_text("\n".join([header, *lines]) + "\n")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 6)).astype(np.float32)
    np.savez(folder / "labels.npz", x=x, label=(x @ rng.normal(size=(6, 4)) > 0).astype(np.int32))
    return folder


@pytest.fixture(autouse=True)
def there(folder, monkeypatch):
    monkeypatch.chdir(folder)


def swept(folder, name):
    """Run a study; return its records by identity, its summary and the text of its page."""
    config = f"--config={folder / 'study.py'}:{name}"
    assert main(["sweep", config, f"--workdir={folder / name}"]) == 0
    lines = map(json.loads, (folder / name / "results.jsonl").read_text().splitlines())
    names = ("arm", "global_batch_size", "phase", "learning_rate", "seed")
    records = {tuple(map(line.get, names)): line for line in lines}
    summary = json.loads((folder / name / "summary.json").read_text())
    return records, summary, (folder / name / "report.html").read_text()


def chosen(records):
    """Return the search trials of each cell by the rate that was chosen there, and the others."""
    cells = {}
    for line in records.values():
        found = cells.setdefault((line["arm"], line["global_batch_size"]), ([], []))
        found[line["phase"] == "final"].append(line)
    return [
        (
            [line for line in search if line["learning_rate"] == final[0]["learning_rate"]],
            [line for line in search if line["learning_rate"] != final[0]["learning_rate"]],
        )
        for search, final in cells.values()
    ]


def test_a_regression_is_judged_by_r2_and_resumes_where_it_was_killed(folder, capsys):
    records, summary, page = swept(folder, "numbers")
    assert "test R^2, % (mean over seeds)" in capsys.readouterr().out
    assert (summary["metric"], summary["complete"], len(records)) == ("r2", True, 4 * (2 + 3))
    finals = [line for line in records.values() if line["phase"] == "final"]
    for line in records.values():
        assert line["metric"] == "r2"
        assert "test_accuracy" not in line
    for line in finals:
        assert line["test_r2"] < 1
        variance = line["test_loss"] / (1 - line["test_r2"])
        assert variance == pytest.approx(line["trivial_loss"], rel=1e-4)
    for (best,), (other,) in chosen(records):
        assert best["validation_r2"] > other["validation_r2"]
    assert max(point["test_r2_mean"] for arm in summary["arms"] for point in arm["points"]) > 0.2
    assert "best mean validation R^2" in page
    assert "accuracy" not in page.partition("Protocol")[0]

    # A kill leaves a part of a line; the trial that it belongs to runs again.
    file = folder / "numbers" / "results.jsonl"
    file.write_text(file.read_text()[:-200])
    again, summary_again, _ = swept(folder, "numbers")
    assert again.keys() == records.keys()
    for identity, line in again.items():
        assert {**line, "seconds": 0} == {**records[identity], "seconds": 0}
    assert summary_again == summary


@pytest.mark.slow
def test_labels_with_an_own_loss_are_judged_by_its_metric_of_which_lower_is_better(folder):
    records, summary, page = swept(folder, "labels")
    assert (summary["metric"], summary["complete"], len(records)) == ("label_error", True, 3 + 3)
    for line in records.values():
        error = line["validation_label_error"]
        assert error == pytest.approx(1 - line["validation_accuracy"], abs=1e-6)
    (final, *_) = (line for line in records.values() if line["phase"] == "final")
    assert final["trivial_loss"] is None
    assert final["evaluations"]["validation_label_error"][-1] == pytest.approx(
        final["validation_label_error"], abs=1e-6
    )
    reached = np.array(final["evaluations"]["validation_label_error"]) <= 0.4
    steps = np.array(final["evaluations"]["step"])
    assert final["steps_to_target"] == (steps[reached][0] if reached.any() else None)
    assert final["noise_scale"] is None or final["noise_scale"] > 0
    assert len(final["probes"]["noise_trace"]) == 2
    (cell,) = chosen(records)
    best, others = ([(line["steps_to_target"] or 99) for line in found] for found in cell)
    assert max(best) <= min(others)
    assert "Of label error, lower is better." in page
