"""A run is evaluated and exported on other devices than those it was trained on."""

import json

import pytest
import safetensors.numpy

from lbopt.cli import main

AGVM = [
    "aggregator.name=agvm",
    "aggregator.anchor=body",
    "aggregator.modules=(('head','^Dense_1/'),('body',''))",
    "aggregator.interval_steps=1",
    "aggregator.start_step=0",
]
PARTS = [
    "model.batch_norm_scope=replicas:2",
    "parallel.num_microsteps=4",
    "optimizer.track_noise_scale=True",
]
RUNS = {
    "agvm": ("2", AGVM),
    "ef of groups": ("4", ["aggregator.name=ef", "aggregator.over=2", "aggregator.fraction=0.2"]),
    "parts of the batch": ("4", [*PARTS, "optimizer.ema_decay=0.9"]),
}
ELSEWHERE = {
    "one": ["parallel.num_devices=1"],
    "three": ["parallel.num_devices=3", "eval_global_batch_size=16", "checkpoint.keep=1"],
    "more than there are": [
        "parallel.num_devices=64",
        "global_batch_size=100",
        "parallel.num_microsteps=1",
    ],
    "other groups": ["model.batch_norm_scope=local", "parallel.num_devices=1"],
}
"""Settings that do not fit the training but are valid for an evaluation."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_evaluated_and_exported_on_one_device(name, small, tmp_path, capsys):
    devices, fields = RUNS[name]
    flags = [*small[:-1], *(f"--config.{field}" for field in fields), "--config.num_epochs=0.25"]
    flags += ["--config.schedule.warmup_rule=none"]
    flags += ["--config.checkpoint.every_steps=2", f"--workdir={tmp_path / 'run'}"]
    here = f"--config.parallel.num_devices={devices}"

    assert main(["train", *flags, here]) == 0
    capsys.readouterr()

    scores = []
    elsewhere = ELSEWHERE if name == "parts of the batch" else ["one"]
    for where in (
        [here],
        *([f"--config.{field}" for field in ELSEWHERE[place]] for place in elsewhere),
    ):
        assert main(["evaluate", *flags, *where]) == 0
        scores.append(json.loads(capsys.readouterr().out))

    for others in scores[1:]:
        assert others == pytest.approx(scores[0], rel=1e-5)

    output = tmp_path / "exported"
    assert (
        main(
            [
                "export",
                f"--workdir={tmp_path / 'run'}",
                "--format=safetensors",
                f"--output={output}",
            ]
        )
        == 0
    )
    assert len(safetensors.numpy.load_file(next(output.glob("*.safetensors")))) > 4
