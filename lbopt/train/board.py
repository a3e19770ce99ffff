"""TensorBoard's files of events, by tensorboardX."""

from __future__ import annotations

import logging
import os
import pathlib
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from lbopt.train import workdir as workdirs

_HIDE_TORCH = "torch" not in sys.modules
if (
    _HIDE_TORCH
):  # tensorboardX imports it where it is installed, for more than a second, to draw its graphs
    sys.modules["torch"] = None  # type: ignore[assignment]
try:
    from tensorboardX import summary
    from tensorboardX.proto import event_pb2
    from tensorboardX.record_writer import RecordWriter
finally:
    if _HIDE_TORCH:
        del sys.modules["torch"]

# The run says once that its loss is not finite, this for every value.
logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)
_SYNC_EVERY_S = 30.0
"""TensorBoard sees the curves at most so late."""


class Board:
    """An event file of TensorBoard, written at once.

    tensorboardX's `SummaryWriter` writes in a thread of its own: where that meets a full disk, it ends without a word
    and the training loop waits for it for ever.

    Args:
      folder: for the file.
      first_step: what an earlier start has written from this step on is forgotten.
    """

    def __init__(self, folder: pathlib.Path, first_step: int):
        self._folder = folder
        with workdirs.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
            self._records = RecordWriter(str(folder / name))
        self._synced = time.monotonic()
        self._add(file_version="brain.Event:2")
        self._add(
            step=first_step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        )

    def write(self, step: int, scalars: Mapping[str, float]) -> bool:
        """Write scalars; whether it was time to hand everything on."""
        for name, value in scalars.items():
            self._add(step=step, summary=summary.scalar(name, value))
        due = time.monotonic() > self._synced + _SYNC_EVERY_S
        if due:
            self.sync()
        return due

    def _add(self, **fields: Any) -> None:
        with workdirs.writing(self._folder):
            self._records.write(
                event_pb2.Event(wall_time=time.time(), **fields).SerializeToString()
            )

    def sync(self) -> None:
        """Hand everything to the operating system."""
        self._synced = time.monotonic()
        with workdirs.writing(self._folder):
            self._records.flush()

    def close(self) -> None:
        """Close the file."""
        with workdirs.writing(self._folder):
            self._records.close()
