"""Every command works with what `scripts/quickstart` installs, and names a missing extra."""

import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
ABSENT = ("cv2", "simplejpeg", "tensorflow_datasets", "torch", "transformers", "tensorflow")
BLOCK = f"""
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Absent())
"""
"""Code that hides packages. (SciPy does not accept None in their place in sys.modules.)"""


def python(code):
    return subprocess.run(
        [sys.executable, "-c", BLOCK + code], capture_output=True, text=True, timeout=120
    )


def test_every_command_is_there_without_the_packages_of_other_extras():
    code = "import importlib; from lbopt.cli import _main; import lbopt.recipes._build;"
    code += "[importlib.import_module(f'lbopt.cli._{name}') for name in _main.COMMANDS]"
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_the_writer_of_event_files_is_imported_without_pytorch():
    code = "import sys; from lbopt.cli import _process; _process.import_tensorboard_writer();"
    code += "import lbopt.workdir._tensorboard; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.everyday("command0*", "command2*")
@pytest.mark.parametrize(
    ("command", "extra", "code"),
    [
        (
            ["train", f"--config={CONFIGS}/resnet50_lamb.py:smoke", "--workdir=nowhere"],
            "pip install 'lbopt[images]'",
            2,
        ),
        (
            ["train", f"--config={CONFIGS}/squad.py:smoke", "--workdir=nowhere"],
            "lbopt prepare pydoc_squad",
            3,
        ),
        (["prepare", "generated_images"], "pip install 'lbopt[", 2),
    ],
)
def test_what_is_missing_is_one_line(command, extra, code, tmp_path):
    """No restart installs a package, so that a supervisor must not repeat the command: code 2."""
    command = [*command, f"--{'config.data.' if command[0] == 'train' else ''}data_dir={tmp_path}"]
    done = python(f"from lbopt.cli import main; sys.exit(main({command!r}))")
    assert done.returncode == code, done.stderr
    assert extra in done.stderr
    assert len(done.stderr.splitlines()) == 1
