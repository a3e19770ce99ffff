"""Standard output and error that outlive their readers: what nobody reads any more is worth no run."""

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
    """Writes to a descriptor that never fail.

    Once the reader is gone, the descriptor leads nowhere, for libraries that write to it too. A disk that is full may have room
    again: then only what it did not take is lost.

    Args:
      descriptor: an open one.
    """

    def __init__(self, descriptor: int):
        super().__init__()
        self._descriptor = descriptor
        self.lost = ""
        """Why something was not written, in the words of the operating system; "" if nothing is missing, or only the reader."""

    def write(self, data: Any) -> int:
        """Write some or all of it; say that all was written where nothing can be."""
        while True:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:  # another program has made a shared terminal or pipe so
                select.select([], [self._descriptor], [])
            except OSError as error:
                if error.errno in _READER_GONE:
                    lead_nowhere(self._descriptor)
                else:
                    self.lost = error.strerror or type(error).__name__
                return len(data)

    def writable(self) -> bool:
        """Say that it can be written."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return os.isatty(self._descriptor)


def outlive_readers() -> None:
    """Put such streams in the place of standard output and error; what is closed leads nowhere.

    A closed descriptor would be given to the next file that is opened, and whatever is written to standard error would go there.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            lead_nowhere(descriptor)
    sys.stdout, sys.stderr = _stream(1, sys.stdout), _stream(2, sys.stderr)


def lead_nowhere(descriptor: int) -> None:
    """Let a descriptor be that of the null device."""
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
        errors="backslashreplace",  # a letter that a terminal does not have ends no command
        line_buffering=descriptor == 2 or os.isatty(descriptor),
    )


def exit_code(code: int) -> int:
    """Return the exit code of a command whose own is given: results that a disk did not take are not there."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(raw, Outliving) or not raw.lost or code != 0:
        return code
    print(
        f"lbopt: standard output cannot be written ({raw.lost}); free space, then run the same command again",
        file=sys.stderr,
    )
    return EXIT_ENVIRONMENT
