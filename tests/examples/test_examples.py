"""The examples: each from its data to a killed and resumed run and its pages, and its study."""

import json
import pathlib
import runpy
import shutil
import signal
import subprocess
import sys

import pytest
from safetensors.numpy import load_file

from lbopt.cli import main

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = sorted(file.parent.name for file in (ROOT / "examples").glob("*/config.py"))
KILLED_RUN = ROOT / "tests" / "train" / "killed_run.py"
STEPS = 6
RUN = (
    f"--config.num_steps={STEPS}",
    "--config.global_batch_size=32",
    "--config.eval_every_steps=3",
    "--config.checkpoint.every_steps=2",
    "--config.log_every_steps=1",
    "--config.parallel.num_devices=1",
    "--config.schedule.base_warmup_epochs=0",
)
STUDY = (
    "--config.train.num_steps=40",
    "--config.global_batch_sizes=(16, 32)",
    "--config.search.learning_rate_factors=(1.0,)",
    "--config.final_seeds=(7,)",
)


@pytest.fixture
def example(request, tmp_path, monkeypatch):
    """Copy an example to a folder of its own, and make its data there."""
    folder = tmp_path / request.param
    shutil.copytree(ROOT / "examples" / request.param, folder)
    monkeypatch.chdir(folder)
    runpy.run_path("data.py", run_name="__main__")
    return folder


def lines(workdir):
    """Return the lines of metrics.jsonl without times."""
    found = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [{n: x for n, x in line.items() if not n.startswith("perf/")} for line in found]


@pytest.mark.parametrize("name", FOLDERS)
def test_an_example_is_at_most_60_lines(name):
    text = [file.read_text() for file in (ROOT / "examples" / name).glob("*.py")]
    assert sum(bool(line.strip()) for one in text for line in one.splitlines()) <= 60


@pytest.mark.process
@pytest.mark.everyday("table_linen")
@pytest.mark.parametrize("example", FOLDERS, indirect=True)
def test_an_example_runs_from_end_to_end(example, tmp_path, monkeypatch, capsys):
    train = ["train", "--config=config.py", *RUN]
    died = subprocess.run(
        [sys.executable, str(KILLED_RUN), "step", "5", *train, "--workdir=runs/one"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert main([*train, "--workdir=runs/one"]) == 0
    assert main([*train, "--workdir=runs/whole"]) == 0
    assert lines(example / "runs/one") == lines(example / "runs/whole")

    # Everything that comes after training needs nothing but the workdir, from any folder.
    monkeypatch.chdir(tmp_path)
    workdir = f"--workdir={example}/runs/one"
    capsys.readouterr()
    assert main(["evaluate", workdir]) == 0
    scores = json.loads(capsys.readouterr().out)
    last = lines(example / "runs/one")[-1]
    evaluated = {n: x for n, x in last.items() if n.startswith("eval/")}
    assert evaluated
    for name, value in evaluated.items():
        assert scores[f"validation/{name.removeprefix('eval/')}"] == pytest.approx(value, rel=1e-5)
    assert main(["export", workdir, "--format=safetensors", "--output=exported"]) == 0
    (file,) = pathlib.Path("exported").iterdir()
    assert any(name.startswith("params/") for name in load_file(file))
    assert main(["report", workdir]) == 0
    assert main(["diff", f"{example}/runs/one"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("example", FOLDERS, indirect=True)
def test_the_study_of_an_example(example):
    sweep = ["sweep", "--config=config.py:study", "--workdir=runs/study", *STUDY]
    assert main(sweep) == 0
    results = (example / "runs/study/results.jsonl").read_text()
    assert len(results.splitlines()) == 2 * 2 * 2
    assert main(sweep) == 0  # nothing is run again
    assert (example / "runs/study/results.jsonl").read_text() == results
    assert (example / "runs/study/report.html").exists()


@pytest.mark.tpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("example", FOLDERS, indirect=True)
def test_an_example_is_planned(example):
    words = ["plan", "--config=config.py", "--topology=v5e:2x4", "--output=plan.json"]
    flags = [flag for flag in RUN if "num_devices" not in flag]
    assert main([*words, *flags]) == 0
    assert json.loads((example / "plan.json").read_text())["fits"]
