"""Batch normalization in float64 NumPy, and lbopt's on four devices or, in a process, eight."""

import os
import pickle
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import on_devices

EPSILON = 1e-5
PROGRAM = Path(__file__).with_name("on_devices.py")


@pytest.fixture(scope="session")
def reference():
    """Return a function (x, scale, bias, weights, groups) that normalizes in float64 NumPy.

    It returns the outputs, the gradients of sum(weights * tanh(y)), and the statistics averaged
    over groups. `groups` lists the examples of each group, or is a number of contiguous groups.
    """

    def normalize(x, scale, bias, weights, groups):
        x, scale, bias, weights = (
            np.asarray(array, np.float64) for array in (x, scale, bias, weights)
        )
        groups = np.split(np.arange(len(x)), groups) if isinstance(groups, int) else groups

        out = {
            "y": np.empty_like(x),
            "dx": np.empty_like(x),
            "dscale": 0.0,
            "dbias": 0.0,
            "mean": 0.0,
            "var": 0.0,
        }

        for rows in groups:
            group = x[rows]
            axes = tuple(range(group.ndim - 1))
            mean = group.mean(axes)
            var = group.var(axes)
            inverse = 1 / np.sqrt(var + EPSILON)
            normal = (group - mean) * inverse
            y = normal * scale + bias
            dy = weights[rows] * (1 - np.tanh(y) ** 2)
            dnormal = dy * scale

            out["y"][rows] = y
            out["dx"][rows] = inverse * (
                dnormal - dnormal.mean(axes) - normal * (dnormal * normal).mean(axes)
            )
            out["dscale"] = out["dscale"] + (dy * normal).sum(axes)
            out["dbias"] = out["dbias"] + dy.sum(axes)
            out["mean"] = out["mean"] + mean / len(groups)
            out["var"] = out["var"] + var / len(groups)

        return out

    return normalize


@pytest.fixture(scope="session")
def normalized():
    """Return `run` of on_devices.py."""
    return runpy.run_path(str(PROGRAM))["run"]


@pytest.fixture(scope="session")
def normalized_on_eight(tmp_path_factory):
    """Return a function that calls `run` on eight devices, in a separate process.

    It takes a list of (arguments, options) and returns the list of results.
    """

    def run(jobs):
        folder = tmp_path_factory.mktemp("eight")
        (folder / "jobs").write_bytes(pickle.dumps(jobs))
        environment = {
            **on_devices(8),
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        }
        command = [sys.executable, str(PROGRAM), str(folder / "jobs"), str(folder / "results")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return pickle.loads((folder / "results").read_bytes())

    return run
