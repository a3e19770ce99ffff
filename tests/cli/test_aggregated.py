"""A run with an aggregator is evaluated and exported on other devices than it was trained on."""

import json

import pytest
import safetensors.numpy

from lbopt.cli import main

AGVM = ["name=agvm", "anchor=body", "modules=(('head','^Dense_1/'),('body',''))", "interval_steps=1", "start_step=0"]
RUNS = {"agvm": ("2", AGVM), "ef of groups": ("4", ["name=ef", "over=2", "fraction=0.2"])}


@pytest.mark.parametrize("name", RUNS)
def test_evaluated_and_exported_on_one_device(name, small, tmp_path, capsys):
    devices, fields = RUNS[name]
    flags = [*small[:-1], *(f"--config.aggregator.{field}" for field in fields), "--config.num_epochs=0.25"]
    flags += ["--config.schedule.warmup_rule=none"]
    flags += ["--config.checkpoint.every_steps=2", f"--workdir={tmp_path / 'run'}"]
    here, one = f"--config.parallel.num_devices={devices}", "--config.parallel.num_devices=1"
    assert main.main(["train", *flags, here]) == 0
    capsys.readouterr()
    scores = []
    for where in (here, one):
        assert main.main(["evaluate", *flags, where]) == 0
        scores.append(json.loads(capsys.readouterr().out))
    assert scores[1] == pytest.approx(scores[0], rel=1e-5)
    output = tmp_path / "exported"
    assert main.main(["export", f"--workdir={tmp_path / 'run'}", "--format=safetensors", f"--output={output}"]) == 0
    assert len(safetensors.numpy.load_file(next(output.glob("*.safetensors")))) > 4
