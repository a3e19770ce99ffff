"""The command in this process, its output, and config files for it."""

import functools
import hashlib
import pathlib
import textwrap

import pytest
from refusal import run_refused

from lbopt.cli import main

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="session")
def configs():
    """Return the folder of the configs that ship with the checkout."""
    return CONFIGS


@pytest.fixture
def lbopt(capsys):
    """Return a function (*arguments) -> exit code, standard output, standard error."""

    def run(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def refusing(capsys):
    """Return `run_refused` of the command: a function (*arguments, lines=1) that raises."""
    return functools.partial(run_refused, capsys)


@pytest.fixture
def config_file(tmp_path):
    """Return a function source -> a new config file outside of any workdir."""

    def write(source):
        folder = tmp_path / "config_files"
        folder.mkdir(exist_ok=True)
        file = folder / f"config_{len(list(folder.iterdir()))}.py"
        file.write_text(textwrap.dedent(source))
        return file

    return write


@pytest.fixture
def fingerprint():
    """Return a function folder -> {path: digest} of all its files."""

    def read(folder):
        return {
            path: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
            for path in sorted(folder.rglob("*"))
        }

    return read


@pytest.fixture(scope="session")
def small():
    """Return the flags of `lbopt train` for a run of 16 steps on one device."""
    return [
        f"--config={CONFIGS / 'digits_cnn.py'}:smoke",
        "--config.model.widths=(4,)",
        "--config.model.hidden=8",
        "--config.parallel.num_devices=1",
    ]


@pytest.fixture(scope="session")
def trained(small, tmp_path_factory):
    """Return the workdir of a finished run; tests must not change it."""
    workdir = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", *small, f"--workdir={workdir}"]) == 0
    return workdir
