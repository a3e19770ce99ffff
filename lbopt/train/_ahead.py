"""What the next phase needs, made while the present one trains: its program and its first batch."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from lbopt import types
from lbopt.data import train_iterator
from lbopt.train._run import Run

T = TypeVar("T")


class PhaseAhead:
    """A phase that gets ready in the background.

    Its step is compiled from `start_compiling` on, and its batches are read from `start_reading`
    on, because those of a larger batch take memory.

    Args:
      run: The phase, or one of the same batch size at another place.
    """

    def __init__(self, run: Run):
        self._run = run
        self._program: concurrent.futures.Future[Any] | None = None
        self._reading: concurrent.futures.Future[Iterator[types.Batch]] | None = None

    def start_compiling(self) -> concurrent.futures.Future[Any]:
        """Begin to compile the step, and return what it will be."""
        if self._program is None:
            self._program = _in_background(self._run.compile)
        return self._program

    def start_reading(self) -> None:
        """Begin to read the first batches of the phase."""
        self._start_reading(self._run)

    def batches(self, run: Run) -> Iterator[types.Batch]:
        """Wait until the program is compiled and the first batch is read; return all batches.

        Args:
          run: The phase, with its place in the stream of examples.

        Raises:
          Exception: What the compilation or the reading raised.
        """
        reading = self._start_reading(run)
        self.start_compiling().result()
        return reading.result()

    def _start_reading(self, run: Run) -> concurrent.futures.Future[Iterator[types.Batch]]:
        if self._reading is None:
            self._reading = _in_background(lambda: _read(run))
        return self._reading


def _read(run: Run) -> Iterator[types.Batch]:
    """Return the batches of a phase, of which the first is there."""
    batches = train_iterator(run.batches)
    first = next(batches)
    return itertools.chain([first], batches)


def _in_background(work: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Start work in a thread; at its end a process waits for it, as XLA must not be cut off."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="lbopt next phase").start()
    return future
