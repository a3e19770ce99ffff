"""SIGTERM: finish the step, save, exit 75."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class PreemptionWatch:
    """Remember that the process was asked to end; `requested` says so.

    Signals can only be watched from the main thread; elsewhere nothing is watched.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> PreemptionWatch:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in (signal.SIGTERM,)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _remember(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.requested = True
