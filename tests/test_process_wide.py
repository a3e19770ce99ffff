"""Another program may import and use the library, which changes nothing process-wide."""

import subprocess
import sys

PROGRAM = '''
import asyncio, importlib, logging, os, pathlib, pkgutil, signal, sys, warnings

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

from lbopt.train import Checkpoints
from lbopt.job import PreemptionWatch
from lbopt.workdir import MetricsWriter

folder = pathlib.Path(sys.argv[1])
state = lbopt.TrainState.create({"kernel": jnp.ones((2, 2))}, {}, lbopt.lamb(0.1))
with Checkpoints(folder) as checkpoints, MetricsWriter(folder) as writer, PreemptionWatch():
    during = settings()
    writer.write(1, 8, {"train/loss": float("nan")})
    checkpoints.save(state, None)
    checkpoints.wait()
after = settings()
print([name for name in before if before[name] != after[name]])
print([name for name in before if before[name] != during[name]])
'''


def test_nothing_is_left_changed_and_only_the_watch_for_signals_changes_anything(tmp_path):
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert said.stdout == "[]\n['signals']\n"
