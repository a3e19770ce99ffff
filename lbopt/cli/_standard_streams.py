"""Standard output and error that never fail: a run continues when nobody reads them any more."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from typing import Any, TextIO

from lbopt.errors import EXIT_ENVIRONMENT

_READER_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ECONNRESET)
"""A pipe without a reader, a closed terminal, a closed descriptor, a socket that was hung up."""


class Outliving(io.RawIOBase):
    """A stream whose writes never fail.

    Once its reader is gone, the descriptor is that of the null device, also for libraries that
    write to it directly. On a full disk, only the data that do not fit are lost.

    Args:
      descriptor: An open file descriptor.
    """

    def __init__(self, descriptor: int):
        super().__init__()
        self._descriptor = descriptor
        self.lost = ""
        """The system's reason for lost data; "" if none were lost, or only the reader left."""

    def write(self, data: Any) -> int:
        """Write some or all of the data; data that cannot be written count as written."""
        while True:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:  # another program has set a shared terminal to non-blocking
                select.select([], [self._descriptor], [])
            except OSError as error:
                if error.errno in _READER_GONE:
                    lead_nowhere(self._descriptor)
                else:
                    self.lost = error.strerror or type(error).__name__
                return len(data)

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return os.isatty(self._descriptor)


def outlive_readers() -> None:
    """Replace standard output and error by streams whose writes never fail.

    Closed descriptors are opened on the null device. Otherwise the next file that is opened would
    take such a descriptor, and lines for standard error would be written into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            lead_nowhere(descriptor)
    sys.stdout = _stream(1, sys.stdout)
    sys.stderr = _stream(2, sys.stderr)


def lead_nowhere(descriptor: int) -> None:
    """Redirect a descriptor to the null device."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    os.set_inheritable(descriptor, True)


def _stream(descriptor: int, before: TextIO | None) -> TextIO:
    with contextlib.suppress(OSError, ValueError):
        if before is not None:
            before.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(Outliving(descriptor)),
        encoding=getattr(before, "encoding", None) or "utf-8",
        errors="backslashreplace",  # a letter that the terminal lacks must not end the command
        line_buffering=descriptor == 2 or os.isatty(descriptor),
    )


def exit_code(code: int) -> int:
    """Return a command's exit code, or `EXIT_ENVIRONMENT` if output of a success was lost."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(raw, Outliving) or not raw.lost or code != 0:
        return code
    fix = f"cannot be written ({raw.lost}); free space, then run the same command again"
    print(f"lbopt: standard output: {fix}", file=sys.stderr)
    return EXIT_ENVIRONMENT
