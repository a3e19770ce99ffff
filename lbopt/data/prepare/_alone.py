"""One process at a time makes something in a folder, and takes away what a killed one left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
from collections.abc import Iterator

from lbopt.errors import EnvironmentProblem


@contextlib.contextmanager
def alone_in(folder: pathlib.Path, leftovers: str) -> Iterator[None]:
    """Hold a folder, which is made if need be; the hold goes with the process, however that ends.

    Args:
      folder: where something is made.
      leftovers: pattern of what an unfinished process leaves in it; removed, as nobody else is at work.

    Raises:
      EnvironmentProblem: if it cannot be written, or if another process holds it.
    """
    with on_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        if _lock(handle, folder):
            for leftover in folder.glob(leftovers):
                shutil.rmtree(leftover, ignore_errors=True)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def on_disk(folder: pathlib.Path) -> Iterator[None]:
    """Turn what the disk refuses into one line.

    Raises:
      EnvironmentProblem: for any error of the operating system.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise EnvironmentProblem(
            f"{folder} cannot be written ({reason}); mend that, or give another --data_dir"
        ) from error


def _lock(handle: int, folder: pathlib.Path) -> bool:
    """Return whether the folder is ours alone; file systems without locks do not know."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise EnvironmentProblem(
            f"{folder}: another lbopt prepare is at work there; wait until it ends"
        ) from error
    except OSError:
        return False
    return True
