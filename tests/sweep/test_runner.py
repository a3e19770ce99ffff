"""A study ends with every trial once; a kill at any moment costs only what was not finished."""

import json
import os
import signal
import time

import pytest

from lbopt.sweep import trials

FIELDS = {
    "optimizer",
    "scaling_rule",
    "warmup_rule",
    "global_batch_size",
    "learning_rate",
    "warmup_steps",
    "seed",
    "steps",
    "examples_seen",
    "train_loss",
    "test_accuracy",
    "diverged",
    "seconds",
}
TRIALS = 4 * (3 + 2)


def without_time(rows):
    return sorted(json.dumps({**row, "seconds": None}) for row in rows)


def read(workdir):
    return [json.loads(line) for line in (workdir / "results.jsonl").read_text().splitlines()]


def test_every_trial_is_there_once_with_every_field(rows):
    assert len(rows) == len({trials.key(row) for row in rows}) == TRIALS
    for row in rows:
        assert set(row) >= FIELDS
        assert row["examples_seen"] == row["steps"] * row["global_batch_size"]
        assert row["train_loss"] > 0


def test_only_final_trials_are_tested(rows):
    for row in rows:
        assert (row["test_accuracy"] is not None) == (row["phase"] == "final")
        assert row["validation_accuracy"] > 0


def test_final_trials_run_at_the_rate_that_validation_chose(rows):
    for arm in ("momentum", "lamb"):
        for size in (128, 1024):
            here = [row for row in rows if (row["arm"], row["global_batch_size"]) == (arm, size)]
            chosen = trials.choose_factor(here)
            assert {row["learning_rate_factor"] for row in here if row["phase"] == "final"} == {chosen}


def test_a_finished_study_runs_nothing_again(finished, lbopt_sweep):
    workdir, *_ = finished
    before = (workdir / "results.jsonl").read_bytes()
    process = lbopt_sweep(workdir)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0
    assert (workdir / "results.jsonl").read_bytes() == before
    assert f"{TRIALS} finished before" in errors
    assert output == finished[1]


def wait_for_rows(workdir, count, process):
    file = workdir / "results.jsonl"
    deadline = time.monotonic() + 240
    while not (file.exists() and file.read_bytes().count(b"\n") >= count):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("count", [1, 9])
def test_killed_and_restarted_it_equals_the_uninterrupted_study(tmp_path, lbopt_sweep, rows, count):
    workdir = tmp_path / "workdir"
    process = lbopt_sweep(workdir)
    wait_for_rows(workdir, count, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    survived = read(workdir)
    assert count <= len(survived) < TRIALS
    with open(workdir / "results.jsonl", "a") as stream:
        stream.write('{"arm": "lamb", "global_ba')  # a line that a kill cut off
    process = lbopt_sweep(workdir)
    errors = process.communicate(timeout=300)[1]
    assert process.returncode == 0, errors
    again = read(workdir)
    assert again[: len(survived)] == survived  # nothing finished was run again or rewritten
    assert without_time(again) == without_time(rows)


def test_sigterm_saves_what_is_finished_and_exits_75(tmp_path, lbopt_sweep, rows):
    workdir = tmp_path / "workdir"
    process = lbopt_sweep(workdir)
    wait_for_rows(workdir, 1, process)
    os.kill(process.pid, signal.SIGTERM)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 75
    assert "run the same command again" in errors.splitlines()[-1]
    done = read(workdir)
    assert 1 <= len(done) < TRIALS
    assert set(without_time(done)) <= set(without_time(rows))


def test_another_study_is_refused_and_nothing_changes(finished, lbopt_sweep):
    workdir, *_ = finished
    before = {file: file.read_bytes() for file in workdir.rglob("*") if file.is_file()}
    process = lbopt_sweep(workdir, "--config.limit_points=2.0")
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 2
    assert "limit_points is 1.0 there and 2.0 here" in errors
    assert len(errors.strip().splitlines()) == 1
    assert {file: file.read_bytes() for file in workdir.rglob("*") if file.is_file()} == before
