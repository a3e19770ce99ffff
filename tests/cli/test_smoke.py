"""The smoke recipe of every published family: prepare, train, kill, resume, evaluate, report."""

import dataclasses
import json
import math
import re

import jax
import numpy as np
import pytest
from watched_step import WatchedStep

from lbopt.cli import _train, config_files, load_config, main
from lbopt.config import TrainConfig
from lbopt.recipes import build_run

PREPARED = ("generated_images", "mnist1d", "pydoc_squad")
ONE = ["--config.parallel.num_devices=1"]
TWO = ["--config.parallel.num_devices=2"]
DATA = ["--config.data.data_dir={data_dir}"]
IMAGES = [*DATA, "--config.data.reader_threads=2"]
SHORT = [
    "--config.global_batch_size=16",
    "--config.num_steps=4",
    "--config.schedule.warmup_steps=1.0",
    "--config.checkpoint.every_steps=2",
    "--config.log_every_steps=1",
]
"""Flags for recipes with as many epochs as a CPU has time for."""
FAMILIES = {
    "resnet50_lamb": [*TWO, *IMAGES, "--config.parallel.shard_update=True"],
    "resnet50_lars": [*ONE, *IMAGES],
    "resnet50_mlperf": [*ONE, *IMAGES],
    "efficientnet": [*ONE, *IMAGES, "--config.model.depth_coefficient=0.1"],
    "cifar10": [*ONE, *IMAGES],
    "bert_large_lamb": TWO,
    "bert_mlperf": ONE,
    "lstm_legw": ONE,
    "mnist": ONE,
    "mnist1d": [*ONE, *DATA],
    "fashion_mnist": [*ONE, "--config.model.width_coefficient=0.0625"],
    "squad": [*ONE, *DATA],
    "digits_cnn": [*ONE, *SHORT, "--config.model.widths=(4,)", "--config.model.hidden=8"],
    "digits_lstm": [*ONE, *SHORT, "--config.model.hidden=8"],
    "digits_resnet": [*ONE, *SHORT, "--config.model.width_coefficient=0.125"],
    "digits_efficientnet": [*ONE, *SHORT, "--config.model.depth_coefficient=0.1"],
    "decoder_lm": [*TWO, *SHORT, "--config.parallel.shard_update=True"],
    "pydoc_bert": [*ONE, *SHORT],
    "pydoc_lstm": [
        *ONE,
        *SHORT,
        "--config.model.width_coefficient=0.1",
        "--config.data.sequence_length=16",
    ],
}
"""Config file -> flags that fit it to this machine; three families shard their state."""
WHOLE_WAY = ("digits_cnn", "digits_lstm", "lstm_legw")
"""The families that go the whole way every day."""
REPORTED = ("resnet50_lamb", "bert_large_lamb", "lstm_legw", "squad")
"""One recipe for each kind of model; those of tests/report have all figures."""


class Killed(BaseException):
    """Ends a run the way a kill does: nothing is saved after it."""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Return a folder with the data sets that `lbopt prepare` makes without a network."""
    folder = tmp_path_factory.mktemp("data")
    for name in PREPARED:
        assert main(["prepare", name, f"--data_dir={folder}"]) == 0
    return folder


def stopping(run, step):
    """Return the run (and its later phases) that is killed before a step."""

    def before(state, batch):
        if int(state.step) + 1 == step:
            raise Killed

    later = run.next_phase and stopping(run.next_phase, step)
    watched = WatchedStep(run.train_step, before)
    return dataclasses.replace(run, train_step=watched, next_phase=later)


def drawn(shapes):
    """Return a state with parameters from NumPy; to compile the initialisation takes long."""
    rng = np.random.default_rng(0)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    params = jax.tree.map(
        lambda leaf: rng.normal(0, 0.1, leaf.shape).astype(leaf.dtype), shapes.params
    )
    return jax.device_put(
        zeros.replace(params=params), jax.tree.map(lambda leaf: leaf.sharding, shapes)
    )


def flags_of(family, configs, data_dir):
    config = f"--config={configs / family}.py:smoke"
    return [config, *(flag.format(data_dir=data_dir) for flag in FAMILIES[family])]


def test_every_family_is_here(configs):
    here = [file for file in config_files(configs) if file.parent == configs]
    assert {file.stem for file in here} == set(FAMILIES)


@pytest.mark.everyday("resnet50_lamb", "bert_large_lamb", "squad", "digits_resnet", "pydoc_*")
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - set(WHOLE_WAY)))
def test_a_family_is_built_and_takes_steps(family, configs, data_dir):
    """The learning rate of the first step is zero in a warmup."""
    config, *overrides = flags_of(family, configs, data_dir)
    run = build_run(load_config(config.removeprefix("--config="), overrides, TrainConfig))
    state = drawn(run.shapes())
    before = jax.device_get(state.params)
    for number in range(2):
        state, metrics = jax.block_until_ready(run.train_step(state, run.batches[number]))
    assert int(state.step) == 2
    assert all(np.isfinite(value).all() for value in jax.tree.leaves(metrics))
    after = jax.device_get(state.params)
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, after)
    assert any(jax.tree.leaves(changed))


@pytest.mark.everyday(*WHOLE_WAY)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_smoke_row_goes_the_whole_way(family, configs, data_dir, tmp_path, capsys, monkeypatch):
    workdir = tmp_path / "run"
    config, *overrides = flags_of(family, configs, data_dir)
    flags = [config, f"--workdir={workdir}", *overrides]
    run = build_run(load_config(config.removeprefix("--config="), overrides, TrainConfig))
    last = run.phases()[-1].last_step
    kills = [phase.first_step + phase.num_steps // 2 + 1 for phase in run.phases()]

    for step in kills:
        monkeypatch.setattr(_train, "build_run", lambda config, step=step, **_: stopping(run, step))
        with pytest.raises(Killed):
            main(["train", *flags])
        assert lines(workdir)[-1]["step"] == step - 1

    monkeypatch.setattr(_train, "build_run", lambda config, **_: run)
    capsys.readouterr()
    assert main(["train", *flags]) == 0
    resumed = re.search(r"resuming at step (\d+)", capsys.readouterr().err)
    assert resumed is not None
    assert run.phases()[-1].first_step < int(resumed[1]) < last

    found = lines(workdir)
    assert [line["step"] for line in found] == list(range(1, last + 1))
    assert all(line[name] is not None for line in found for name in line)

    assert main(["evaluate", *flags]) == 0
    scores = json.loads(capsys.readouterr().out)
    evaluated = {
        name.partition("/")[2]: value
        for name, value in found[-1].items()
        if name.startswith("eval/")
    }
    assert evaluated == pytest.approx(
        {name: scores[f"validation/{name}"] for name in evaluated}, rel=1e-5
    )
    assert all(math.isfinite(value) for value in scores.values())

    if family not in REPORTED:
        return
    assert main(["report", f"--workdir={workdir}"]) == 0
    assert (workdir / "report.html").stat().st_size > 1000
    assert len(list(workdir.glob("*.png"))) > 0


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
