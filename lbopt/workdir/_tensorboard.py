"""Event files of TensorBoard, written by tensorboardX."""

from __future__ import annotations

import os
import pathlib
import re
import socket
import time
from collections.abc import Mapping
from typing import Any

from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import RecordWriter

from lbopt.workdir import _folder

_SYNC_EVERY_S = 30.0
"""Longest time until TensorBoard sees a new point of a curve, in seconds."""
_NOT_IN_TAGS = re.compile(r"[^-/\w.]")
"""Characters that TensorBoard does not accept in the name of a curve."""


class Board:
    """An event file of TensorBoard, written by the calling thread.

    tensorboardX's `SummaryWriter` writes in a thread of its own: on a full disk that thread ends
    silently, and the training loop waits for it for ever.

    Args:
      folder: The folder for the file.
      first_step: The first step of this start; TensorBoard drops later points of earlier starts.
    """

    def __init__(self, folder: pathlib.Path, first_step: int):
        self._folder = folder
        with _folder.file_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
            self._records = RecordWriter(str(folder / name))
        self._synced = time.monotonic()
        self._add(file_version="brain.Event:2")
        self._add(
            step=first_step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        )

    def write(self, step: int, scalars: Mapping[str, float]) -> bool:
        """Write scalars; return whether the file was flushed as well."""
        for name, value in scalars.items():
            # tensorboardX's own `summary.scalar` would warn of every value that is not finite; the
            # run says so once.
            tag = _NOT_IN_TAGS.sub("_", name).lstrip("/")
            point = summary_pb2.Summary.Value(tag=tag, simple_value=float(value))
            self._add(step=step, summary=summary_pb2.Summary(value=[point]))
        due = time.monotonic() > self._synced + _SYNC_EVERY_S
        if due:
            self.sync()
        return due

    def _add(self, **fields: Any) -> None:
        with _folder.file_errors(self._folder):
            self._records.write(
                event_pb2.Event(wall_time=time.time(), **fields).SerializeToString()
            )

    def sync(self) -> None:
        """Flush the file to the operating system."""
        self._synced = time.monotonic()
        with _folder.file_errors(self._folder):
            self._records.flush()

    def close(self) -> None:
        """Close the file."""
        with _folder.file_errors(self._folder):
            self._records.close()
