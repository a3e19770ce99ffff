"""A completed study has every trial once; a kill costs only unfinished trials."""

import json
import os
import re
import signal
import time
import types

import jax
import pytest
from refusal import troubled
from tiny_study import make_config

from lbopt.cli import main
from lbopt.config import SearchConfig
from lbopt.errors import NO_VALUE, EnvironmentProblem, Preempted
from lbopt.job import PreemptionWatch
from lbopt.sweep import _drive, _runner, _trials
from lbopt.sweep._example_scores import read_examples
from lbopt.sweep.lanes import Session

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


@pytest.mark.process
def test_every_trial_is_there_once_with_every_field(rows):
    assert len(rows) == len({_trials.trial_identity(row) for row in rows}) == TRIALS
    for row in rows:
        assert set(row) >= FIELDS
        assert row["examples_seen"] == row["steps"] * row["global_batch_size"]
        assert row["train_loss"] > 0


@pytest.mark.process
def test_before_the_first_trial_stands_what_it_takes_and_what_it_decides(finished):
    """The steps of both arms were timed; three search trials and two final ones have no spread."""
    *before, first = finished[2].partition("trial  1/20")[:2]
    lines = before[0].splitlines()
    assert "20 trials" in lines
    assert any(
        re.match(
            r"about \d.* on this machine, as busy as it is now, by the time of their steps", one
        )
        for one in lines
    )
    assert any("2 arms" in one and "of 2 final seeds each" in one for one in lines)
    assert first == "trial  1/20"


@pytest.mark.process
def test_a_finished_study_is_the_pilot_of_another(finished, config_file, capsys):
    flags = [f"--pilot={finished[0]}", "--memory=false"]
    assert main(["check", f"--config={config_file}", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    (power,) = (line for line in lines if line.startswith("ok    power"))
    assert power.endswith("is that of the pilot, the median over its arms.")
    assert re.search(
        r"differ by [\d.]+ points at batch 128 and [\d.]+ points at batch 1024 \(", power
    )
    assert "ok    trials    20" in lines
    assert main(["check", "--config=digits_cnn:smoke", *flags]) == 2
    assert "a recipe has one run" in capsys.readouterr().err


@pytest.mark.process
def test_only_final_trials_are_tested(rows):
    for row in rows:
        assert (row["test_accuracy"] is not None) == (row["phase"] == "final")
        assert row["validation_accuracy"] > 0


@pytest.mark.process
def test_every_final_trial_has_its_test_examples(finished, rows):
    tested = {
        _trials.trial_identity(row): row["test_accuracy"] for row in rows if row["phase"] == "final"
    }
    found = read_examples(finished[0])
    assert {key: each.values.mean() for key, each in found.items()} == pytest.approx(tested)


@pytest.mark.process
def test_a_row_says_what_was_measured(rows):
    """test_program.py shows that the scores are those of the named split."""
    for row in rows:
        assert (
            len(
                {
                    row["train_loss"],
                    row["validation_loss"],
                    row["test_loss"],
                    row["last_epoch_loss"],
                }
            )
            == 4
        )
        assert (row["steps"], row["fidelity"], row["divergence_step"]) == (
            row["steps_run"],
            1.0,
            None,
        )
        assert row["distance"] > 0

        if row["phase"] == "search":
            assert "curve" not in row
        else:
            assert row["curve"]["step"] == sorted(set(row["curve"]["step"]))
            assert (row["curve"]["step"][0], row["curve"]["step"][-1]) == (1, row["steps"])
            assert row["curve"]["distance"][-1] == pytest.approx(row["distance"], rel=1e-6)


@pytest.mark.process
def test_final_trials_run_at_the_rate_that_validation_chose(rows):
    for arm in ("momentum", "lamb"):
        for size in (128, 1024):
            here = [row for row in rows if (row["arm"], row["global_batch_size"]) == (arm, size)]
            assert {_drive.factors_of(row) for row in here if row["phase"] == "final"} == {
                _drive.choose(here)
            }


@pytest.mark.process
def test_a_finished_study_runs_nothing_again(finished, lbopt_sweep):
    workdir, *_ = finished
    before = (workdir / "results.jsonl").read_bytes()
    process = lbopt_sweep(workdir)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0
    assert (workdir / "results.jsonl").read_bytes() == before
    assert f"{TRIALS} trials finished before" in errors
    assert output == finished[1]


def wait_for_rows(workdir, count, process):
    file = workdir / "results.jsonl"
    deadline = time.monotonic() + 240
    while not (file.exists() and file.read_bytes().count(b"\n") >= count):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.process
@pytest.mark.slow
def test_killed_again_and_again_it_equals_the_uninterrupted_study(tmp_path, lbopt_sweep, rows):
    workdir = tmp_path / "workdir"
    survived = []
    for count in range(1, TRIALS, 2):
        process = lbopt_sweep(workdir)
        wait_for_rows(workdir, count, process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()

        found = [
            json.loads(line)
            for line in (workdir / "results.jsonl").read_text().splitlines()
            if line[-1:] == "}"
        ]
        assert found[: len(survived)] == survived
        survived = found
        assert count <= len(survived) <= TRIALS

        with open(workdir / "results.jsonl", "a") as stream:
            stream.write('{"arm": "lamb", "global_ba')  # a line that a kill cut off

    process = lbopt_sweep(workdir)
    errors = process.communicate(timeout=300)[1]
    assert process.returncode == 0, errors
    again = read(workdir)
    assert again[: len(survived)] == survived  # nothing finished was run again or rewritten

    tested = {_trials.trial_identity(row) for row in rows if row["phase"] == "final"}
    assert set(read_examples(workdir)) == tested
    assert without_time(again) == without_time(rows)


SEARCHES = {
    "halving": (
        SearchConfig("successive_halving", num_candidates=6, eta=2, min_fidelity=0.25),
        "none",
    ),
    "optuna": (
        SearchConfig("optuna", num_candidates=4, candidates_at_once=2, pruner="median", eta=2),
        "none",
    ),
    "optuna, batched": (SearchConfig("optuna", num_candidates=4, candidates_at_once=2), "vmap"),
}


@pytest.mark.everyday("optuna")
@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_that_was_cut_off_anywhere_asks_for_the_same_trials(name, tmp_path):
    search, batching = SEARCHES[name]
    config = make_config(search=search, trial_batching=batching, global_batch_sizes=(128,))
    config.arms = config.arms[1:]
    cells = _trials.make_cells(config, _trials.make_problems(config))
    whole = tmp_path / "whole"
    whole.mkdir()
    rows = _runner.run_sweep(config, cells, whole)
    lines = (whole / "results.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == len({_trials.trial_identity(row) for row in rows}) > 5
    for count in (1, len(lines) // 2, len(lines) - 2):
        cut = tmp_path / str(count)
        cut.mkdir()
        (cut / "results.jsonl").write_text("".join(lines[:count]))
        assert without_time(_runner.run_sweep(config, cells, cut)) == without_time(rows)


@pytest.mark.slow
def test_if_one_thread_fails_the_others_stop_at_their_next_look(monkeypatch, tmp_path):
    config = make_config(global_batch_sizes=(16, 1024), num_workers=2)
    config.arms = config.arms[:1]
    config.train.num_epochs = 2000.0
    tried = []

    def fail(results, rows, examples):
        tried.extend(row["global_batch_size"] for row in rows)
        raise EnvironmentProblem("results.jsonl", reason="the disk is full", code="resource")

    monkeypatch.setattr(_runner.Results, "add", fail)
    with troubled("results.jsonl", NO_VALUE, "resource"):
        _runner.run_sweep(
            config, _trials.make_cells(config, _trials.make_problems(config)), tmp_path
        )
    assert tried == [1024]  # the other one has 128,000 steps to go


def test_the_lane_of_a_trial_that_diverges_is_free_at_once(monkeypatch, tmp_path):
    """The fourth of four slots diverges, and gets the fifth candidate while the others train."""
    config = make_config(
        trial_batching="vmap", trials_per_program=4, global_batch_sizes=(128,), final_seeds=(7,)
    )
    config.arms = config.arms[:1]
    rates = (0.5, 1.0, 2.0, 1e30, 2e30)
    config.search = SearchConfig(learning_rate_factors=rates, widen_candidates=0)
    calls = []
    advance = Session.advance

    def counted(session, running):
        calls.append({lane: run.trial.factors.learning_rate for lane, run in running.items()})
        advance(session, running)

    monkeypatch.setattr(Session, "advance", counted)
    rows = _runner.run_sweep(
        config, _trials.make_cells(config, _trials.make_problems(config)), tmp_path
    )
    assert [row["learning_rate_factor"] for row in rows if row["diverged"]] == [1e30, 2e30]
    assert len(rows) == 5 + 1
    assert [sorted(call.values()) for call in calls[:3]] == [
        [0.5, 1.0, 2.0, 1e30],
        [0.5, 1.0, 2.0, 2e30],
        [0.5, 1.0, 2.0],
    ]


@pytest.mark.parametrize(
    ("changes", "num_microsteps", "field"),
    [
        ({"trial_batching": "vmap"}, 2, "config.trials_per_program"),
        ({"trial_batching": "none"}, 1, "config.microstep_size"),
        ({"trial_batching": "none"}, 2, "config.train.parallel.num_microsteps"),
        ({"trial_devices": "all"}, 1, "config.microstep_size"),
    ],
)
def test_full_memory_is_one_line_about_a_field_that_applies(
    changes, num_microsteps, field, monkeypatch, tmp_path
):
    def fail(*_):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory allocating 17 bytes.\nmore"
        )

    session = _runner.MeshSession if "trial_devices" in changes else _runner.Session
    if session is _runner.MeshSession:  # "auto" batches trials on accelerators, but not these
        batching = types.SimpleNamespace(batched=True)
        monkeypatch.setattr(_runner, "TrialBatching", lambda config: batching)
    monkeypatch.setattr(session, "time_steps", fail)
    config = make_config(global_batch_sizes=(1024,), **changes)
    config.train.parallel.num_microsteps = num_microsteps
    cells = _trials.make_cells(config, _trials.make_problems(config))
    with troubled(field, NO_VALUE, "resource") as caught:
        _runner.run_sweep(config, cells, tmp_path)
    by_batching = field == "config.trials_per_program"
    assert ("config.trials_per_program" in caught.value.reason) == by_batching
    assert "allocating 17 bytes" in caught.value.reason  # the words of JAX, planted above


@pytest.mark.process
def test_sigterm_saves_what_is_finished_and_exits_75(tmp_path, lbopt_sweep, rows):
    for attempt in range(
        4
    ):  # on a busy machine the last trial may have ended before the signal is seen
        workdir = tmp_path / f"workdir{attempt}"
        process = lbopt_sweep(workdir)
        wait_for_rows(workdir, 1, process)
        os.kill(process.pid, signal.SIGTERM)
        errors = process.communicate(timeout=120)[1]
        done = read(workdir)
        assert process.returncode == 75
        assert errors.splitlines()[-1].startswith("lbopt sweep: ")
        assert set(without_time(done)) <= set(without_time(rows))
        if len(done) < TRIALS:
            break
    assert 1 <= len(done) < TRIALS


@pytest.mark.parametrize("devices", ["one", "all"])
def test_a_request_to_stop_ends_the_timing_of_steps(devices, monkeypatch, tmp_path):
    config = make_config(global_batch_sizes=(1024,), trial_devices=devices)
    cells = _trials.make_cells(config, _trials.make_problems(config))
    session = _runner.MeshSession if devices == "all" else _runner.Session
    timed = []
    with PreemptionWatch() as watch:

        def ask(self, trial, seconds):
            timed.append(trial)
            watch.job.stop_wanted = True  # as on SIGTERM
            return 1.0

        monkeypatch.setattr(session, "time_steps", ask)
        with pytest.raises(Preempted, match="0 trials saved"):
            _runner.run_sweep(config, cells, tmp_path, watch)
    assert 1 <= len(timed) <= (1 if devices == "all" else os.cpu_count())


def test_ctrl_c_says_how_to_resume(monkeypatch, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_runner.Session, "advance", interrupt)
    config = make_config()
    cells = _trials.make_cells(config, _trials.make_problems(config))
    with pytest.raises(KeyboardInterrupt, match="with 0 trials saved; run the same command again"):
        _runner.run_sweep(config, cells, tmp_path)


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory, lbopt_sweep):
    """Return the workdir of two shards that ran at once."""
    workdir = tmp_path_factory.mktemp("shards") / "workdir"
    shards = [lbopt_sweep(workdir, f"--shard={number}/2") for number in (1, 2)]
    said = [process.communicate(timeout=300) for process in shards]
    assert [process.returncode for process in shards] == [0, 0], said
    return workdir


@pytest.mark.slow
@pytest.mark.process
def test_two_shards_are_one_study(two_shards, rows, finished):
    """Both run at once in one workdir; the one that ends last writes the whole report."""
    workdir = two_shards
    assert without_time(read(workdir)) == without_time(rows)
    assert len(read(workdir)) == TRIALS  # no trial runs twice
    assert set(read_examples(workdir)) == set(read_examples(finished[0]))
    summaries = [
        json.loads((folder / "summary.json").read_text()) for folder in (workdir, finished[0])
    ]
    assert summaries[0]["complete"]
    assert summaries[0]["arms"] == summaries[1]["arms"]


@pytest.mark.process
@pytest.mark.slow
def test_another_number_of_shards_finds_all_trials_done(two_shards, lbopt_sweep, finished):
    workdir = two_shards
    again = lbopt_sweep(workdir, "--shard=2/3")
    output, errors = again.communicate(timeout=120)
    assert again.returncode == 0
    assert "20 trials finished before" in errors
    assert output == finished[1].replace(str(finished[0]), str(workdir))


@pytest.mark.slow
@pytest.mark.process
def test_a_shard_without_cells_has_nothing_to_do(tmp_path, lbopt_sweep):
    process = lbopt_sweep(tmp_path / "workdir", "--shard=5/5")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert re.fullmatch(r"shard 5/5 .*\b4 cells.*\n", output)


@pytest.mark.process
def test_another_study_is_refused_and_nothing_changes(finished, lbopt_sweep):
    workdir, *_ = finished
    before = {file: file.read_bytes() for file in workdir.rglob("*") if file.is_file()}
    process = lbopt_sweep(workdir, "--config.limit_points=2.0")
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 2
    assert errors.startswith(f"lbopt sweep: --workdir = '{workdir}': ")
    assert re.search(r"\blimit_points .*1\.0 .*2\.0 ", errors)
    assert len(errors.strip().splitlines()) == 1
    assert {file: file.read_bytes() for file in workdir.rglob("*") if file.is_file()} == before
