"""The smoke row of every published family, end to end: prepare, train, kill, resume, evaluate, report."""

import dataclasses
import json
import math

import pytest

from lbopt.cli import main
from lbopt.cli.arguments import load_config
from lbopt.config import TrainConfig
from lbopt.recipes import build

pytestmark = pytest.mark.usefixtures("quickly_compiled")
PREPARED = ("generated_images", "pydoc_squad")
IMAGES = ["--config.data.reader_threads=2"]
FAMILIES = {
    "resnet50_lamb": IMAGES,
    "resnet50_lars": IMAGES,
    "resnet50_mlperf": IMAGES,
    "efficientnet": IMAGES,
    "bert_large_lamb": [],
    "bert_mlperf": [],
    "lstm_legw": [],
    "mnist": [],
    "squad": [],
}
"""Config file -> flags that fit it to this machine."""


class Killed(BaseException):
    """Ends a run as a kill does: nothing is saved after it."""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Return a folder with the data sets that `lbopt prepare` makes without a network."""
    folder = tmp_path_factory.mktemp("data")
    for name in PREPARED:
        assert main.main(["prepare", name, f"--data_dir={folder}"]) == 0
    return folder


def stopping(run, step):
    """Return the run (and its later phases) that is killed before a step."""

    def killed(state, batch):
        if int(state.step) + 1 == step:
            raise Killed
        return run.train_step(state, batch)

    killed.lower = run.train_step.lower
    return dataclasses.replace(run, train_step=killed, then=run.then and stopping(run.then, step))


def test_every_family_is_here(configs):
    with_data_of_their_own = {
        "digits_cnn",
        "digits_efficientnet",
        "digits_lstm",
        "digits_resnet",
        "pydoc_bert",
        "pydoc_lstm",
    }
    assert {file.stem for file in configs.glob("*.py")} == set(FAMILIES) | with_data_of_their_own


@pytest.mark.parametrize("family", FAMILIES)
def test_a_smoke_row_goes_the_whole_way(family, configs, data_dir, tmp_path, capsys, monkeypatch):
    workdir = tmp_path / "run"
    flags = [
        f"--config={configs / family}.py:smoke",
        f"--workdir={workdir}",
        f"--config.data.data_dir={data_dir}",
        "--config.parallel.num_devices=2",
        *FAMILIES[family],
    ]
    run = build.build(load_config(flags[0].removeprefix("--config="), flags[2:], TrainConfig))
    last = run.phases()[-1].last_step
    kills = [phase.first_step + phase.num_steps // 2 + 1 for phase in run.phases()]
    for step in kills:
        monkeypatch.setattr(build, "build", lambda config, step=step: stopping(run, step))
        with pytest.raises(Killed):
            main.main(["train", *flags])
        assert lines(workdir)[-1]["step"] == step - 1
    monkeypatch.setattr(build, "build", lambda config: run)
    capsys.readouterr()
    assert main.main(["train", *flags]) == 0
    assert "resuming at step" in capsys.readouterr().err
    found = lines(workdir)
    assert [line["step"] for line in found] == list(range(1, last + 1))
    assert all(line[name] is not None for line in found for name in line)
    assert main.main(["evaluate", *flags]) == 0
    scores = json.loads(capsys.readouterr().out)
    evaluated = {name.partition("/")[2]: value for name, value in found[-1].items() if name.startswith("eval/")}
    assert evaluated == pytest.approx({name: scores[f"validation/{name}"] for name in evaluated}, rel=1e-5)
    assert all(math.isfinite(value) for value in scores.values())
    assert main.main(["report", f"--workdir={workdir}"]) == 0
    assert (workdir / "report.html").stat().st_size > 1000
    assert len(list(workdir.glob("*.png"))) > 0


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
