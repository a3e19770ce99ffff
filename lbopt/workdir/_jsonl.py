"""metrics.jsonl and TensorBoard: the same scalars, and no step lost or doubled by a restart."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from lbopt import _typed_json
from lbopt._regular import open_regular
from lbopt.errors import EnvironmentProblem
from lbopt.workdir import _bucket, _folder
from lbopt.workdir._hooks import MetricsHook

_SCALARS = dict[str, _typed_json.Int | float | bool | None]


class MetricsWriter:
    """Writes scalars to metrics.jsonl and TensorBoard of a workdir.

    Args:
      workdir: The folder.
      resumed_step: The step of the restored state; lines after it, which will be written again,
        are dropped.
      hooks: Functions (step, metrics) that get every line after it is written: its scalars and
        `examples_seen`, each a dict of its own.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        resumed_step: int = 0,
        hooks: Sequence[MetricsHook] = (),
    ):
        # Only training needs tensorboardX, whose import takes a while.
        from lbopt.workdir._tensorboard import Board

        self._workdir = workdir
        self._hooks = hooks
        self._file = workdir / "metrics.jsonl"
        drop_lines_after(self._file, resumed_step)
        with _folder.file_errors(self._file):
            self._stream = open_regular(self._file, "a", buffering=1)
        self._board = Board(workdir / "tensorboard", resumed_step + 1)

    def write(self, step: int, examples_seen: int, scalars: Mapping[str, float]) -> None:
        """Write a line, flush it to the operating system, and call the hooks."""
        # Half of a surrogate pair in a name could not be read again.
        readable = {
            name.encode("utf-8", "backslashreplace").decode(): value
            for name, value in scalars.items()
        }
        in_json = {name: finite_or_none(value) for name, value in readable.items()}
        line = {"step": step, "examples_seen": examples_seen, **in_json}
        with _folder.file_errors(self._file):
            self._stream.write(json.dumps(line, allow_nan=False) + "\n")
        if self._board.write(step, scalars):
            _bucket.copy_changes(self._workdir)
        for hook in self._hooks:
            hook(step, {"examples_seen": float(examples_seen), **readable})

    def sync(self) -> None:
        """Wait until everything written is on disk."""
        with _folder.file_errors(self._file):
            os.fsync(self._stream.fileno())
        self._board.sync()
        _bucket.copy_changes(self._workdir)

    def close(self) -> None:
        """Close both files."""
        try:
            with _folder.file_errors(self._file):
                self._stream.close()
        finally:
            self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(EnvironmentProblem) if exception[0] else contextlib.nullcontext():
            self.close()


class NoMetricsWriter:
    """Writes nothing: the writer of all processes of a job but the first."""

    def write(self, step: int, examples_seen: int, scalars: Mapping[str, float]) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Do nothing."""

    def __enter__(self) -> NoMetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class _MetricsLine(TypedDict):
    """A line of metrics.jsonl; its other fields are scalars by name."""

    step: _typed_json.Count
    examples_seen: _typed_json.Count


def check_line(line: Any) -> None:
    """Raise `ValueError` naming the field unless a line is one of metrics.jsonl."""
    _typed_json.convert(line, _MetricsLine)
    _typed_json.convert(line, _SCALARS)


def finite_or_none(value: float) -> float | None:
    """Return a number as it is written in JSON: None (null) if it is not finite.

    >>> finite_or_none(float("nan")), finite_or_none(0.5)
    (None, 0.5)
    """
    return value if math.isfinite(value) else None


def broken_losses(line: Mapping[str, float | None]) -> list[str]:
    """Return the names of the losses that are not finite.

    Args:
      line: The scalars of a step, or a line of metrics.jsonl, where None is not finite.
    """
    losses = {name: value for name, value in line.items() if name in ("train/loss", "eval/loss")}
    return [name for name, value in losses.items() if value is None or not math.isfinite(value)]


def read_json_lines(
    file: pathlib.Path, check: Callable[[Any], None] = check_line
) -> list[dict[str, Any]]:
    """Return the whole lines of a JSON-lines file, without a last line that a kill cut off.

    Args:
      file: The file; a missing one has no lines.
      check: Function that raises `ValueError` if a line has other fields or types than it should.

    Returns:
      A `_typed_json.Record` for each line.

    Raises:
      EnvironmentProblem: If the file cannot be read, or a whole line is damaged.
    """
    try:
        *whole, _torn = _typed_json.read_bytes(file, _typed_json.MOST_LINES_BYTES).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        fix = f"cannot be read ({error.strerror}); make it readable or use another workdir"
        raise EnvironmentProblem(str(file), reason=fix, code="resource") from error
    except ValueError as error:
        fix = f"cannot be read ({error}); use another workdir"
        raise EnvironmentProblem(str(file), reason=fix, code="damaged") from error
    return [_parse(file, number, line, check) for number, line in enumerate(whole, 1)]


def _parse(
    file: pathlib.Path, number: int, line: bytes, check: Callable[[Any], None]
) -> dict[str, Any]:
    fix = "remove that line if you know why, or use another workdir"
    try:
        parsed = _typed_json.decode(line)
        check(parsed)
    except ValueError as error:
        what = f"line {number} is damaged ({error})"
        raise EnvironmentProblem(str(file), reason=f"{what}; {fix}", code="damaged") from error
    return _typed_json.Record(parsed, f"{file}: line {number}", fix)


def drop_lines_after(file: pathlib.Path, step: int) -> None:
    """Keep the whole lines up to a step; the file is replaced atomically."""
    if file.exists():
        kept = [line for line in read_json_lines(file) if line["step"] <= step]
        _folder.write_text(file, "".join(json.dumps(line) + "\n" for line in kept))
