"""Log lines in the form of MLPerf Training, by option."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from lbopt.train import workdir as workdirs

PREFIX = ":::MLLOG"
_POINT, _START, _END = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"


class MlperfLog:
    """The lines of one run: printed, and appended to mllog.txt of the workdir. A run that is resumed goes on in that file.

    A line is `:::MLLOG` and JSON with `namespace`, `time_ms`, `event_type`, `key`, `value` and `metadata`, as in
    mlcommons/logging. The keys are those of the ResNet-50 and BERT benchmarks.

    Args:
      workdir: the run's folder.
      values: what is said once at the beginning; None writes nothing at all.
      steps_per_epoch: to count epochs by.
      start: steps that were done before.
    """

    def __init__(self, workdir: pathlib.Path, values: Mapping[str, Any] | None, steps_per_epoch: float, start: int):
        self._file, self._active = workdir / "mllog.txt", values is not None
        self._steps_per_epoch = steps_per_epoch
        self._block_from = start
        if start == 0:
            self._write(_START, "init_start", None)
            for key, value in (values or {}).items():
                self._write(_POINT, key, value)
            self._write(_END, "init_stop", None)
            self._write(_START, "run_start", None)
        self._begin_block(start)

    def evaluation_begins(self, step: int) -> None:
        """Say that a block of training has ended, and evaluation begins."""
        self._write(_END, "block_stop", None, first_epoch_num=self._epoch(self._block_from))
        self._write(_START, "eval_start", None, epoch_num=self._epoch(step))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Say what came of it, and that training goes on."""
        epoch = self._epoch(step)
        for name, value in metrics.items():
            self._write(_POINT, name.replace("/", "_"), value, epoch_num=epoch)
        self._write(_END, "eval_stop", None, epoch_num=epoch)
        self._begin_block(step)

    def run_ends(self, step: int, success: bool) -> None:
        """Say that the run is over, and whether it has reached its target."""
        status = "success" if success else "aborted"
        self._write(_END, "run_stop", None, status=status, epoch_num=self._epoch(step))

    def _begin_block(self, step: int) -> None:
        self._block_from = step
        self._write(_START, "block_start", None, first_epoch_num=self._epoch(step))

    def _epoch(self, step: int) -> float:
        return round(step / self._steps_per_epoch, 4)

    def _write(self, event_type: str, key: str, value: Any, **metadata: Any) -> None:
        if not self._active:
            return
        said = {
            "namespace": "",
            "time_ms": int(time.time() * 1000),
            "event_type": event_type,
            "key": key,
            "value": value,
            "metadata": metadata,
        }
        line = f"{PREFIX} {json.dumps(said)}"
        print(line, flush=True)
        with workdirs.writing(self._file), open(self._file, "a") as stream:
            stream.write(line + "\n")
