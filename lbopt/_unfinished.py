"""Hidden files and folders in which something is written before it gets its name: `.NAME.NUMBER`, locked by whoever writes."""

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


def beside(place: pathlib.Path, ending: str = "") -> pathlib.Path:
    """Return a hidden name beside `place` that nobody else has: containers on one disk have all the same pid."""
    return place.with_name(f".{place.name}.{secrets.randbits(32)}{ending}")


def lock(descriptor: int) -> None:
    """Hold an open file or folder until it is closed, for `remove`; some file systems have no locks."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def folder(place: pathlib.Path) -> Iterator[pathlib.Path]:
    """Make a hidden folder beside `place`, without those of killed processes; what is not renamed is removed at the end."""
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
    """Remove what killed processes have left in a folder under such names.

    A process that is at work, on any host that sees the locks of this folder, holds a lock on what it writes. One that began
    within the last minute may not have got it yet: what is young stays.
    """
    with contextlib.suppress(OSError):  # it is in nobody's way
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
