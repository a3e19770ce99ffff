"""results.jsonl: one line per finished trial, appended whole, never rewritten."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import threading
from collections.abc import Sequence
from typing import Any

from lbopt.train import bucket
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
    """The finished trials of a study.

    Args:
      workdir: the study's folder. A last line cut off by a kill is removed: its trial was not finished.
    """

    def __init__(self, workdir: pathlib.Path):
        self._file = workdir / "results.jsonl"
        self._lock = threading.Lock()
        self.rows: list[dict[str, Any]] = read_results(workdir)
        _cut_torn_line(self._file)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows in one write and wait until they are on disk."""
        text = "".join(json.dumps(row) + "\n" for row in rows)
        with self._lock:
            with writing(self._file):
                _append(self._file, text.encode())
            bucket.copy_changes(self._file.parent)
            self.rows.extend(rows)


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
