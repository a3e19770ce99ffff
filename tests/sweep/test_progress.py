"""A study says of each finished trial what it was, and when the study will be finished."""

import contextlib
import fcntl
import os
import re
import struct
import sys
import termios

import pytest

from lbopt.sweep._finished_trial import FINAL, SEARCH
from lbopt.sweep._progress import BAR, StudyProgress
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
