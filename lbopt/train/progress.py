"""A bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import tqdm

from lbopt.job.member import Alone


def said_by_first(job: Alone) -> Callable[[str], None]:
    """Return what prints a line to standard error in the first process of a job, and nothing in the others."""
    return (lambda line: None) if job.index else (lambda line: print(line, file=sys.stderr, flush=True))


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
        shown = sys.stderr.isatty() and not silent
        self._bar = tqdm.tqdm(total=total, initial=done, unit=unit, dynamic_ncols=True) if shown else None

    def advance(self, count: int = 1) -> None:
        """Count units done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)

    def say(self, text: str) -> None:
        """Print a line of its own."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        elif not self._silent:
            print(text, file=sys.stderr, flush=True)

    def report(self, values: Mapping[str, float]) -> None:
        """Show a few numbers beside the count."""
        text = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        else:
            of = "" if self._total is None else f"/{self._total}"
            self.say(f"{self._unit} {self._done}{of}  {text}")

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
