"""results.jsonl: one line per finished trial, appended whole, never rewritten.

Beside it lies test_examples.jsonl, with a line for each final trial: see `lbopt.sweep._examples`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import threading
from collections.abc import Iterator, Sequence
from typing import IO, Any

from lbopt._regular import open_regular
from lbopt.errors import UserError
from lbopt.job import Job, SoloJob
from lbopt.sweep._examples import EXAMPLES
from lbopt.sweep._row import REQUIRED as REQUIRED, check_row
from lbopt.sweep._trials import key
from lbopt.train import Progress
from lbopt.workdir import copy_changes_soon, file_errors, read_json_lines

OTHERS = ".others"
"""Folder in the mirror of a bucket, with what other shards have finished."""
_PAGE = 2**16


def read_results(workdir: pathlib.Path, study: str | None = None) -> list[dict[str, Any]]:
    """Return the finished trials of a study.

    Args:
      workdir: the study's folder.
      study: its name; None to take whatever is there.

    Returns:
      A row for each whole line, in the order in which they were written; [] if there is no file. A last line cut off by a
      kill is left out. Of trials that shards in a bucket ran beside this one, each once, and those of this folder first.

    Raises:
      EnvironmentProblem: naming the file, if it cannot be read, or a whole line is damaged.
      UserError: naming `--workdir`, if a line is of another study.
    """
    rows = read_json_lines(workdir / "results.jsonl", check_row)
    known = {key(row) for row in rows}
    for file in sorted((workdir / OTHERS).glob("*.jsonl")):
        rows += [row for row in read_json_lines(file, check_row) if key(row) not in known]
        known |= set(map(key, rows))
    for number, row in enumerate(rows, 1):
        if study is not None and row.get("study", study) != study:
            raise UserError(
                f"--workdir = {str(workdir)!r}: line {number} of results.jsonl is of the study {row['study']!r}, "
                f"not of {study!r}; give a folder of its own"
            )
    return rows


class Results:
    """The finished trials of a study, as the processes of a job know them.

    All know those that were finished before; of the new ones process 0 knows all of the job's, the others their own. What other
    shards write meanwhile is not looked at.

    Args:
      workdir: the study's folder. A last line cut off by a kill is removed: its trial was not finished.
      job: of which this process is one; None if it is alone. Its first process writes.
      progress: is told of rows that come; None for nothing.
      of_all: every process finds the same rows; the first one's are kept.
      study: its name; lines of another one are refused. None to take whatever is there.

    Attributes:
      rows: of all trials that this process knows.
      num_before: how many of them were finished before.

    Raises:
      EnvironmentProblem: naming the file, if it cannot be read or written, or a whole line is damaged.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        job: Job | None = None,
        progress: Progress | None = None,
        of_all: bool = False,
        study: str | None = None,
    ):
        self._of_all = of_all
        self._file = workdir / "results.jsonl"
        self._examples = workdir / EXAMPLES
        self._lock = threading.Lock()
        self._job = SoloJob() if job is None else job
        self._progress = progress
        self.rows: list[dict[str, Any]] = []
        if self._job.index == 0:
            with file_errors(self._file), _alone_in(self._file):
                pass  # a line that a kill has cut off is gone
            self.rows = read_results(workdir, study)
            self._job.on_post(self._write)
        found = self._job.from_first("finished trials", list(self.rows))
        self.num_before = len(found)
        if self._job.index:
            self.rows = found

    def add(self, rows: Sequence[dict[str, Any]], examples: Sequence[dict[str, Any]] = ()) -> None:
        """Append rows in one write and wait until they are on disk, or hand them to who does.

        Args:
          rows: of finished trials, from `lbopt.sweep._record.Record.row`.
          examples: Lines of those among them that were tested, from `lbopt.sweep._examples.pack`.

        Raises:
          EnvironmentProblem: naming the file, if it cannot be written; none of the rows is in it then.
        """
        if self._job.index:
            self.rows.extend(rows)
        if self._job.index == 0 or not self._of_all:
            self._job.post([list(rows), list(examples)])

    def _write(self, posted: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> None:
        rows, examples = posted
        with self._lock:
            # First: a trial whose row is there has its examples too, and one without runs again.
            if examples:
                with file_errors(self._examples):
                    _append(self._examples, _lines(examples))
            with file_errors(self._file):
                _append(self._file, _lines(rows))
            copy_changes_soon(self._file.parent)
            self.rows.extend(rows)
            if self._progress is not None:
                self._progress.advance(len(rows))


@contextlib.contextmanager
def _alone_in(file: pathlib.Path) -> Iterator[IO[bytes]]:
    """Open a file for this writer alone, without a line that the death of another one has cut off."""
    with open_regular(file, "a+b", buffering=0) as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        end = stream.seek(0, os.SEEK_END)
        whole = _end_of_whole_lines(stream, end)
        if whole < end:
            stream.truncate(whole)
            stream.seek(whole)
        yield stream


def _end_of_whole_lines(stream: IO[bytes], end: int) -> int:
    """Return where the last whole line ends, looking backwards."""
    start = end
    while start > 0:
        begin = max(0, start - _PAGE)
        stream.seek(begin)
        found = (stream.read(start - begin) or b"").rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        start = begin
    return 0


def _lines(rows: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _append(file: pathlib.Path, data: bytes) -> None:
    """Append all of the data or nothing: the rows of another thread or process may follow."""
    with _alone_in(file) as stream:
        before = stream.seek(0, os.SEEK_END)
        try:
            if stream.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(stream.fileno())
        except OSError:
            stream.truncate(before)
            raise
