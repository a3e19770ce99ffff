"""Other projects' training programs with lbopt's optimizers, run from their checkouts."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.process

SOURCES = {
    "LBOPT_CLIENTS_FLAX": "https://github.com/google/flax",
    "LBOPT_CLIENTS_ALGOPERF": "https://github.com/mlcommons/algorithmic-efficiency",
}
# script -> (variable, folder in the checkout, meshes of four devices and of one, steps before a
# restart, steps)
PROGRAMS = {
    "lm1b": ("LBOPT_CLIENTS_FLAX", "examples/lm1b", ["2", "2"], ["1", "1"], 3, 6),
    "gemma": ("LBOPT_CLIENTS_FLAX", "examples/gemma", ["2", "2"], ["1", "1"], 3, 6),
    "imagenet": ("LBOPT_CLIENTS_FLAX", "examples/imagenet", [], [], 4, 8),
    "algoperf": ("LBOPT_CLIENTS_ALGOPERF", "", [], [], 4, 8),
}


def run(name, num_devices, *arguments):
    """Run a script on a given number of fake devices, and return the arrays that it kept."""
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
    }
    script = pathlib.Path(__file__).with_name(f"run_{name}.py")
    command = [sys.executable, str(script), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return np.load(pathlib.Path(arguments[1], "kept.npz"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_alike_on_four_devices_with_a_restart_and_on_one_without(name, tmp_path):
    variable, folder, mesh, one, half, steps = PROGRAMS[name]
    if variable not in os.environ:
        pytest.skip(f"set {variable} to a folder made by: git clone {SOURCES[variable]}")
    source = pathlib.Path(os.environ[variable], folder)
    four = run(name, 4, source, tmp_path / "four", *mesh, half, steps)
    alone = run(name, 1, source, tmp_path / "one", *one, steps)

    losses = four["losses"]
    assert len(losses) >= steps - 1
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.95 * losses[0]
    assert four.files == alone.files
    for path in four.files:
        gap = np.linalg.norm(np.ravel(four[path].astype(np.float64) - alone[path]))
        assert gap <= 1e-5 * np.linalg.norm(alone[path]), f"{path} is {gap} off"
