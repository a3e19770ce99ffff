"""The folder of a run's checkpoints, as it lies on disk or in a bucket."""

from __future__ import annotations

import errno
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from lbopt._regular import check_regular
from lbopt.errors import EnvironmentProblem, require
from lbopt.train._faults import reason_of
from lbopt.workdir import checkpoint_root, is_whole_checkpoint

ARRAYS = "default"
"""Folder of a checkpoint with the arrays of the state."""
SEAL = "seal"
"""Folder of a checkpoint with its seal."""


def check_name(workdir: str, read_only: bool = False) -> None:
    """Check that Orbax can find checkpoints in a workdir of this name again.

    Orbax takes the name for a pattern. It would even put the files that a killed run has left in
    `runs/axb` into the checkpoints of `runs/a*b`. In a path with a backslash it can read nothing.

    Args:
      workdir: The workdir.
      read_only: Whether nothing is to be saved there.

    Raises:
      UserError: Naming `workdir`.

    >>> check_name("runs/batch=1024 (second)")
    """
    pattern = r"\\" if read_only else r"\[.*\]|[*?\\]"
    fix = "no checkpoint can be read in a path with * ? [...] or a backslash; use another name"
    require(not re.search(pattern, workdir, re.DOTALL), "workdir", workdir, fix)


def is_begun(workdir: pathlib.Path) -> bool:
    """Return whether a workdir has a checkpoint."""
    folder = checkpoint_root(workdir) / "checkpoints"
    return folder.is_dir() and bool(steps_on_disk(folder))


def steps_on_disk(folder: Any) -> list[int]:
    """Return the steps that have a checkpoint in a folder, ascending."""
    try:
        entries = [entry for entry in folder.iterdir() if re.fullmatch("0|[1-9][0-9]*", entry.name)]
        return sorted(int(entry.name) for entry in entries if is_whole_checkpoint(entry))
    except FileNotFoundError:
        return []
    except Exception as error:  # any class, from the storage layers
        reason = getattr(error, "strerror", None) or reason_of(error)
        fix = f"cannot be read ({reason}); make it readable or use another workdir"
        raise EnvironmentProblem(str(folder), reason=fix, code="damaged") from error


def require_checkpoint(steps: Sequence[int], workdir: Any) -> None:
    """Raise `UserError` if a workdir has no checkpoint to read."""
    fix = "no checkpoint is there yet; let lbopt train save one"
    require(steps, "workdir", str(workdir), fix, code="missing")


def check_files(checkpoint: Any) -> None:
    """Check that a checkpoint is a folder of regular files: a reader would wait for a FIFO.

    Raises:
      ValueError: If it is not. Folders of a bucket always are.
    """
    if not isinstance(checkpoint, pathlib.Path):
        return
    if not os.path.isdir(checkpoint):
        raise ValueError("it is no folder")
    for file in checkpoint.rglob("*"):
        try:
            check_regular(file.stat().st_mode, str(file))
        except FileNotFoundError:
            continue  # the reader names the missing file itself
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ELOOP):
                raise
            raise ValueError(f"{file.relative_to(checkpoint)} is {error.strerror}") from error
