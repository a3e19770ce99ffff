"""The best evaluation has a checkpoint, wherever the cadences fall; a finished run lost nothing."""

import json

import pytest

from lbopt.cli import main
from lbopt.train.checkpoint import Checkpoints
from lbopt.train.writers import read_lines

CADENCES = ("--config.eval_every_steps=2", "--config.checkpoint.every_steps=5", "--config.checkpoint.keep=1")


def test_the_best_evaluation_is_saved_though_no_checkpoint_was_due(train, tmp_path):
    assert train(tmp_path, *CADENCES) == 0
    scores = {
        line["step"]: line["eval/accuracy"]
        for line in read_lines(tmp_path / "metrics.jsonl")
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


def test_metrics_that_are_not_numbers_are_null(train, tmp_path, capsys):
    overrides = (
        "--config.schedule.base_learning_rate=1e9",
        "--config.optimizer.name=momentum",
        "--config.num_epochs=0.5",
    )
    command = ["train", "--config=configs/digits_cnn.py:lamb-64", f"--workdir={tmp_path / 'run'}", *overrides]
    assert main.main([*command, "--config.parallel.num_devices=1"]) == 0
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert lines[-1]["train/loss"] is None
    assert json.loads(capsys.readouterr().out.splitlines()[0], parse_constant=pytest.fail)["train/loss"] is None
    assert main.main(["report", f"--workdir={tmp_path / 'run'}"]) == 0


def test_checkpoints_in_the_way_are_refused_before_training(train, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    assert train(tmp_path / "run", "--config.num_epochs=0.5") == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_bytes((tmp_path / "run" / "config.json").read_bytes())
    (tmp_path / "other" / "checkpoints").write_text("a file")
    capsys.readouterr()
    assert train(tmp_path / "other", "--config.num_epochs=0.5") == 3
    assert "checkpoints" in capsys.readouterr().err
    assert not (tmp_path / "other" / "metrics.jsonl").exists()
