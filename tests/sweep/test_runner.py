"""A study ends with every trial once; a kill at any moment costs only what was not finished."""

import json
import os
import signal
import time

import jax
import numpy as np
import pytest

from lbopt.sweep import program, trials

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


def score(problem, params, model_state, split):
    whole = {**split.take(np.arange(len(split))), "mask": np.ones(len(split), bool)}
    return {
        name: float(total) / float(count)
        for name, (total, count) in problem.metric_fn(params, model_state, whole).items()
    }


def test_a_row_says_what_was_measured_where(rows, cells, config, problem):
    """Search rows are of the validation split, the test of the test split, the loss of the last epoch of training."""
    (cell,) = (cell for cell in cells if (cell.arm.name, cell.global_batch_size) == ("momentum", 128))
    here = [row for row in rows if (row["arm"], row["global_batch_size"]) == ("momentum", 128)]
    run = program.compile_cell(problem, cell, config)
    for wanted in (cell.search_trials(config)[:1], cell.final_trials(config, trials.choose_factor(here))[:1]):
        outcome = run(wanted)
        params, model_state = (jax.tree.map(lambda x: x[0], tree) for tree in (outcome.params, outcome.model_state))
        train, validation, test = (score(problem, params, model_state, split) for split in problem.splits)
        assert len({scores["loss"] for scores in (train, validation, test)}) == 3
        (row,) = (row for row in here if trials.key(row) == trials.trial_key(cell, wanted[0]))
        assert row["validation_loss"] == pytest.approx(validation["loss"], rel=1e-4)
        assert row["validation_accuracy"] == pytest.approx(validation["accuracy"])
        assert row["test_loss"] == (pytest.approx(test["loss"], rel=1e-4) if row["phase"] == "final" else None)
        assert row["test_accuracy"] == (pytest.approx(test["accuracy"]) if row["phase"] == "final" else None)
        assert row["train_loss"] == pytest.approx(float(np.mean(outcome.losses[0][-8:])), rel=1e-4)  # 8 steps an epoch
        assert np.mean(outcome.losses[0]) > 1.1 * row["train_loss"]


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


def test_killed_and_restarted_twice_it_equals_the_uninterrupted_study(tmp_path, lbopt_sweep, rows):
    workdir = tmp_path / "workdir"
    survived = []
    for count in (1, 9):
        process = lbopt_sweep(workdir)
        wait_for_rows(workdir, count, process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        found = [json.loads(line) for line in (workdir / "results.jsonl").read_text().splitlines() if line[-1:] == "}"]
        assert found[: len(survived)] == survived
        survived = found
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
