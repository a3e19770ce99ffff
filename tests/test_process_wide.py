"""Another program may import and use the library, which changes nothing process-wide."""

import importlib.util
import os
import subprocess
import sys

import pytest

PROGRAM = '''
import asyncio, contextlib, importlib, logging, os, pathlib, pkgutil, signal, sys, warnings

sys.modules["torch"] = None  # it takes longer than all the rest
import tensorboardX
del sys.modules["torch"]
# These change settings themselves when they are imported.
import cv2, flax, grain, jax, optax, orbax.checkpoint, scipy.optimize, scipy.stats
import jax.numpy as jnp

LOGGERS = ("", "absl", "jax", "tensorboardX.x2num")

def settings():
    """What one part of a program can change for all others."""
    return {
        "environment": dict(os.environ),
        "jax": dict(jax.config.values),
        "warnings": list(warnings.filters),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "event loops": type(asyncio.get_event_loop_policy()),
        "levels": {name: logging.getLogger(name).level for name in LOGGERS},
        "handlers": logging.getLogger().handlers[:],
        "hidden modules": [name for name, module in sys.modules.items() if module is None],
        "paths": list(sys.path),
    }

import lbopt
before = settings()
for found in pkgutil.walk_packages(lbopt.__path__, "lbopt."):
    if not found.name.startswith(("lbopt.cli", "lbopt.__main__")):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:  # an optional package
            assert not error.name.startswith("lbopt"), error

from lbopt.errors import EnvironmentProblem
from lbopt.job import PreemptionWatch, SoloJob
from lbopt.parallel import connect_processes
from lbopt.plan import prepare_environment
from lbopt.train import Checkpoints
from lbopt.workdir import MetricsWriter

def loss_fn(params, model_state, batch, rng):
    return jnp.sum(batch["x"] @ params["kernel"]), (model_state, {})

folder = pathlib.Path(sys.argv[1])
connect_processes(SoloJob())
tx = lbopt.lamb(0.1)
step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(1))
state = step.place(lbopt.TrainState.create({"kernel": jnp.ones((2, 2))}, {}, tx))
state, _ = step(state, {"x": jnp.ones((4, 2))})
with Checkpoints(folder) as checkpoints, MetricsWriter(folder) as writer, PreemptionWatch():
    during = settings()
    writer.write(1, 8, {"train/loss": float("nan")})
    checkpoints.save(state, None)
    checkpoints.wait()
after = settings()
with contextlib.suppress(EnvironmentProblem):  # without libtpu
    prepare_environment()
planning = settings()
for later in (after, during, planning):
    print([name for name in before if before[name] != later[name]])
'''


@pytest.mark.process
def test_only_what_says_so_changes_anything_and_only_planning_leaves_it_changed(tmp_path):
    # A test that made a plan in this process has left its settings here.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=inherited,
        capture_output=True,
        text=True,
        check=True,
    )
    planning = ["environment", "jax"] if importlib.util.find_spec("libtpu") else []
    assert said.stdout == f"[]\n['signals']\n{planning}\n"
