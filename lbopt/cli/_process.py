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


def import_tensorboard_writer() -> None:
    """Import the writer of event files without PyTorch.

    tensorboardX imports PyTorch where it is installed, to draw its graphs. That takes more than a
    second at every start, and lbopt draws no graphs.
    """
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("tensorboardX")
    finally:
        if hidden:
            del sys.modules["torch"]
