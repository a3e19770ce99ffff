"""Ends a job that was asked to stop: all processes finish the same step, save and exit with 75.

One process that receives SIGTERM, or the SIGHUP of a closed terminal, is enough.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from lbopt.job._member import Job, SoloJob


class PreemptionWatch:
    """Context manager that notes whether the job was asked to end.

    Within the block it replaces the process's handlers of SIGTERM and SIGHUP. Signals can only be
    watched from the main thread; elsewhere nothing is watched.

    Args:
      job: Job of this process; None if it is the only process.
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
