"""What the next phase needs, made while the present one trains: its program and its first batch."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from lbopt import types
from lbopt.data import train_iterator
from lbopt.train._run import Run

T = TypeVar("T")


class PhaseAhead:
    """A phase that gets ready in the background.

    Its step is compiled from now on. Its batches are read from `start_reading` on, because those of
    a larger batch take memory.

    Args:
      run: The phase.
    """

    def __init__(self, run: Run):
        self._run = run
        self._program = _in_background(lambda: run.lower().compile())
        self._reading: concurrent.futures.Future[Iterator[types.Batch]] | None = None

    def start_reading(self) -> None:
        """Begin to read the first batches."""
        if self._reading is None:
            self._reading = _in_background(self._read)

    def batches(self) -> Iterator[types.Batch]:
        """Wait until the program is compiled and the first batch is read; return all batches.

        Raises:
          Exception: What the compilation or the reading raised.
        """
        self.start_reading()
        assert self._reading is not None
        self._program.result()
        return self._reading.result()

    def _read(self) -> Iterator[types.Batch]:
        batches = train_iterator(self._run.batches)
        first = next(batches)
        return itertools.chain([first], batches)


def _in_background(work: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Start work in a thread, which a process outlives: XLA must not be cut off by its end."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="lbopt next phase").start()
    return future
