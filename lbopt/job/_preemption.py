"""SIGTERM, or SIGHUP of a closed terminal, to any process of a job: all finish the same step, save, exit 75."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from lbopt.job._member import Job, SoloJob


class PreemptionWatch:
    """Remember that the job was asked to end.

    While the block lasts it replaces the process's handlers of SIGTERM and SIGHUP, and then puts them
    back. Signals can only be watched from the main thread; elsewhere nothing is watched.

    Args:
      job: of which this process is one; None if it is alone.
    """

    def __init__(self, job: Job | None = None) -> None:
        self.job = SoloJob() if job is None else job
        self._before: dict[int, object] = {}

    def __enter__(self) -> PreemptionWatch:
        if threading.current_thread() is threading.main_thread():
            ends = [signal.SIGTERM, signal.SIGHUP]
            if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup
                ends.remove(signal.SIGHUP)
            self._before = {number: signal.signal(number, self._remember) for number in ends}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def requested(self) -> bool:
        """Whether this process, or one of the others, was asked to end."""
        return self.job.stop_wanted

    def _remember(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.job.stop_wanted = True
