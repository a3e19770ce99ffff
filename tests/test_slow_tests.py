"""The slow tests of a change are chosen against the last landed commit, if that is known."""

import pathlib
import runpy
import subprocess

import pytest

SCRIPTS = pathlib.Path(__file__).parents[1] / "scripts"


def git(folder, *arguments):
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("known", [True, False])
def test_changes_count_from_the_main_branch_and_from_nothing_else(known, monkeypatch, tmp_path):
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "landed")
    landed = git(tmp_path, "rev-parse", "HEAD")
    if known:
        git(tmp_path, "checkout", "-q", "-b", "change")
    for message in ("one", "two"):
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", message)

    monkeypatch.syspath_prepend(SCRIPTS)
    last_landed = runpy.run_path(str(SCRIPTS / "slow_tests.py"))["last_landed"]
    monkeypatch.setitem(last_landed.__globals__, "ROOT", tmp_path)
    assert last_landed() == (landed if known else None)
