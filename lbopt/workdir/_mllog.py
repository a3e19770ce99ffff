"""Log lines in the form of MLPerf Training, by option."""

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
_POINT, _START, _END = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"


class _Metadata(TypedDict):
    step: _typed_json.Count


class _Line(TypedDict):
    metadata: _Metadata


class MlperfLog:
    """The lines of one run: printed, and appended to mllog.txt of the workdir.

    A run that is resumed goes on in that file, behind the lines up to the step it resumes at. A line is `:::MLLOG` and JSON
    with `namespace`, `time_ms`, `event_type`, `key`, `value` and `metadata`, as in mlcommons/logging. The keys are those of
    the ResNet-50 and BERT benchmarks; every line's metadata have the step.

    Args:
      workdir: the run's folder.
      values: what is said once at the beginning; None writes nothing at all.
      epoch_at: step -> epochs that have passed.
      start: steps that were done before.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        values: Mapping[str, Any] | None,
        epoch_at: Callable[[int], float],
        start: int,
    ):
        self._file, self._active, self._epoch_at = (
            workdir / "mllog.txt",
            values is not None,
            epoch_at,
        )
        kept = self._keep_until(start) if self._active else []
        self._over = any('"run_stop"' in line for line in kept)
        if not kept:
            self._write(_START, "init_start", None, 0)
            for key, value in (values or {}).items():
                self._write(_POINT, key, value, 0)
            self._write(_END, "init_stop", None, 0)
            self._write(_START, "run_start", None, 0)
        self._in_block = bool(kept) and '"block_start"' in kept[-1]

    def training_begins(self, step: int) -> None:
        """Say that a block of training begins, unless one goes on: that of a run that was stopped in it."""
        if not self._in_block:
            self._write(_START, "block_start", None, step)
        self._in_block = True

    def evaluation_begins(self, step: int) -> None:
        """Say that a block of training has ended, and evaluation begins."""
        self._end_block(step)
        self._write(_START, "eval_start", None, step)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Say what came of it."""
        for name, value in metrics.items():
            self._write(_POINT, name.replace("/", "_"), value, step)
        self._write(_END, "eval_stop", None, step)

    def run_ends(self, step: int, success: bool) -> None:
        """Say that the run is over, and whether it has reached its target; once."""
        self._end_block(step)
        if not self._over:
            self._write(_END, "run_stop", None, step, status="success" if success else "aborted")
            self._over = True

    def _end_block(self, step: int) -> None:
        if self._in_block:
            self._write(_END, "block_stop", None, step)
            self._in_block = False

    def _keep_until(self, start: int) -> list[str]:
        """Drop what was said after a step, all of it if the run starts anew; return the rest."""
        with _folder.file_errors(self._file):
            lines = (
                read_regular(self._file).decode(errors="replace").splitlines()
                if self._file.exists()
                else []
            )
        steps = [
            self._step(*line) if line[1].endswith("}") else None
            for line in enumerate(lines, 1)
            if start
        ]
        kept = [
            line
            for line, step in zip(lines, steps, strict=False)
            if step is not None and step <= start
        ]
        if lines:
            _folder.write_text(self._file, "".join(f"{line}\n" for line in kept))
        return kept

    def _step(self, number: int, line: str) -> int:
        try:
            return _typed_json.decode(line.removeprefix(PREFIX).encode(), _Line)["metadata"]["step"]
        except ValueError as error:
            raise EnvironmentProblem(
                f"{self._file} is damaged at line {number} ({error}); remove that line if you know why, or use another --workdir"
            ) from error

    def _write(self, event_type: str, key: str, value: Any, step: int, **metadata: Any) -> None:
        if not self._active:
            return
        said = {
            "namespace": "",
            "time_ms": int(time.time() * 1000),
            "event_type": event_type,
            "key": key,
            "value": value,
            "metadata": {"step": step, "epoch_num": round(self._epoch_at(step), 4), **metadata},
        }
        line = f"{PREFIX} {json.dumps(said)}"
        with contextlib.suppress(OSError, ValueError):  # nobody reads it; the file has it
            print(line, flush=True)
        with _folder.file_errors(self._file), open_regular(self._file, "a") as stream:
            stream.write(line + "\n")
