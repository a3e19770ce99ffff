"""results.jsonl: one line per finished trial, appended whole, never rewritten."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import threading
from collections.abc import Sequence
from typing import Any

from lbopt.job.member import Alone
from lbopt.train import bucket
from lbopt.train.progress import Progress
from lbopt.train.workdir import writing
from lbopt.train.writers import read_lines

REQUIRED = (
    "arm",
    "phase",
    "global_batch_size",
    "steps",
    "warmup_steps",
    "learning_rate",
    "learning_rate_factor",
    "seed",
    "validation_accuracy",
    "validation_loss",
    "test_accuracy",
    "diverged",
)


def read_results(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Return the finished trials of a study.

    Raises:
      EnvironmentProblem: if the file is damaged.
    """
    return read_lines(workdir / "results.jsonl", REQUIRED)


class Results:
    """The finished trials of a study, as the processes of a job know them: process 0 all, the others their own.

    Args:
      workdir: the study's folder. A last line cut off by a kill is removed: its trial was not finished.
      job: of which this process is one; None if it is alone. Its first process writes.
      progress: is told of rows that come; None for nothing.
    """

    def __init__(self, workdir: pathlib.Path, job: Alone | None = None, progress: Progress | None = None):
        self._file = workdir / "results.jsonl"
        self._lock = threading.Lock()
        self._job = Alone() if job is None else job
        self._progress = progress
        self.rows: list[dict[str, Any]] = []
        if self._job.index == 0:
            self.rows = read_results(workdir)
            _cut_torn_line(self._file)
            self._job.on_post(self._write)
        found = self._job.from_first("finished trials", list(self.rows))
        self.num_before = len(found)
        if self._job.index:
            self.rows = found

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows in one write and wait until they are on disk, or hand them to who does."""
        if self._job.index:
            self.rows.extend(rows)
        self._job.post(list(rows))

    def _write(self, rows: Sequence[dict[str, Any]]) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        with self._lock:
            with writing(self._file):
                _append(self._file, text.encode())
            bucket.copy_changes(self._file.parent)
            self.rows.extend(rows)
            if self._progress is not None:
                self._progress.advance(len(rows))


def _append(file: pathlib.Path, data: bytes) -> None:
    """Append all of the data or nothing: another thread's rows may follow."""
    with open(file, "ab", buffering=0) as stream:
        before = stream.seek(0, os.SEEK_END)
        try:
            if stream.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(stream.fileno())
        except OSError:
            stream.truncate(before)
            raise


def _cut_torn_line(file: pathlib.Path) -> None:
    if file.exists():
        data = file.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with writing(file), open(file, "r+b") as stream:
                stream.truncate(whole)
