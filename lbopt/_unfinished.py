"""Hidden files and folders `.NAME.NUMBER`, written before they are renamed to NAME.

The process that writes one holds a lock on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import re
import secrets
import shutil
import time
from collections.abc import Iterator

from lbopt._regular import open_regular

_YOUNG_S = 60.0
"""Age of a file below which its writer may not hold its lock yet; see `remove`."""


def beside(place: pathlib.Path, ending: str = "") -> pathlib.Path:
    """Return a unique hidden name beside `place`.

    Its number is random and no process id, as containers on one disk can have the same id.
    """
    return place.with_name(f".{place.name}.{secrets.randbits(32)}{ending}")


def lock(descriptor: int) -> None:
    """Lock an open file or folder until it is closed, so that `remove` leaves it alone.

    Some file systems have no locks; there it does nothing.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def folder(place: pathlib.Path) -> Iterator[pathlib.Path]:
    """Make a hidden folder beside `place`, and remove it at the end unless it was renamed.

    Folders that killed processes left there are removed first.
    """
    remove(place.parent, re.compile(rf"\.{re.escape(place.name)}\.\d+\.partial"))
    made = beside(place, ".partial")
    made.mkdir()
    descriptor = os.open(made, os.O_RDONLY)
    try:
        lock(descriptor)
        yield made
    finally:
        os.close(descriptor)
        shutil.rmtree(made, ignore_errors=True)


def remove(around: pathlib.Path, names: re.Pattern[str]) -> None:
    """Remove files and folders that killed processes left.

    A working process, on any host that sees the locks of this folder, holds a lock on the files
    that it writes. It may not have the lock in the first minute, so young files stay.

    Args:
      around: Folder that is searched.
      names: Regular expression for the whole names of the files and folders to remove.
    """
    with contextlib.suppress(OSError):  # leftovers do no harm
        for entry in list(around.iterdir()):
            if names.fullmatch(entry.name) and time.time() - entry.lstat().st_mtime > _YOUNG_S:
                with contextlib.suppress(OSError):
                    _remove_one(entry)


def _remove_one(entry: pathlib.Path) -> None:
    if entry.is_symlink():
        return
    if not entry.is_dir():
        with open_regular(entry, "r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            entry.unlink()
        return
    descriptor = os.open(entry, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(entry)
    finally:
        os.close(descriptor)
