"""Opening of regular files only; opening a FIFO or a device in their place could wait forever."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import stat
from typing import IO, Any

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | os.PathLike[str], mode: str = "rb", **options: Any) -> IO[Any]:
    """Open a file as `open` does, unless it is a FIFO, a socket or a device.

    Args:
      path: The file, or a link to it.
      mode: Mode of `open`.
      **options: Other arguments of `open`, `encoding` for instance.

    Raises:
      OSError: If the file cannot be opened, or at once with errno EINVAL if it is not regular.
    """
    return open(path, mode, opener=_opener, **options)


def read_regular(path: Any) -> bytes:
    """Return the content of a file of a folder or a bucket.

    Args:
      path: `pathlib.Path`, or a path in a bucket.

    Raises:
      OSError: If it cannot be read, or is not regular.
    """
    if not isinstance(path, pathlib.Path):
        return path.read_bytes()
    with open_regular(path) as stream:
        return stream.read()


def check_regular(mode: int, path: str) -> None:
    """Raise `OSError` if a file of this `st_mode` is neither a regular file nor a folder."""
    kind = _KINDS.get(stat.S_IFMT(mode))
    if kind is not None:
        raise OSError(errno.EINVAL, f"{kind}, not a regular file", path)


def _opener(path: str, flags: int) -> int:
    # Before opening, as opening a device can have effects. `flags` say whether a file is created.
    with contextlib.suppress(FileNotFoundError):
        check_regular(os.stat(path).st_mode, path)
    # Non-blocking, as the file may have been replaced since; regular files ignore the flag.
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    try:
        check_regular(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
