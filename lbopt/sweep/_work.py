"""The queue of trials: threads take those that wait for the same program."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lbopt.config import SweepConfig
from lbopt.sweep import _drive, _trials
from lbopt.sweep._trials import Cell, Trial
from lbopt.sweep.lanes import program_key

Record = Mapping[str, Any]


class CellWork:
    """A cell under way: the trials that it waits for, and those that come next.

    Args:
      cell: The cell.
      config: The config of the study.
      records: Records of trials that are finished already, by `trial_identity`.

    Attributes:
      cell: The cell.
      finished: Whether all trials of the cell are finished.
    """

    def __init__(self, cell: Cell, config: SweepConfig, records: Mapping[tuple, Record]):
        self.cell = cell
        self._rounds = _drive.drive(cell, config)
        self._records = dict(records)
        self._asked: list[tuple] = []
        self._missing: set[tuple] = set()
        self._programs: dict[bool, str] = {}
        self.finished = False

    def start(self) -> list[Trial]:
        """Return the first trials to run; [] if all trials are finished."""
        return self._until_missing(next(self._rounds))

    def tell(self, record: Record) -> list[Trial]:
        """Take the record of a finished trial, and return the trials that can run now.

        Args:
          record: The record, as in `results.jsonl`.

        Returns:
          The trials of the next round that are not finished; [] while trials of this round are
          running, and at the end.
        """
        identity = _trials.trial_identity(record)
        self._records[identity] = record
        self._missing.discard(identity)
        return [] if self._missing else self._until_missing(self._next_round())

    def _next_round(self) -> list[Trial]:
        try:
            return self._rounds.send([self._records[identity] for identity in self._asked])
        except StopIteration:
            self.finished = True
            return []

    def _until_missing(self, wanted: list[Trial]) -> list[Trial]:
        """Pass rounds whose trials are all finished; return the missing trials of the next one."""
        while wanted:
            self._asked = [_trials.planned_identity(self.cell, trial) for trial in wanted]
            trials = dict(zip(self._asked, wanted, strict=True))
            self._missing = trials.keys() - self._records.keys()
            if self._missing:
                return [trial for identity, trial in trials.items() if identity in self._missing]
            wanted = self._next_round()
        return []

    def program_key(self, trial: Trial) -> str:
        """Return the key of the program that a trial needs, see `lanes.program_key`."""
        decays = trial.weight_decay > 0
        if decays not in self._programs:
            self._programs[decays] = program_key(self.cell, trial)
        return self._programs[decays]


class Work:
    """The trials that wait, by the program that they need; threads take them from here.

    Args:
      cells: The cells of this process.
      config: The config of the study.
      records: Records of finished trials, of these cells and others.
      exclusive: Whether only one thread at a time runs trials of a program, because they share
        calls of it.
    """

    def __init__(
        self, cells: Iterable[Cell], config: SweepConfig, records: Iterable[Record], exclusive: bool
    ):
        self._changed = threading.Condition()
        self._waiting: dict[str, collections.deque[tuple[CellWork, Trial]]] = {}
        self._users: collections.Counter[str] = collections.Counter()
        self._exclusive = exclusive
        self._stopped = False
        found: dict[tuple, dict[tuple, Record]] = collections.defaultdict(dict)
        for record in records:
            found[record["arm"], record["global_batch_size"]][_trials.trial_identity(record)] = (
                record
            )
        self._open = 0
        for cell in cells:
            work = CellWork(cell, config, found[cell.arm.name, cell.global_batch_size])
            self._add(work, work.start())
            self._open += not work.finished

    def _add(self, work: CellWork, wanted: Sequence[Trial]) -> None:
        for trial in wanted:
            key = work.program_key(trial)
            self._waiting.setdefault(key, collections.deque()).append((work, trial))

    def choose(self, ready: Callable[[str], bool]) -> str | None:
        """Wait for a program whose trials this thread can run.

        Programs that no thread runs come first, so that several are compiled side by side; then
        compiled ones.

        Args:
          ready: Function of a program's key that returns whether it is compiled.

        Returns:
          The key of the program, which this thread uses until it calls `leave`. None once every
          cell is finished, or after `stop`.
        """
        with self._changed:
            while not self._stopped and self._open:
                waiting = [key for key, queue in self._waiting.items() if queue]
                alone = [key for key in waiting if not self._users[key]]
                shared = (
                    []
                    if self._exclusive
                    else [key for key in waiting if self._users[key] and ready(key)]
                )
                if alone or shared:
                    key = (alone or shared)[0]
                    self._users[key] += 1
                    return key
                self._changed.wait(timeout=1.0)  # a program may have become ready
            return None

    def leave(self, key: str) -> None:
        """End this thread's use of a program.

        Args:
          key: Key from `choose`.
        """
        with self._changed:
            self._users[key] -= 1
            self._changed.notify_all()

    def take(self, key: str) -> tuple[CellWork, Trial] | None:
        """Return a trial that waits for a program, with the work of its cell.

        Args:
          key: Key from `choose`.

        Returns:
          The work and the trial; None if no trial waits, or after `stop`.
        """
        with self._changed:
            queue = self._waiting.get(key)
            return queue.popleft() if queue and not self._stopped else None

    def tell(self, work: CellWork, record: Record) -> None:
        """Take the record of a finished trial, and queue the trials that can run now.

        Args:
          work: The work that `take` returned with the trial.
          record: The record, as in `results.jsonl`.
        """
        with self._changed:
            self._add(work, work.tell(record))
            self._open -= work.finished
            self._changed.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether no more trials are handed out."""
        return self._stopped

    def stop(self) -> None:
        """Hand out no more trials."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
