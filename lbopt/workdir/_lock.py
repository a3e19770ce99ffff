"""Processes that share a workdir and know nothing of each other: each does its part, and no part is done twice."""

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
_NAME = re.compile(r"\.shard-(\d+)-of-(\d+)")
_DOOR = ".shards"


@dataclasses.dataclass(frozen=True)
class Shard:
    """Part `number` of `count`.

    Attributes:
      number: from 1.
      count: of all.
    """

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read "2/8".

        Args:
          text: NUMBER/COUNT, with 1 <= NUMBER <= COUNT < 10^6.

        Raises:
          UserError: naming `--shard`, if it is no such thing.

        >>> Shard.parse("2/8").part_of("abcdefghijklmnop")
        ['b', 'j']
        """
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise UserError(f"--shard = {text!r}: give NUMBER/COUNT, from 1/COUNT to COUNT/COUNT")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def part_of(self, items: Sequence[Item]) -> list[Item]:
        """Return which of the items are this part's: every `count`-th, from the `number`-th on."""
        return list(items[self.number - 1 :: self.count])

    @contextlib.contextmanager
    def held(self, folder: pathlib.Path) -> Iterator[None]:
        """Hold this part of a workdir while the context lasts; the lock goes with the process.

        Args:
          folder: the workdir, on a file system with locks that all who share it see.

        Raises:
          UserError: naming `--shard`, if another process is at work on it, or on a part of another division.
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
                    fix = "wait for it, or give another --shard"
                    raise UserError(
                        f"--shard = '{self}': another process is at work on it in {str(folder)!r}; {fix}"
                    )
            yield


@contextlib.contextmanager
def starting_lock(folder: pathlib.Path) -> Iterator[None]:
    """Be the only one who begins in a folder, for a moment; wait for another one who does.

    Args:
      folder: that exists; a hidden file in it is locked while the context lasts.
    """
    with contextlib.ExitStack() as stack:
        with _locking(folder / _DOOR):
            descriptor = os.open(folder / _DOOR, os.O_RDWR | os.O_CREAT)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _locking(file: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
            f"{file} cannot be made or locked ({error.strerror}); free space or mend it, then run the same command again"
        ) from error


def had_shards(folder: pathlib.Path) -> bool:
    """Return whether parts of a study have been at work in a folder, or are."""
    return (folder / _DOOR).exists()


def _refuse_other_count(folder: pathlib.Path, file: pathlib.Path, ours: Shard) -> None:
    found = _NAME.fullmatch(file.name)
    if found is None or int(found[2]) == ours.count:
        return
    with contextlib.ExitStack() as stack:
        with _locking(file):
            descriptor = os.open(file, os.O_RDWR)
            stack.callback(os.close, descriptor)
            is_free = _take(descriptor)
        if not is_free:
            theirs = Shard(int(found[1]), int(found[2]))
            fix = f"some work would be done twice; use --shard=NUMBER/{theirs.count}, or wait until all of those have ended"
            raise UserError(
                f"--shard = '{ours}': shard {theirs} is at work in {str(folder)!r}; {fix}"
            )


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
