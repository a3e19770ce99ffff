"""The log of MLPerf Training, an option of a run."""

from __future__ import annotations

import contextlib
import json
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from lbopt import _typed_json
from lbopt._regular import open_regular, read_regular
from lbopt.errors import EnvironmentProblem
from lbopt.workdir import _folder

PREFIX = ":::MLLOG"
_POINT = "POINT_IN_TIME"
_START = "INTERVAL_START"
_END = "INTERVAL_END"


class _Metadata(TypedDict):
    step: _typed_json.Count


class _MllogLine(TypedDict):
    metadata: _Metadata


class MlperfLog:
    """The MLPerf log of one run: printed, and appended to mllog.txt of the workdir.

    A resumed run continues the file after the lines up to its first step. A line is `:::MLLOG` and
    JSON with `namespace`, `time_ms`, `event_type`, `key`, `value` and `metadata`, as in
    mlcommons/logging. The keys are those of the ResNet-50 and BERT benchmarks; the metadata of
    every line have the step.

    Args:
      workdir: The run's folder.
      values: Keys and values at the beginning of the log; None for no log at all.
      epoch_at: Function of the step that returns the epochs that have passed.
      start: The step at which this start begins.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        values: Mapping[str, Any] | None,
        epoch_at: Callable[[int], float],
        start: int,
    ):
        self._file = workdir / "mllog.txt"
        self._is_active = values is not None
        self._epoch_at = epoch_at
        kept = self._keep_until(start) if self._is_active else []
        self._is_over = any('"run_stop"' in line for line in kept)
        if not kept:
            self._write(_START, "init_start", None, 0)
            for key, value in (values or {}).items():
                self._write(_POINT, key, value, 0)
            self._write(_END, "init_stop", None, 0)
            self._write(_START, "run_start", None, 0)
        self._in_block = bool(kept) and '"block_start"' in kept[-1]

    def training_begins(self, step: int) -> None:
        """Log that a block of training begins, unless the run was stopped and resumed in one."""
        if not self._in_block:
            self._write(_START, "block_start", None, step)
        self._in_block = True

    def evaluation_begins(self, step: int) -> None:
        """Log that a block of training has ended, and evaluation begins."""
        self._end_block(step)
        self._write(_START, "eval_start", None, step)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an evaluation, and its end."""
        for name, value in metrics.items():
            self._write(_POINT, name.replace("/", "_"), value, step)
        self._write(_END, "eval_stop", None, step)

    def run_ends(self, step: int, success: bool) -> None:
        """Log once that the run is over, and whether it has reached its target."""
        self._end_block(step)
        if not self._is_over:
            self._write(_END, "run_stop", None, step, status="success" if success else "aborted")
            self._is_over = True

    def _end_block(self, step: int) -> None:
        if self._in_block:
            self._write(_END, "block_stop", None, step)
            self._in_block = False

    def _keep_until(self, start: int) -> list[str]:
        """Drop the lines after a step, all of them for a fresh run; return the others."""
        lines: list[str] = []
        with _folder.file_errors(self._file):
            if self._file.exists():
                lines = read_regular(self._file).decode(errors="replace").splitlines()

        # A line that a kill cut off has no closing brace.
        kept = [
            line
            for number, line in enumerate(lines, 1)
            if start and line.endswith("}") and self._step_of(number, line) <= start
        ]
        if lines:
            _folder.write_text(self._file, "".join(f"{line}\n" for line in kept))
        return kept

    def _step_of(self, number: int, line: str) -> int:
        """Return the step of a line of the file."""
        try:
            return _typed_json.decode(line.removeprefix(PREFIX).encode(), _MllogLine)["metadata"][
                "step"
            ]
        except ValueError as error:
            fix = (
                f"line {number} is damaged ({error}); remove that line if you know why, or use "
                "another workdir"
            )
            raise EnvironmentProblem(str(self._file), reason=fix, code="damaged") from error

    def _write(self, event_type: str, key: str, value: Any, step: int, **metadata: Any) -> None:
        if not self._is_active:
            return
        fields = {
            "namespace": "",
            "time_ms": int(time.time() * 1000),
            "event_type": event_type,
            "key": key,
            "value": value,
            "metadata": {"step": step, "epoch_num": self._epoch_at(step), **metadata},
        }
        line = f"{PREFIX} {json.dumps(fields)}"
        with contextlib.suppress(OSError, ValueError):  # if nobody reads it, the file has it
            print(line, flush=True)
        with _folder.file_errors(self._file), open_regular(self._file, "a") as stream:
            stream.write(line + "\n")
