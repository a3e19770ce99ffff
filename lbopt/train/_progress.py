"""A bar on a terminal, plain lines in a log."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping

import tqdm

from lbopt._shown import printable
from lbopt.job import Job

_READER_OR_NOT = contextlib.suppress(OSError, ValueError)
"""Lets nothing be raised by a pipe or terminal that nobody reads any more, or by a closed stream."""


def said_by_first(job: Job) -> Callable[[str], None]:
    """Return what prints a line to standard error in the first process of a job, and nothing in the others."""
    return (lambda line: None) if job.index else say


def say(line: str) -> None:
    """Print a line to standard error, if that is there and somebody reads it: no run ends for want of a reader."""
    with _READER_OR_NOT:
        if sys.stderr is not None:
            print(
                f"{printable(line)}\n", end="", file=sys.stderr, flush=True
            )  # in one piece: threads of a study speak at once


class Progress:
    """Say how far a run is.

    Args:
      total: how many units make the whole; None if that is not known.
      done: how many were done before.
      unit: what one is called.
      silent: say nothing: another process of the job does.
    """

    def __init__(self, total: int | None, done: int = 0, unit: str = "step", silent: bool = False):
        self._total, self._done, self._unit, self._silent = total, done, unit, silent
        self._bar: tqdm.tqdm | None = None
        with _READER_OR_NOT:
            if not silent and sys.stderr is not None and sys.stderr.isatty():
                self._bar = tqdm.tqdm(total=total, initial=done, unit=unit, dynamic_ncols=True)

    def advance(self, count: int = 1) -> None:
        """Count units done."""
        self._done += count
        if self._bar is not None:
            with _READER_OR_NOT:
                self._bar.update(count)

    def say(self, text: str) -> None:
        """Print a line of its own."""
        if self._bar is not None:
            with _READER_OR_NOT:
                self._bar.write(printable(text), file=sys.stderr)
        elif not self._silent:
            say(text)

    def report(self, values: Mapping[str, float]) -> None:
        """Show a few numbers beside the count."""
        text = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        if self._bar is not None:
            with _READER_OR_NOT:
                self._bar.set_postfix_str(printable(text))
        else:
            of = "" if self._total is None else f"/{self._total}"
            self.say(f"{self._unit} {self._done}{of}  {text}")

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            with _READER_OR_NOT:
                self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
