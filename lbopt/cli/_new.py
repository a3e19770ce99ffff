"""`lbopt new`: a small project of your own that runs as it stands."""

from __future__ import annotations

from collections.abc import Sequence

from lbopt import paths
from lbopt._shown import shell_line, show
from lbopt.cli import _flags
from lbopt.errors import EnvironmentProblem, require

FLAGS = {"folder": "folder to make; lbopt new FOLDER is the same"}

_DATA = '''"""The data: change `load` to read yours."""

import numpy as np
from lbopt import Splits


def load(examples=1500, seed=0):
    """Return two spirals of points in the plane, split for training, validation and test.

    Any names do. Integers in `label` (or target, y, class) are classes, floats are numbers.
    """
    rng = np.random.default_rng(seed)
    label = rng.integers(2, size=examples)
    radius = rng.uniform(0.2, 2.0, examples)
    angle = 3 * radius + np.pi * label + rng.normal(0, 0.15, examples)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    arrays = {"points": points.astype(np.float32), "label": label.astype(np.int32)}

    # A file needs no function: data="my.npz" or "my.csv" draws the splits by a seed.
    parts = np.split(np.arange(examples), [examples * 8 // 10, examples * 9 // 10])
    return Splits(*({name: array[part] for name, array in arrays.items()} for part in parts))
'''

_MODEL = '''"""The model: a module of Linen, NNX, Equinox or Haiku, or a function that makes one."""

import flax.linen as nn


class Net(nn.Module):
    """A multilayer perceptron.

    lbopt fills `outputs` by the data. A call may take `train`, for dropout and batch norm.
    """

    outputs: int
    widths: tuple = (64, 64)

    @nn.compact
    def __call__(self, x):
        for width in self.widths:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.outputs)(x)
'''

_CONFIG = '''"""One run: lbopt train --config=config.py --workdir=runs/one"""

from lbopt.config import OptimizerConfig, ScheduleConfig, TrainConfig


def get_config(row=""):
    return TrainConfig(
        name="spirals",
        data="data.py:load",
        model="model.py:Net",
        optimizer=OptimizerConfig("lamb", weight_decay=0.01),
        # lbopt suggest --config=config.py measures numbers for your problem.
        schedule=ScheduleConfig(
            base_learning_rate=0.02, base_batch_size=32, base_warmup_epochs=0.5
        ),
        global_batch_size=128,
        num_epochs=30,
        eval_every_epochs=5,
    )
'''

_STUDY = '''"""How far does the batch go? lbopt sweep --config=study.py --workdir=runs/study"""

import config
from lbopt.config import Arm, OptaxConfig, ScheduleConfig, SearchConfig, SweepConfig


def get_config(row=""):
    train = config.get_config()
    return SweepConfig(
        name="spirals",
        train=train,
        arms=(
            Arm("LAMB + LEGW", train.optimizer, train.schedule),
            Arm("Lion", OptaxConfig("lion"), ScheduleConfig(0.001, base_batch_size=32)),
        ),
        global_batch_sizes=(32, 128, 512),
        search=SearchConfig(learning_rate_factors=(0.5, 1.0, 2.0)),
        final_seeds=(100, 101, 102),
    )
'''

_TEST = '''"""pytest: the run learns."""

import pathlib

import lbopt
from lbopt.cli import load_config
from lbopt.config import TrainConfig


def test_the_run_learns():
    path = pathlib.Path(__file__).with_name("config.py")
    config = load_config(str(path), [], TrainConfig)
    problem = lbopt.Problem(config.data, config.model, config.loss)
    result = lbopt.run_training(
        problem, config.optimizer, config.schedule, global_batch_size=128, num_epochs=30
    )
    assert result.evaluate("validation")["accuracy"] > 0.9
'''

_README = """# A project with lbopt

    lbopt train    --config=config.py --workdir=runs/one
    lbopt evaluate --config=config.py --workdir=runs/one
    lbopt suggest  --config=config.py
    lbopt sweep    --config=study.py  --workdir=runs/study
    lbopt report   --workdir=runs/study
    pytest

`data.py` and `model.py` are yours to change. Any field can be set on the command line, for instance
`--config.global_batch_size=512 --config.model=model.py:OtherNet`.
"""

FILES = {
    "config.py": _CONFIG,
    "data.py": _DATA,
    "model.py": _MODEL,
    "study.py": _STUDY,
    "test_project.py": _TEST,
    "README.md": _README,
}


def run(argv: Sequence[str]) -> None:
    """Write a project into a new or an empty folder.

    Raises:
      UserError: If the folder holds something, or is a file.
      EnvironmentProblem: If it cannot be written.
    """
    given, _ = _flags.parse("new", argv, FLAGS, words=("FOLDER",))
    named = given.get("FOLDER") or given.get("folder", "")
    require(named, "FOLDER", named, "name the folder to make: lbopt new FOLDER", code="missing")
    folder = paths.local(named, "--folder")
    fix = "it is a file; give a new folder"
    require(not folder.is_file(), "--folder", str(folder), fix, code="exists")
    fix = "it is not empty; give a new folder"
    empty = not folder.is_dir() or not any(folder.iterdir())
    require(empty, "--folder", str(folder), fix, code="exists")

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in FILES.items():
            (folder / name).write_text(text)
    except OSError as error:
        fix = f"it cannot be written ({error.strerror}); give another folder"
        raise EnvironmentProblem("--folder", str(folder), fix, code="resource") from error
    show(*(str(folder / name) for name in FILES), "")
    show(shell_line(["cd", str(folder)]))
    show("lbopt train --config=config.py --workdir=runs/one")
