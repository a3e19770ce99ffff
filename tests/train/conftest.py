"""A run of 20 steps, a second long when compiled; its command, states and logged lines."""

import dataclasses
import functools
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from forked import Forked
from jobs import BRIEF, FILE, start  # noqa: F401  a fixture
from watched_step import WatchedStep

from lbopt import tree
from lbopt.cli import _train, load_config, main
from lbopt.config import TrainConfig
from lbopt.recipes import build_run
from lbopt.train import Checkpoints, _loop

SMALL = (*BRIEF, "--config.checkpoint.keep=10", "--config.parallel.num_devices=1")


@functools.cache
def _load(overrides):
    return load_config(f"{FILE}:lamb-64", _flags(overrides), TrainConfig)


def _flags(overrides):
    """Return the flags of the short run, followed by the given ones.

    If the given flags set epochs between evaluations, steps between evaluations are left out.
    """
    by_epochs = any(flag.startswith("--config.eval_every_epochs=") for flag in overrides)
    small = [flag for flag in SMALL if not (by_epochs and "eval_every_steps" in flag)]
    return [*small, *overrides]


@pytest.fixture(scope="session")
def config_of():
    """Return a function (*overrides) -> the config."""
    return lambda *overrides: _load(overrides)


@pytest.fixture(scope="session")
def plan_of():
    """Return a function (*overrides) -> the run; its programs are compiled once a session."""
    return functools.cache(lambda *overrides: build_run(_load(overrides)))


@pytest.fixture(scope="session")
def command():
    """Return a function (workdir, *overrides) -> arguments of `lbopt` that train there."""
    return lambda workdir, *overrides: [
        "train",
        f"--config={FILE}:lamb-64",
        f"--workdir={workdir}",
        *_flags(overrides),
    ]


@pytest.fixture
def train(command, plan_of, monkeypatch):
    """Return a function (workdir, *overrides, before=...) -> exit code of `lbopt train`.

    `before(step, state, batch)` is called before every training step, with its number.
    """

    def run(workdir, *overrides, before=None):
        plan = plan_of(*overrides)
        if before is not None:
            plan = dataclasses.replace(plan, train_step=_watched(plan.train_step, before))
        with monkeypatch.context() as patch:
            patch.setattr(_train, "build_run", lambda config, **_: plan)
            return main(command(workdir, *overrides))

    return run


def _watched(train_step, before):
    return WatchedStep(train_step, lambda state, batch: before(int(state.step) + 1, state, batch))


@pytest.fixture(scope="session")
def bits():
    """Return a function tree -> {leaf name: (dtype, shape, bytes)}."""

    def read(whole):
        arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(whole)]
        named = zip(tree.leaf_names(whole), arrays, strict=True)
        return {name: (str(array.dtype), array.shape, array.tobytes()) for name, array in named}

    return read


@pytest.fixture(scope="session")
def saved_state(plan_of):
    """Return a function (workdir, *overrides, step=None) -> the state of a step, or the newest."""

    def restore(workdir, *overrides, step=None):
        plan = plan_of(*overrides)
        with Checkpoints(workdir, keep=100) as checkpoints:
            step = checkpoints.latest_step() if step is None else step
            return checkpoints.restore(plan.shapes(), step)

    return restore


@pytest.fixture(scope="session")
def logged():
    """Return a function workdir -> lines of metrics.jsonl, without values that depend on time."""

    def read(workdir):
        lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        return [
            {name: value for name, value in line.items() if not name.startswith("perf/")}
            for line in lines
        ]

    return read


@pytest.fixture(scope="session")
def reference(plan_of, tmp_path_factory):
    """Return a function (*overrides) -> workdir of an uninterrupted run."""

    @functools.cache
    def run(*overrides):
        workdir = tmp_path_factory.mktemp("uninterrupted")
        _loop.train(plan_of(*overrides), workdir)
        return workdir

    return run


@pytest.fixture(scope="session")
def start_process():
    """Return a function (*arguments of Python, stdout=False) -> a process with pipes."""

    def begin(*arguments, stdout=False):
        output = subprocess.PIPE if stdout else subprocess.DEVNULL
        return Forked(
            [sys.executable, *map(str, arguments)], stdout=output, stderr=subprocess.PIPE, text=True
        )

    return begin
