"""results.jsonl: one line per finished trial, appended atomically, never rewritten.

Beside it is test_examples.jsonl, with a line for each final trial: see
`lbopt.sweep._example_scores`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from lbopt._regular import open_regular
from lbopt.errors import UserError
from lbopt.job import Job, SoloJob
from lbopt.sweep._example_scores import EXAMPLES
from lbopt.sweep._finished_trial import REQUIRED as REQUIRED, check_record
from lbopt.sweep._trials import trial_identity
from lbopt.workdir import copy_changes_soon, file_errors, read_json_lines

OTHERS = ".others"
"""Folder in the mirror of a bucket with the finished trials of other shards."""
_PAGE = 2**16
"""Bytes that are read at a time."""


def read_results(workdir: pathlib.Path, study: str | None = None) -> list[dict[str, Any]]:
    """Return the finished trials of a study.

    Args:
      workdir: The study's folder.
      study: Name of the study; None to accept the trials of any study.

    Returns:
      A record for each whole line, in the order of writing; [] if there is no file. A last line
      that a kill cut off is left out. Trials of other shards in a bucket follow, each once.

    Raises:
      EnvironmentProblem: Naming the file, if it cannot be read, or a whole line is damaged.
      UserError: Naming `workdir`, if a line is of another study.
    """
    records = read_json_lines(workdir / "results.jsonl", check_record)
    known = {trial_identity(record) for record in records}
    for file in sorted((workdir / OTHERS).glob("*.jsonl")):
        records += [
            record
            for record in read_json_lines(file, check_record)
            if trial_identity(record) not in known
        ]
        known |= set(map(trial_identity, records))
    for number, record in enumerate(records, 1):
        if study is not None and record.get("study", study) != study:
            fix = (
                f"line {number} of results.jsonl is of the study {record['study']!r}, not of "
                f"{study!r}; give a folder of its own"
            )
            raise UserError("workdir", str(workdir), fix, code="exists")
    return records


class Results:
    """The finished trials of a study that a process knows.

    Every process of a job knows the trials that were finished before it started. Of later trials,
    the first process knows those of the whole job, and each other process its own. Trials that
    other shards finish meanwhile are not read.

    Args:
      workdir: The study's folder. A last line that a kill cut off is removed.
      job: The job that this process belongs to; None for a process alone. Its first process writes.
      told: Function that is called with new records once they are written; None for none.
      of_all: Whether all processes run the same trials, so that only the first one's are written.
      study: Name of the study; lines of another study are refused. None accepts any study.

    Attributes:
      records: The records of all trials that this process knows.
      num_before: Number of trials that were finished before.

    Raises:
      EnvironmentProblem: Naming the file, if it cannot be read or written, or a whole line is
        damaged.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        job: Job | None = None,
        told: Callable[[Sequence[dict[str, Any]]], None] | None = None,
        of_all: bool = False,
        study: str | None = None,
    ):
        self._of_all = of_all
        self._file = workdir / "results.jsonl"
        self._examples = workdir / EXAMPLES
        self._lock = threading.Lock()
        self._job = SoloJob() if job is None else job
        self._told = told
        self.records: list[dict[str, Any]] = []
        if self._job.index == 0:
            with file_errors(self._file), _alone_in(self._file):
                pass  # opening removes a last line that a kill cut off
            self.records = read_results(workdir, study)
            self._job.on_post(self._write)
        found = self._job.from_first("finished trials", list(self.records))
        self.num_before = len(found)
        if self._job.index:
            self.records = found

    def add(
        self, records: Sequence[dict[str, Any]], examples: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Append records in one write, and wait until they are on disk.

        Processes other than the first of the job send the records to the first instead.

        Args:
          records: Records of finished trials, from `RunningTrial.record`.
          examples: Lines of the tested trials among them, from `lbopt.sweep._example_scores.pack`.

        Raises:
          EnvironmentProblem: Naming the file, if it cannot be written; it has no new record then.
        """
        if self._job.index:
            self.records.extend(records)
        if self._job.index == 0 or not self._of_all:
            self._job.post([list(records), list(examples)])

    def _write(self, posted: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> None:
        records, examples = posted
        with self._lock:
            # Examples first: a trial without a record runs again, so every record has its examples.
            if examples:
                with file_errors(self._examples):
                    _append(self._examples, _lines(examples))
            with file_errors(self._file):
                _append(self._file, _lines(records))
            copy_changes_soon(self._file.parent)
            self.records.extend(records)
            if self._told is not None:
                self._told(records)


@contextlib.contextmanager
def _alone_in(file: pathlib.Path) -> Iterator[IO[bytes]]:
    """Open a file for this writer alone, and remove a last line that a killed one cut off."""
    with open_regular(file, "a+b", buffering=0) as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        end = stream.seek(0, os.SEEK_END)
        whole = _end_of_whole_lines(stream, end)
        if whole < end:
            stream.truncate(whole)
            stream.seek(whole)
        yield stream


def _end_of_whole_lines(stream: IO[bytes], end: int) -> int:
    """Return the end of the last whole line, searching backwards."""
    start = end
    while start > 0:
        begin = max(0, start - _PAGE)
        stream.seek(begin)
        found = (stream.read(start - begin) or b"").rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        start = begin
    return 0


def _lines(records: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def _append(file: pathlib.Path, data: bytes) -> None:
    """Append all of the data or none: records of another thread or process may follow."""
    with _alone_in(file) as stream:
        before = stream.seek(0, os.SEEK_END)
        try:
            if stream.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(stream.fileno())
        except OSError:
            stream.truncate(before)
            raise
