"""The best evaluation has a checkpoint at any cadence, and a finite network is kept."""

import json
import re

import numpy as np
import pytest

from lbopt.cli import main
from lbopt.train import Checkpoints
from lbopt.workdir import read_json_lines

CADENCES = (
    "--config.eval_every_steps=2",
    "--config.checkpoint.every_steps=5",
    "--config.checkpoint.keep=1",
)


def test_the_best_evaluation_is_saved_though_no_checkpoint_was_due(train, tmp_path):
    assert train(tmp_path, *CADENCES) == 0
    scores = {
        line["step"]: line["eval/accuracy"]
        for line in read_json_lines(tmp_path / "metrics.jsonl")
        if "eval/accuracy" in line
    }
    best = max(scores, key=lambda step: scores[step])
    assert scores[best] > min(scores.values())
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        found = checkpoints.best_step()
        assert scores[found] == scores[best]
        assert not checkpoints.would_be_best({"eval/accuracy": scores[best]})
        assert checkpoints.would_be_best({"eval/accuracy": scores[best] + 0.01})
        assert not checkpoints.would_be_best({})


SPOILT = (
    "--config.eval_every_steps=6",
    "--config.checkpoint.every_steps=2",
    "--config.checkpoint.keep=2",
)


@pytest.fixture
def spoilt(train):
    """Return a function (workdir, *overrides) that trains 20 steps with NaN examples at step 8."""

    def spoil(step, state, batch):
        if step == 8:
            batch["image"] = batch["image"] * np.nan

    return lambda workdir, *overrides: train(workdir, *SPOILT, *overrides, before=spoil)


def test_a_run_whose_loss_is_nan_says_so_and_keeps_what_is_finite(spoilt, tmp_path, capsys, caplog):
    assert spoilt(tmp_path) == 0
    out, err = capsys.readouterr()
    # A library logs one line for each NaN.
    assert not [record for record in caplog.records if "NaN" in record.getMessage()]

    assert json.loads(out.splitlines()[0], parse_constant=pytest.fail)["train/loss"] is None
    said = [
        line for line in err.splitlines() if "finite" in line or "nan" in line.partition("  ")[0]
    ]
    assert len(said) == 2, said
    assert re.match("train/loss is nan at step 8, .*stop_at_nan", said[0])
    assert re.match(
        "the loss was not finite, first at step 8: the last finite network is checkpoint 6;",
        said[1],
    )

    text = (tmp_path / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert [line["step"] for line in lines if line["train/loss"] is None] == list(range(8, 21))
    assert lines[-1]["eval/accuracy"] is not None  # even NaN outputs have an accuracy

    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.steps() == [6, 18, 20]
        assert checkpoints.best_step() == checkpoints.latest_finite_step() == 6
        assert not checkpoints.would_be_best({"eval/accuracy": 1.0, "eval/loss": float("nan")})

    assert spoilt(tmp_path) == 0
    assert "the last finite network is checkpoint 6" in capsys.readouterr().err.splitlines()[-1]
    assert main(["report", f"--workdir={tmp_path}"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "The loss was not finite in 13 of 20 logged steps, first at step 8" in page


def test_a_run_may_end_at_the_first_nan(spoilt, tmp_path, capsys):
    assert spoilt(tmp_path, "--config.stop_at_nan=True") == 2
    (said,) = [
        line for line in capsys.readouterr().err.splitlines() if "nan" in line.partition("  ")[0]
    ]
    assert said.startswith("lbopt train: config.stop_at_nan = True: ")
    assert re.search(r"\b6\b", said)  # the last checkpoint's step
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest_step() == 6


def test_a_network_that_is_not_finite_is_never_saved_where_the_run_may_end(
    spoilt, tmp_path, capsys
):
    overrides = ("--config.stop_at_nan=True", "--config.log_every_steps=5")
    assert spoilt(tmp_path, *overrides) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("lbopt train: config.stop_at_nan = True: ")
    assert re.search(r"\b8\b.*\b6\b", line)  # this step, and the last checkpoint's


def test_checkpoints_in_the_way_are_refused_before_training(train, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    assert train(tmp_path / "run", "--config.num_epochs=0.5") == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_bytes(
        (tmp_path / "run" / "config.json").read_bytes()
    )
    (tmp_path / "other" / "checkpoints").write_text("a file")
    capsys.readouterr()
    assert train(tmp_path / "other", "--config.num_epochs=0.5") == 3
    assert "checkpoints" in capsys.readouterr().err
    assert not (tmp_path / "other" / "metrics.jsonl").exists()
