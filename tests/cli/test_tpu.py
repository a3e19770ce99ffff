"""`lbopt tpu`: the scripts that come with lbopt, and copies of them."""

import os
import subprocess
import sys

import pytest
from refusal import ANY, refused, troubled

import lbopt as package
from lbopt import _installed


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def copy(empty, lbopt):
    """Return the scripts copied into a project here."""
    code, out, err = lbopt("tpu", "--copy=.")
    assert (code, err) == (0, "")
    assert out.startswith("tpu\n")
    return empty / "tpu"


def modes(folder):
    return {
        file.relative_to(folder).as_posix(): file.stat().st_mode
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def test_a_copy_has_every_script_and_what_machines_install(copy):
    expected = modes(_installed.shipped("tpu"))
    expected.pop("env", None)
    copied = modes(copy)
    assert (copy / "gke/Dockerfile").read_text().count("requirements.txt") == 2
    assert expected.keys() - copied.keys() == {"gke/Dockerfile.project"}
    assert copied.keys() - expected.keys() == {"requirements.txt", "constraints.txt"}
    assert all(copied[name] == expected[name] for name in copied.keys() & expected.keys())

    assert (copy / "requirements.txt").read_text() == f"lbopt=={package.__version__}\n"
    assert "\njax==" in (copy / "constraints.txt").read_text()


def test_a_copy_keeps_data_and_runs_out_of_the_commits(copy, empty):
    subprocess.run(["git", "init", "--quiet"], check=True)
    for name in ("tfds/big", "runs/one/metrics.jsonl", "tpu/env", "config.py"):
        file = empty / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    subprocess.run(["git", "add", "--all"], check=True)
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True)
    staged = listed.stdout.splitlines()
    assert "config.py" in staged
    assert ".gitignore" in staged
    assert [name for name in staged if name.startswith(("tfds", "runs")) or name == "tpu/env"] == []


def test_a_copy_leaves_the_gitignore_of_a_project_as_it_is(empty, lbopt):
    (empty / ".gitignore").write_text("mine/\n")
    code, out, _ = lbopt("tpu", "--copy=.")
    assert code == 0
    assert "Name prepared data and runs in your .gitignore" in " ".join(out.split())
    assert (empty / ".gitignore").read_text() == "mine/\n"


def test_the_list_names_the_scripts_and_their_folder(lbopt, empty):
    code, out, _ = lbopt("tpu")
    assert code == 0
    assert "\n  create      get the machines\n" in out
    assert "\n  gke/submit  run COMMAND on GKE" in out
    assert "common.sh" not in out
    assert str(_installed.shipped("tpu")) in out


@pytest.mark.process
def test_a_script_takes_the_place_of_the_command(copy):
    """The copy here wins; it gets all arguments, and bash the default signals."""
    (copy / "status").write_text(
        '#!/usr/bin/env bash\n# tpu/status: x.\nyes | head -n1; echo "$@"\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "lbopt", "tpu", "status", "--copy=x", "two words"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "y\n--copy=x two words\n"


@pytest.mark.process
def test_the_exit_code_is_that_of_the_script(empty):
    command = [sys.executable, "-m", "lbopt", "tpu", "create", "--env=missing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("tpu/create: --env=missing: ")


def test_what_cannot_be_run_or_copied_is_refused(empty, refusing, monkeypatch):
    with refused("SCRIPT", "creat", "choice"):
        refusing("tpu", "creat")
    with refused("SCRIPT", "create", "missing"):  # no settings here
        refusing("tpu", "create", "--dry-run")
    (empty / "there/tpu").mkdir(parents=True)
    with refused("--copy", "there/tpu", "exists"):
        refusing("tpu", "--copy=there")
    (empty / "file").touch()
    with troubled("--copy", "file/tpu", "resource"):
        refusing("tpu", "--copy=file")
    monkeypatch.setenv("PATH", os.devnull)
    with troubled("bash", ANY, "missing"):
        refusing("tpu", "create", "--help")
