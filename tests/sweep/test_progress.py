"""A study says of each finished trial what it was, and when the study will be finished."""

import contextlib
import copy
import fcntl
import os
import re
import struct
import sys
import termios
import types

import pytest

from lbopt.sweep import make_cells, make_problems
from lbopt.sweep._finished_trial import FINAL, SEARCH
from lbopt.sweep._progress import BAR, StepTimes, StudyProgress, _rough
from lbopt.sweep._runner import Runner
from lbopt.train import Progress

PACE_S = {128: 1e-3, 1024: 1e-4}
"""Seconds per example, by batch size."""
WORKERS = 2


def planned(cells):
    """Return the records of all trials: three of a search and two final ones in each cell."""
    return [
        {
            "arm": cell.arm.name,
            "global_batch_size": size,
            "phase": phase,
            "learning_rate": 0.04,
            "steps": cell.resolved.num_steps,
            "seconds": PACE_S[size] * size * cell.resolved.num_steps,
            "validation_accuracy": 0.93,
            "diverged": False,
        }
        for cell in cells
        for size in [cell.global_batch_size]
        for phase in (SEARCH, SEARCH, SEARCH, FINAL, FINAL)
    ]


@pytest.fixture
def study(config, cells):
    """Return the progress of a study, and a function that lets seconds pass."""
    now = [0.0]

    def wait(seconds):
        now[0] += seconds

    with Progress(None, unit="trial") as progress:
        yield StudyProgress(config, cells, progress, clock=lambda: now[0]), wait


def test_the_time_that_is_left(study, cells):
    """Exact where every batch size has been measured, whatever the order of the trials."""
    progress, wait = study
    records = sorted(planned(cells), key=lambda record: record["arm"])
    assert {record["global_batch_size"] for record in records[:6]} == {128, 1024}
    left = sum(record["seconds"] for record in records)
    for number, record in enumerate(records, 1):
        wait(record["seconds"] / WORKERS)
        progress.add([record])
        left -= record["seconds"]
        if number >= 6:
            assert progress.seconds_left == pytest.approx(left / WORKERS, abs=1e-9)
    assert progress.seconds_left == 0


def test_what_is_left_is_forecast_before_the_first_trial(config):
    """The least is the plan, the most has the whole budget beyond the edges."""
    config = copy.deepcopy(config)
    config.search.widen_candidates = 2
    cells = make_cells(config, make_problems(config))
    times = StepTimes({"momentum": (128, 1.0), "lamb": (128, 2.0)}, 7.0 / 896)
    steps = {128: 24, 1024: 3}

    def seconds(trials):  # the slower arm's steps take a second more at either batch size
        return trials * ((1.0 + 2.0) * steps[128] + (8.0 + 9.0) * steps[1024]) / WORKERS

    with Progress(None, unit="trial") as progress:
        study = StudyProgress(config, cells, progress)
        trials, time_left = study.forecast(times, WORKERS)
        assert trials == "20 trials, and up to 8 more where the best lies at an edge of its search"
        both = f"about {_rough(seconds(5))} to {_rough(seconds(7))} on this machine, as busy as"
        assert time_left.startswith(both)
        assert study.forecast(None, WORKERS) == [trials]  # nothing was timed, and none finished

        study.resume([{**one, "seconds": 60.0} for one in planned(cells)[:5]])  # the first cell
        _, time_left = study.forecast(None, WORKERS)
        pace = 60.0 / (128 * 24)
        least = pace * (5 * 128 * 24 + 2 * 5 * 1024 * 3) / WORKERS
        most = least + pace * (2 * 128 * 24 + 2 * 2 * 1024 * 3) / WORKERS
        assert time_left.startswith(f"about {_rough(least)} to {_rough(most)} on this machine, as")


def test_each_arms_steps_are_timed_at_the_smallest_batch_that_it_has_left(config, cells):
    """An example more takes as long in every arm; a larger batch that was faster adds nothing."""
    taken = {("momentum", 128): 2.0, ("momentum", 1024): 9.0, ("lamb", 1024): 12.0}
    timed = []

    def time(cell, seconds):
        timed.append((cell.arm.name, cell.global_batch_size))
        return taken[timed[-1]]

    runner = Runner(config, None, types.SimpleNamespace(requested=False))
    runner._time = time
    left = [one for one in cells if (one.arm.name, one.global_batch_size) in taken]
    times = runner.time_steps(left)
    assert set(timed) == set(taken)
    assert times.at("momentum", 576) == pytest.approx(5.5)
    assert times.at("lamb", 1024) == 12.0
    taken["momentum", 1024] = 1.0
    assert runner.time_steps(left).at("momentum", 1024) == 2.0
    assert runner.time_steps(left[:1]).at("lamb", 1024) == 2.0  # another process has that arm


def test_a_study_that_stops_at_its_target_takes_at_most_that_long(config, cells):
    config = copy.deepcopy(config)
    config.train.target_metric = "eval/accuracy"
    config.train.stop_at_target = True
    with Progress(None, unit="trial") as progress:
        study = StudyProgress(config, cells, progress)
        _, time_left = study.forecast(StepTimes({"momentum": (128, 1.0)}, 0.0), 1)
    seconds = 5 * 2 * (24 + 3)
    assert time_left.startswith(f"at most {_rough(seconds)} on this machine")


def test_compiling_and_timing_before_the_first_trial_put_off_no_others(study, cells):
    progress, wait = study
    wait(1000.0)
    progress.forecast(None, 1)
    first, *others = planned(cells)
    wait(first["seconds"])
    assert progress.unfinished(cells) == cells
    progress.add([first, *others[:4]])
    assert progress.unfinished(cells) == cells[1:]
    assert progress.seconds_left < 4 * first["seconds"]


def test_trials_beyond_the_plan_put_off_none_of_the_final_ones(config):
    config = copy.deepcopy(config)
    config.search.widen_candidates = 2
    cells = make_cells(config, make_problems(config))[:1]
    with Progress(None, unit="trial") as progress:
        now = [0.0]
        study = StudyProgress(config, cells, progress, clock=lambda: now[0])
        search, *_, final = planned(cells)
        now[0] = 5 * search["seconds"]
        study.add([search] * 5)  # three were planned
        assert study.seconds_left == pytest.approx(2 * search["seconds"])
        study.add([final])
        assert study.seconds_left > 0


def test_a_line_for_each_trial(study, cells, capsys):
    progress, wait = study
    before, *now = planned(cells)
    progress.resume([before])
    wait(60.0)
    progress.add([now[0]])
    now[1]["diverged"] = True
    progress.add([now[1]])
    lines = capsys.readouterr().err.splitlines()
    line = r"trial  2/20  momentum  batch  128  lr 0.04      search  0.9300    ETA [\d.]+ (s|min|h)"
    assert re.fullmatch(line, lines[0])
    assert re.search(r"^trial  3/20 .+ diverged  ETA", lines[1])


def test_trials_that_a_search_left_out_are_not_waited_for(study, cells):
    progress, wait = study
    records = planned(cells)
    wait(10.0)
    progress.add([record for number, record in enumerate(records) if number != 1])
    assert progress.seconds_left == 0


def read_all(terminal):
    """Return what was written to a terminal whose other end is closed."""
    found = b""
    with open(terminal, "rb", buffering=0) as stream, contextlib.suppress(OSError):  # EIO: the end
        while part := stream.read(2**16):
            found += part
    return found


def test_a_terminal_shows_the_number_and_the_time_that_is_left(config, cells, monkeypatch):
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with Progress(None, unit="trial", bar_format=BAR) as progress:
            study = StudyProgress(config, cells, progress)
            study.resume(planned(cells)[:2])
            study.add(planned(cells)[2:3])
    shown = read_all(ours).decode()
    assert re.search(r"\r\n? *trial  3/20  momentum .*ETA .*\r\n", shown)
    last = shown.rstrip().rpartition("\r")[2]
    assert re.fullmatch(r" 15%\|.+\| 3/20 trials \[00:00, ETA .+\]", last)
