"""A study small enough to run in seconds, run once for all tests."""

import json
import subprocess
import sys

import pytest
import tiny_study
from forked import Forked
from tiny_study import make_config

from lbopt.sweep import make_cells, make_problems


@pytest.fixture(scope="session")
def config():
    return make_config()


@pytest.fixture(scope="session")
def cells(config):
    return make_cells(config, make_problems(config))


@pytest.fixture(scope="session")
def problem(cells):
    return cells[0].problem


CONFIG_FILE = """
import importlib.util
spec = importlib.util.spec_from_file_location("tiny_study", {here!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)


def get_config(arg=""):
    # Trials long enough to be killed in.
    config = module.make_config()
    config.train.num_epochs = 60.0
    return config
"""


@pytest.fixture(scope="session")
def config_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("configs") / "tiny.py"
    file.write_text(CONFIG_FILE.format(here=tiny_study.__file__))
    return file


@pytest.fixture(scope="session")
def lbopt_sweep(config_file):
    """Return a function that runs `lbopt sweep` in a separate process."""

    def start(workdir, *overrides, popen=Forked):
        command = [
            sys.executable,
            "-m",
            "lbopt",
            "sweep",
            f"--config={config_file}",
            f"--workdir={workdir}",
            *overrides,
        ]
        return popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


@pytest.fixture(scope="session")
def finished(tmp_path_factory, lbopt_sweep):
    """Return the workdir of a completed study, and the study's output."""
    workdir = tmp_path_factory.mktemp("study") / "workdir"
    process = lbopt_sweep(workdir, popen=subprocess.Popen)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return workdir, output, errors


def read_rows(workdir):
    return [json.loads(line) for line in (workdir / "results.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def rows(finished):
    return read_rows(finished[0])
