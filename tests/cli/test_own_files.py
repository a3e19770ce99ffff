"""A run of the user's own code and data: from its workdir alone, and when the files change."""

import json

import numpy as np
import pytest
from refusal import refused
from safetensors.numpy import load_file

from lbopt import _user_code
from lbopt.cli import load_config
from lbopt.config import SweepConfig, config_to_json
from lbopt.workdir import open_workdir, own_files

CONF = """
from lbopt.config import *


def get_config(arg=""):
    train = TrainConfig(data=ArraysConfig("data/my.npz"), model="net.py:Net", num_steps=2,
                        global_batch_size=8)
    if not arg:
        return train
    return SweepConfig(name="own", train=train, global_batch_sizes=(8,), arms=(
        Arm("momentum", OptimizerConfig("momentum"), ScheduleConfig(0.1)),))
"""
NET = """
import flax.linen as nn
import widths


class Net(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, x, deterministic):
        return nn.Dense(self.outputs)(nn.relu(nn.Dense(widths.HIDDEN)(x)))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with a config, code and data, which are found from this folder only."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "data").mkdir()
    (folder / "conf.py").write_text(CONF)
    (folder / "net.py").write_text(NET)
    (folder / "widths.py").write_text("HIDDEN = 5\n")
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    np.savez(folder / "data/my.npz", x=x, y=(x[:, 0] > 0).astype(np.int32))
    return folder


@pytest.fixture
def run_in(lbopt, monkeypatch):
    """Return a function (folder, *arguments) that runs a command as if it were the first one."""

    def run(folder, *arguments):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(_user_code, "_config_folders", [])
        return lbopt(*arguments)

    return run


def test_a_run_works_from_its_workdir_until_its_files_change(project, run_in, tmp_path):
    train = ["train", "--config=conf.py", "--workdir=run"]
    run = project / "run"
    assert run_in(project, *train)[0] == 0

    # From any folder, without the config.
    code, out, err = run_in(tmp_path, "evaluate", f"--workdir={run}")
    assert code == 0, err
    assert json.loads(out)["step"] == 2
    assert "warning" not in err
    output = tmp_path / "out"
    exported = ["export", f"--workdir={run}", "--format=safetensors", f"--output={output}"]
    assert run_in(tmp_path, *exported)[0] == 0
    saved = load_file(output / "model.safetensors")
    assert saved["params/Dense_1/kernel"].shape == (3, 5)
    other = ["evaluate", f"--workdir={run}", "--config.num_steps=3"]
    with_other = run_in(tmp_path, *other)
    assert (with_other[0], "num_steps" in with_other[2]) == (2, True)
    assert run_in(tmp_path, "diff", run)[1] == "nothing differs\n"

    # A file that the network imports changes.
    (project / "widths.py").write_text("HIDDEN = 2 + 3\n")
    code, _, err = run_in(project, *train)
    assert (code, err.count("\n")) == (2, 1)
    assert "widths.py has changed" in err
    for command in (["evaluate"], ["report"], [*exported[:3:2], f"--output={tmp_path / 'out2'}"]):
        code, _, err = run_in(tmp_path, *command, f"--workdir={run}")
        assert (code, err.count("warning"), err.count("widths.py")) == (0, 1, 1)
    lines = run_in(tmp_path, "diff", run)[1].splitlines()
    assert [line for line in lines if line[0] != " "] == ["widths.py has changed"]
    assert {"    -HIDDEN = 5", "    +HIDDEN = 2 + 3"} <= set(lines)
    code, out, _ = run_in(project, "diff", "run", "--config=conf.py", "--config.num_steps=7")
    assert out.startswith("config.num_steps is 2 there and 7 here\n")

    # Accepted once, it is the run's own.
    assert run_in(project, *train, "--accept=widths.py")[0] == 0
    assert run_in(project, *train)[0] == 0
    assert run_in(project, "diff", "run")[1] == "nothing differs\n"


def test_a_study_of_changed_files_is_refused(project, refusing, monkeypatch, tmp_path):
    monkeypatch.chdir(project)
    config = config_to_json(load_config("conf.py:study", [], SweepConfig))
    folder = tmp_path / "study"
    with open_workdir(folder, "sweep", config, lambda saved: [], own=own_files(config)):
        pass
    study = ["--config=conf.py:study", f"--workdir={folder}"]
    (project / "data/my.npz").write_bytes(b"of nothing")  # refused before it is loaded
    with refused("--workdir", str(folder), "mismatch") as caught:
        refusing("sweep", *study)
    assert "data/my.npz has" in str(caught.value)
    with refused("--checksum", "all", "choice"):
        refusing("sweep", *study, "--checksum=all")
    with refused("--workdir", code="missing"):
        refusing("diff", tmp_path / "absent")


def test_two_workdirs_are_compared(project, lbopt, monkeypatch, tmp_path):
    monkeypatch.chdir(project)
    for name, width in (("one", 5), ("two", 6)):
        (project / "widths.py").write_text(f"HIDDEN = {width}\n")
        config = config_to_json(load_config("conf.py:study", [], SweepConfig))
        config["final_seeds"] = [width]
        own = own_files(config)
        with open_workdir(tmp_path / name, "sweep", config, lambda saved: [], own=own):
            pass
    _, out, _ = lbopt("diff", tmp_path / "one", tmp_path / "two")
    lines = out.splitlines()
    assert lines[:2] == ["config.final_seeds is [5] there and [6] here", "widths.py changed"]
    assert lines[-2:] == ["    -HIDDEN = 5", "    +HIDDEN = 6"]
