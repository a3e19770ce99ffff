"""A study small enough to run in seconds, run once for all tests."""

import json
import subprocess
import sys

import pytest

from lbopt.config import Arm, ModelConfig, OptimizerConfig, ScheduleConfig, SweepConfig, TrainConfig
from lbopt.recipes.problem import make_problem
from lbopt.sweep import trials


def make_config(**changes):
    legw = {"base_batch_size": 64, "warmup_rule": "legw", "base_warmup_epochs": 0.125}
    config = SweepConfig(
        name="tiny",
        train=TrainConfig(num_epochs=3.0, model=ModelConfig("cnn", (4, 8), 16)),
        arms=(
            Arm(
                "momentum", OptimizerConfig("momentum"), ScheduleConfig(0.05, scaling_rule="linear", warmup_rule="none")
            ),
            Arm("lamb", OptimizerConfig("lamb", weight_decay=0.01), ScheduleConfig(0.02, **legw)),
        ),
        global_batch_sizes=(128, 1024),
        learning_rate_factors=(0.5, 1.0, 2.0),
        search_seeds=(0,),
        final_seeds=(7, 8),
        trials_per_program=2,
    )
    for name, value in changes.items():
        setattr(config, name, value)
    config.validate()
    return config


@pytest.fixture(scope="session")
def config():
    return make_config()


@pytest.fixture(scope="session")
def problem(config):
    return make_problem(config.train.data, config.train.model)


@pytest.fixture(scope="session")
def cells(config, problem):
    return trials.make_cells(config, len(problem.splits.train))


CONFIG_FILE = """
import importlib.util
spec = importlib.util.spec_from_file_location("tiny_study", {here!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)


def get_config(arg=""):
    return module.make_config()
"""


@pytest.fixture(scope="session")
def config_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("configs") / "tiny.py"
    file.write_text(CONFIG_FILE.format(here=__file__))
    return file


@pytest.fixture(scope="session")
def lbopt_sweep(config_file):
    """Return a function that runs `lbopt sweep` in a process of its own."""

    def start(workdir, *overrides):
        command = [
            sys.executable,
            "-m",
            "lbopt",
            "sweep",
            f"--config={config_file}",
            f"--workdir={workdir}",
            *overrides,
        ]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


@pytest.fixture(scope="session")
def finished(tmp_path_factory, lbopt_sweep):
    """A workdir in which the study ran to its end, and what it printed."""
    workdir = tmp_path_factory.mktemp("study") / "workdir"
    process = lbopt_sweep(workdir)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return workdir, output, errors


def read_rows(workdir):
    return [json.loads(line) for line in (workdir / "results.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def rows(finished):
    return read_rows(finished[0])
