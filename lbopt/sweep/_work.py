"""Which trial is run next, and by whom: threads take trials that wait for the same program."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lbopt.config import SweepConfig
from lbopt.sweep import _drive, _trials
from lbopt.sweep._trials import Cell, Trial
from lbopt.sweep.lanes import program_key

Row = Mapping[str, Any]


class CellWork:
    """A cell under way: what it waits for, and what comes then.

    Args:
      cell: which.
      config: of the study.
      rows: of `results.jsonl` that are there already, by `lbopt.sweep._trials.key`.

    Attributes:
      cell: which.
      finished: whether the rows of all its trials are there.
    """

    def __init__(self, cell: Cell, config: SweepConfig, rows: Mapping[tuple, Row]):
        self.cell = cell
        self._going = _drive.drive(cell, config)
        self._rows = dict(rows)
        self._asked: list[tuple] = []
        self._missing: set[tuple] = set()
        self._programs: dict[bool, str] = {}
        self.finished = False

    def start(self) -> list[Trial]:
        """Return the first trials to be run; [] if the rows of all trials are there."""
        return self._until_missing(next(self._going))

    def tell(self, row: Row) -> list[Trial]:
        """Take a finished trial and return what is to be run now that was not before.

        Args:
          row: as in `results.jsonl`.

        Returns:
          The trials of the next round whose rows are missing; [] as long as others of this round are, and at the end.
        """
        key = _trials.key(row)
        self._rows[key] = row
        self._missing.discard(key)
        return [] if self._missing else self._until_missing(self._go_on())

    def _go_on(self) -> list[Trial]:
        try:
            return self._going.send([self._rows[key] for key in self._asked])
        except StopIteration:
            self.finished = True
            return []

    def _until_missing(self, wanted: list[Trial]) -> list[Trial]:
        """Go on as long as all that is wanted is there already."""
        while wanted:
            self._asked = [_trials.trial_key(self.cell, trial) for trial in wanted]
            by_key = dict(zip(self._asked, wanted, strict=True))
            self._missing = by_key.keys() - self._rows.keys()
            if self._missing:
                return [trial for key, trial in by_key.items() if key in self._missing]
            wanted = self._go_on()
        return []

    def program_key(self, trial: Trial) -> str:
        """Return which program a trial of this cell needs, see `lbopt.sweep.lanes.program_key`."""
        decays = trial.weight_decay > 0
        if decays not in self._programs:
            self._programs[decays] = program_key(self.cell, trial)
        return self._programs[decays]


class Work:
    """The trials that wait, by the program they need; threads take them from here.

    Args:
      cells: of this process.
      config: of the study.
      rows: of `results.jsonl`, of these cells and others.
      exclusive: one thread at a time runs trials of a program, because they share calls of it.
    """

    def __init__(
        self, cells: Iterable[Cell], config: SweepConfig, rows: Iterable[Row], exclusive: bool
    ):
        self._changed = threading.Condition()
        self._waiting: dict[str, collections.deque[tuple[CellWork, Trial]]] = {}
        self._users: collections.Counter[str] = collections.Counter()
        self._exclusive, self._stopped = exclusive, False
        found: dict[tuple, dict[tuple, Row]] = collections.defaultdict(dict)
        for row in rows:
            found[row["arm"], row["global_batch_size"]][_trials.key(row)] = row
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
        """Wait for a program whose trials this thread is to run; None when there is nothing more to do.

        A program that nobody runs comes first, so that several are compiled side by side, then one that is compiled.

        Args:
          ready: key of a program -> whether it is compiled.

        Returns:
          The key of the program, in use by this thread until it calls `leave`.
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
        """Say that this thread runs a program no more.

        Args:
          key: from `choose`.
        """
        with self._changed:
            self._users[key] -= 1
            self._changed.notify_all()

    def take(self, key: str) -> tuple[CellWork, Trial] | None:
        """Return a trial that waits for this program, if there is one.

        Args:
          key: from `choose`.

        Returns:
          Its cell's work, and the trial; None if none waits, or after `stop`.
        """
        with self._changed:
            queue = self._waiting.get(key)
            return queue.popleft() if queue and not self._stopped else None

    def tell(self, work: CellWork, row: Row) -> None:
        """Take a finished trial's row; what its cell wants now waits from here on.

        Args:
          work: that `take` returned with the trial.
          row: as in `results.jsonl`.
        """
        with self._changed:
            self._add(work, work.tell(row))
            self._open -= work.finished
            self._changed.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether nothing more is handed out."""
        return self._stopped

    def stop(self) -> None:
        """Hand out nothing more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
