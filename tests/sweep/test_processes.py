"""Processes that share a study find the results of one process, also after a kill."""

import json
import os
import signal

import pytest
from jobs import start  # noqa: F401  a fixture

pytestmark = pytest.mark.process


def rows_of(workdir):
    """Return the records by trial, without the time they took."""
    lines = [json.loads(line) for line in (workdir / "results.jsonl").read_text().splitlines()]
    named = {
        (row["arm"], row["global_batch_size"], row["phase"], row["learning_rate"], row["seed"]): row
        for row in lines
    }
    assert len(named) == len(lines)
    return {
        key: {name: value for name, value in row.items() if name != "seconds"}
        for key, row in named.items()
    }


def same(ours, theirs):
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(
            same(ours[name], theirs[name]) for name in theirs
        )
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == (
        pytest.approx(theirs, rel=1e-3, abs=2 / 386) if isinstance(theirs, float) else theirs
    )


@pytest.mark.slow
def test_two_processes_find_what_one_finds(
    start,  # noqa: F811
    config_file,
    tmp_path,
):
    """One of them is killed after the first trials; both are started again."""
    seeds = tuple(range(7, 23))  # enough trials that the kill comes before the last of them
    command = [
        "sweep",
        f"--config={config_file}",
        f"--config.final_seeds={seeds}",
        f"--workdir={tmp_path / 'study'}",
    ]

    job = start(command, count=2, devices=1)
    results = tmp_path / "study" / "results.jsonl"
    job.wait_for(lambda: results.exists() and results.stat().st_size, 120)
    os.kill(job.child(1), signal.SIGKILL)
    assert job.codes(60) == [3, 3]

    before = len(results.read_text().splitlines())
    assert 0 < before < 4 * (3 + len(seeds))

    again = start(command, count=2, devices=1)
    assert again.codes(200) == [0, 0], again.said(0)
    assert any(f"{before} trials finished before" in line for line in again.said(0))
    assert again.said(1) == []

    alone = start([*command[:-1], f"--workdir={tmp_path / 'alone'}"], count=1, devices=1)
    assert alone.codes(200) == [0]

    ours = rows_of(tmp_path / "study")
    theirs = rows_of(tmp_path / "alone")
    assert ours.keys() == theirs.keys()
    # Which trials share a program depends on the kill, and rounding depends on the program.
    for key, row in theirs.items():
        assert ours[key].keys() == row.keys()
        for name, value in row.items():
            assert same(ours[key][name], value), (key, name)
    assert (tmp_path / "study" / "report.html").exists()
