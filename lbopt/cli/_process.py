"""Process-wide settings of the `lbopt` command.

The library changes nothing process-wide; the command has the process to itself. It also handles
Ctrl-C (`lbopt.cli._main`), keeps compiled programs (`lbopt.cli._compilation_cache`) and writes to
streams whose reader may end (`lbopt.cli._standard_streams`).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator

from lbopt.cli import _event_loop

_LOGGERS = ("absl", "gcsfs")
"""Loggers of Orbax and of the bucket's client. They narrate every save and retry; errors that
matter are raised."""


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Quiet the loggers and make event loops wait for their tasks, until the block ends."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with _event_loop.finishing():
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


_NOT_FOR_EVENTS = ("torch", "google.cloud.storage", "boto3")


def import_tensorboard_writer() -> None:
    """Import the writer of event files without libraries that it does not need here.

    tensorboardX imports PyTorch to draw graphs, which lbopt does not draw, and clients of buckets,
    into which lbopt copies the files itself. Where they are installed, each takes up to seconds.
    """
    hidden = [name for name in _NOT_FOR_EVENTS if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        importlib.import_module("tensorboardX")
    finally:
        for name in hidden:
            del sys.modules[name]
