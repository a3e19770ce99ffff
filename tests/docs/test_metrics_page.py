"""The pages on metrics and on the workdir name all that a run and a study write."""

import dataclasses
import json
import pathlib
import re

import pytest

import lbopt
from lbopt.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig
from lbopt.sweep import FinishedTrial
from lbopt.transforms import is_per_layer

ROOT = pathlib.Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
METRICS = (REFERENCE / "metrics.md").read_text()
WORKDIR = (REFERENCE / "workdir.md").read_text()
PLAN = ROOT / "configs" / "sweeps" / "imagenet_limit-plan.json"
STUDIES = sorted({*(ROOT / "configs" / "sweeps").glob("*.json")} - {PLAN})


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Return the workdir of a run whose optimizer measures all that it can."""
    folder = tmp_path_factory.mktemp("run")
    optimizer = OptimizerConfig(
        "lamb",
        max_grad_norm=1.0,
        monitor_layers=True,
        skip_limit=3,
        spike_factor=10.0,
        track_noise_scale=True,
    )

    lbopt.run_training(
        lbopt.Problem(DataConfig("digits"), ModelConfig("mlp", widths=(8,))),
        optimizer,
        0.01,
        global_batch_size=256,
        num_epochs=1,
        parallel=ParallelConfig(num_microsteps=2, num_devices=1),
        target_metric="eval/accuracy",
        target_value=0.01,
        workdir=folder,
        log_every_steps=1,
    )

    return folder


def shown(key):
    """Return a key as the page writes it: PATH for the parameter of a layer."""
    kind, _, name = key.partition("/")
    return f"{kind}/{name.partition('/')[0]}/PATH" if is_per_layer(name) else key


def test_each_key_of_a_run_is_on_the_page(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    keys = {key for line in lines for key in line}
    assert {"train/noise_scale", "train/skipped/spikes", "target/seconds"} <= keys
    assert [key for key in sorted(keys) if f"`{shown(key)}`" not in METRICS] == []


def test_each_metric_of_an_optimizer_is_on_the_page():
    """`optimizer_metrics` lists them in its docstring."""
    listed = lbopt.optimizer_metrics.__doc__.split("Returns:")[1].split("A second value")[0]
    names = re.findall(r"`([a-z_]+(?:/[a-z_<>]+)?)`", listed)
    assert len(names) > 10
    for name in names:
        place = name.replace("<path>", "PATH").replace("<module>", "MODULE")
        assert f"`train/{place}`" in METRICS, name


def test_each_file_of_a_run_is_on_the_page(workdir):
    config = json.loads((workdir / "config.json").read_text())
    files = {f"{path.name}/" if path.is_dir() else path.name for path in workdir.iterdir()}
    files = {name.replace("checkpoints/", "checkpoints/STEP/") for name in files if name[0] != "."}
    assert "config.json" in files
    assert [name for name in sorted({*config, *files}) if f"`{name}`" not in WORKDIR] == []


def test_each_field_of_a_trial_is_on_the_page():
    (scores,) = {field.name for field in dataclasses.fields(FinishedTrial)} & {"scores"}
    names = [field.name for field in dataclasses.fields(FinishedTrial) if field.name != scores]
    assert [name for name in names if f"`{name}`" not in WORKDIR] == []


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_each_field_of_a_summary_is_on_the_page(file):
    summary = json.loads(file.read_text())
    arms = summary["arms"]
    fields = {*summary, *arms[0], *(name for arm in arms for name in arm["points"][0])}
    scores = re.compile(rf"\w+_{summary['metric']}_(mean|std|min|max)")
    others = [name for name in fields if summary["metric"] == "accuracy" or not scores.match(name)]
    assert [name for name in sorted(others) if f"`{name}`" not in WORKDIR] == []
