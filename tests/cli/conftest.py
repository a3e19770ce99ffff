"""The command in this process, its output, and config files for it."""

import hashlib
import pathlib
import textwrap

import pytest

from lbopt._shown import one_line
from lbopt.cli import _main, main

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
def refusing(lbopt, monkeypatch):
    """Return a function that runs a refused command and raises the error that it has printed.

    The error is the only line of the command's output, or the last of its `lines` (None: any).
    """
    ended_by = []
    print_error = _main._print_error

    def note(name, error):
        ended_by.append(error)
        print_error(name, error)

    monkeypatch.setattr(_main, "_print_error", note)

    def run(*arguments, lines=1):
        ended_by.clear()
        code, out, err = lbopt(*arguments)
        assert ended_by, (code, err)
        (error,) = ended_by
        assert (code, out) == (error.exit_code, "")
        assert err.endswith(one_line(f"lbopt {arguments[0]}: {error}") + "\n")
        assert lines is None or err.count("\n") == lines, err
        assert "Traceback" not in err
        raise error

    return run


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
