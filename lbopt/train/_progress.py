"""Progress of long work: a bar on a terminal or in a notebook, plain lines in a log."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Mapping

import tqdm.asyncio

with warnings.catch_warnings():  # a notebook without ipywidgets gets plain bars
    warnings.simplefilter("ignore", tqdm.TqdmWarning)
    import tqdm.auto

from lbopt._shown import printable
from lbopt.job import Job

_IN_NOTEBOOK = tqdm.auto.tqdm is not tqdm.asyncio.tqdm
"""Whether bars are widgets of a notebook."""
_IGNORING_CLOSED_STREAMS = contextlib.suppress(OSError, ValueError)
"""Ignores the errors of a pipe or terminal that nobody reads any more, and of a closed stream."""


def said_by_first(job: Job) -> Callable[[str], None]:
    """Return a function that prints a line in the first process of a job, and nothing in others."""
    return (lambda line: None) if job.index else say


def say(line: str) -> None:
    """Print a line to standard error, if that is open; no run ends because nobody reads it."""
    with _IGNORING_CLOSED_STREAMS:
        if sys.stderr is not None:
            # One write for line and newline, because threads of a study print at once.
            print(f"{printable(line)}\n", end="", file=sys.stderr, flush=True)


class Progress:
    """Shows how much of some work is done.

    Args:
      total: Total number of units; None if that is not known.
      done: Number of units that were done before.
      unit: Name of a unit.
      silent: Whether nothing is printed, because another process of the job prints.
      bar_format: Form of the bar, see `tqdm.tqdm`; None for tqdm's.
    """

    def __init__(
        self,
        total: int | None,
        done: int = 0,
        unit: str = "step",
        silent: bool = False,
        bar_format: str | None = None,
    ):
        self._total = total
        self._done = done
        self._unit = unit
        self._silent = silent
        self._bar: tqdm.auto.tqdm | None = None
        with _IGNORING_CLOSED_STREAMS:
            terminal = sys.stderr is not None and sys.stderr.isatty()
            if not silent and (terminal or _IN_NOTEBOOK):
                self._bar = tqdm.auto.tqdm(
                    total=total,
                    initial=done,
                    unit=unit,
                    dynamic_ncols=True,
                    bar_format=bar_format,
                )

    def advance(self, count: int = 1) -> None:
        """Count units as done."""
        self._done += count
        if self._bar is not None:
            with _IGNORING_CLOSED_STREAMS:
                self._bar.update(count)

    def expect(self, total: int, done: int) -> None:
        """Set the number of units, and how many of them are done."""
        if total == self._total:
            self.advance(done - self._done)
            return
        self._total = total
        self._done = done
        bar = self._bar
        if bar is not None and not bar.disable:
            began = bar.start_t
            with _IGNORING_CLOSED_STREAMS:
                bar.reset(total)  # a widget takes a new total in no other way
                bar.start_t = began
                bar.update(done)

    def say(self, text: str) -> None:
        """Print a line of its own."""
        if self._bar is not None:
            with _IGNORING_CLOSED_STREAMS:
                stream = sys.stdout if _IN_NOTEBOOK else sys.stderr
                self._bar.write(printable(text), file=stream)
        elif not self._silent:
            say(text)

    def note(self, text: str) -> None:
        """Show a text beside the bar; a log does not have it."""
        if self._bar is not None:
            with _IGNORING_CLOSED_STREAMS:
                self._bar.set_postfix_str(printable(text))

    def report(self, values: Mapping[str, float]) -> None:
        """Show some numbers beside the count."""
        text = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        if self._bar is not None:
            self.note(text)
        else:
            of_total = "" if self._total is None else f"/{self._total}"
            self.say(f"{self._unit} {self._done}{of_total}  {text}")

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            with _IGNORING_CLOSED_STREAMS:
                self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
