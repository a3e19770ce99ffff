"""Exclusive use of a folder while a data set is made in it."""

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
    """Hold an exclusive lock on a folder. The system releases it if the process is killed.

    Args:
      folder: The folder, made if it is missing.
      leftovers: Pattern of files in it that a killed process leaves behind. They are removed, since
        no other process is at work.

    Raises:
      EnvironmentProblem: If the folder cannot be written, or if another process holds the lock.
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
    """Turn errors of the operating system into `EnvironmentProblem`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        fix = f"{folder} cannot be written ({reason}); repair it, or use another folder"
        raise EnvironmentProblem("data_dir", reason=fix, code="resource") from error


def _lock(handle: int, folder: pathlib.Path) -> bool:
    """Return whether the lock was taken; False on a file system without locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        fix = f"another lbopt prepare is writing {folder}; wait until it ends"
        raise EnvironmentProblem("data_dir", reason=fix, code="conflict") from error
    except OSError:
        return False
    return True
