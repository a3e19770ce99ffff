"""Shards of a study's work, for processes that share a workdir and do not talk to each other."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import TypeVar

from lbopt.errors import EnvironmentProblem, UserError

Item = TypeVar("Item")
_SHARD_FILE = re.compile(r"\.shard-(\d+)-of-(\d+)")
_START_FILE = ".shards"
"""A hidden file that is locked while a process starts in the folder."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """One of several equal shares of a study's work.

    Attributes:
      number: Number of this shard, from 1.
      count: Number of shards.
    """

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read "2/8".

        Args:
          text: NUMBER/COUNT, with 1 <= NUMBER <= COUNT < 10^6.

        Raises:
          UserError: Naming `shard`, for another text.

        >>> Shard.parse("2/8").items_of("abcdefghijklmnop")
        ['b', 'j']
        """
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise UserError("shard", text, "give NUMBER/COUNT, from 1/COUNT to COUNT/COUNT")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def items_of(self, items: Sequence[Item]) -> list[Item]:
        """Return the items of this shard: every `count`-th, from the `number`-th on."""
        return list(items[self.number - 1 :: self.count])

    @contextlib.contextmanager
    def held(self, folder: pathlib.Path) -> Iterator[None]:
        """Hold this shard of a workdir while the context lasts; the lock ends with the process.

        Args:
          folder: The workdir, on a file system whose locks all processes see.

        Raises:
          UserError: Naming `shard`, if another process holds it, or holds a shard of another
            division.
        """
        file = folder / f".shard-{self.number}-of-{self.count}"
        with contextlib.ExitStack() as stack:
            with starting_lock(folder):
                for other in folder.glob(".shard-*-of-*"):
                    _refuse_other_count(folder, other, self)
                with _locking(file):
                    descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
                    stack.callback(os.close, descriptor)
                    is_ours = _take(descriptor)
                if not is_ours:
                    fix = (
                        f"another process is at work on it in {str(folder)!r}; wait for it, or "
                        "give another shard"
                    )
                    raise UserError("shard", str(self), fix, code="conflict")
            yield


@contextlib.contextmanager
def starting_lock(folder: pathlib.Path) -> Iterator[None]:
    """Hold a short exclusive lock while starting; blocks while another process holds it.

    Args:
      folder: An existing folder; a hidden file in it is locked while the context lasts.
    """
    with contextlib.ExitStack() as stack:
        with _locking(folder / _START_FILE):
            descriptor = os.open(folder / _START_FILE, os.O_RDWR | os.O_CREAT)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _locking(file: pathlib.Path) -> Iterator[None]:
    """Turn the system's refusal to make or lock a file into an `EnvironmentProblem`."""
    try:
        yield
    except OSError as error:
        fix = (
            f"cannot be made or locked ({error.strerror}); free space or make it writable, then "
            "run the same command again"
        )
        raise EnvironmentProblem(str(file), reason=fix, code="resource") from error


def had_shards(folder: pathlib.Path) -> bool:
    """Return whether shards of a study were ever held in a folder."""
    return (folder / _START_FILE).exists()


def _refuse_other_count(folder: pathlib.Path, file: pathlib.Path, ours: Shard) -> None:
    """Raise `UserError` if a file of a shard of another division is locked."""
    found = _SHARD_FILE.fullmatch(file.name)
    if found is None or int(found[2]) == ours.count:
        return
    with contextlib.ExitStack() as stack:
        with _locking(file):
            descriptor = os.open(file, os.O_RDWR)
            stack.callback(os.close, descriptor)
            is_free = _take(descriptor)
        if not is_free:
            theirs = Shard(int(found[1]), int(found[2]))
            fix = (
                f"shard {theirs} is at work in {str(folder)!r}, and some work would be done twice; "
                f"use shard NUMBER/{theirs.count}, or wait until all of those have ended"
            )
            raise UserError("shard", str(ours), fix, code="conflict")


def _take(descriptor: int) -> bool:
    """Lock an open file; return False if another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
