"""The progress of a study: a line for each finished trial, with the time that is left."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lbopt.config import SweepConfig
from lbopt.sweep._finished_trial import FINAL, metric_of
from lbopt.sweep._trials import Cell
from lbopt.sweep.search import search_cost
from lbopt.train import Progress

BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} trials [{elapsed}{postfix}]"
"""Form of the bar on a terminal, whose postfix is the time that is left."""
_MINUTE_S = 60
_HOUR_S = 3600
_DAY_S = 24 * _HOUR_S


@dataclasses.dataclass
class _CellProgress:
    """The planned and the finished trials of a cell.

    Attributes:
      arm: Name of the arm.
      size: Global batch size, at the start.
      examples_in: Number of examples in the first steps of a trial, whose batch may grow.
      extra: Largest number of search trials beyond the plan, all of full length.
      whole: Examples of a trial of the full length.
      trials: Planned number of trials.
      examples: Examples of all planned trials, at their planned lengths.
      searched: Planned number of search trials that are not finished; below 0 beyond the edges.
      finals: Number of final trials that are not finished; the cell is complete without them.
      done: Number of finished trials.
      done_examples: Examples of the finished trials, at their planned lengths.
      seconds: Seconds of the finished trials.
    """

    arm: str
    size: int
    examples_in: Callable[[int], int]
    extra: int
    whole: float
    trials: int
    examples: float
    searched: int
    finals: int
    done: int = 0
    done_examples: float = 0.0
    seconds: float = 0.0

    def add(self, record: Mapping[str, Any]) -> None:
        """Count a finished trial."""
        examples = self.examples_in(record["steps"])
        self.done += 1
        self.done_examples += examples
        self.seconds += record.get("seconds", 0.0)
        if record["phase"] == FINAL:
            self.finals -= 1
            return
        self.searched -= 1
        if self.searched < 0:  # a trial beyond the plan puts off none of the others
            self.extra = max(0, self.extra - 1)
            self.trials += 1
            self.examples += examples

    @property
    def planned(self) -> int:
        """Number of trials; a search that prunes may run fewer than were planned, and all more."""
        return max(self.trials, self.done) if self.finals > 0 else self.done

    @property
    def examples_left(self) -> float:
        """Examples of the trials that are not finished."""
        return max(0.0, self.examples - self.done_examples) if self.finals > 0 else 0.0

    @property
    def most_examples_left(self) -> float:
        """Examples of the trials that are not finished, with all that may come beyond the plan."""
        return self.examples_left + self.extra * self.whole if self.finals > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds of a step of each arm's trials, while as many run as side by side.

    An example more in the batch adds the same time in every arm, as what an optimizer costs does
    not grow with the batch.

    Attributes:
      of_arms: The smallest batch size that was timed, and its seconds, by arm. An arm that was not
        timed takes as long as the first one.
      per_example: Seconds that an example more in the batch adds, >= 0.

    >>> times = StepTimes({"a": (100, 1.0), "b": (200, 2.5)}, 0.01)
    >>> times.at("a", 200), times.at("b", 300)
    (2.0, 3.5)
    """

    of_arms: Mapping[str, tuple[int, float]]
    per_example: float

    def at(self, arm: str, size: int) -> float:
        """Return the seconds of a step of an arm at a batch size."""
        timed, seconds = self.of_arms.get(arm) or next(iter(self.of_arms.values()))
        return seconds + self.per_example * max(0, size - timed)


class StudyProgress:
    """Counts the trials of a study, and prints a line for each that finishes.

    The time that is left is the time of finished trials, per example of their planned lengths and
    at the nearest batch size, times the examples that are left; divided by the number of trials
    that run side by side, as measured since the start. Trials beyond the edges of a search are
    counted once they have finished.

    Args:
      config: The config of the study.
      cells: The cells that are run, on all processes.
      progress: Shows the lines.
      clock: Function that returns seconds.
    """

    def __init__(
        self,
        config: SweepConfig,
        cells: Sequence[Cell],
        progress: Progress,
        clock: Callable[[], float] = time.monotonic,
    ):
        costs = []
        for index in range(len(config.arms)):
            with config.naming_search(index):
                costs.append(search_cost(config.arm_search(index)))
        finals = len(config.final_seeds)

        self._cells = {
            (cell.arm.name, cell.global_batch_size): _CellProgress(
                cell.arm.name,
                cell.global_batch_size,
                cell.examples,
                costs[cell.index].extra,
                cell.examples(cell.num_steps),
                costs[cell.index].trials + finals,
                (costs[cell.index].full_runs + finals) * cell.examples(cell.num_steps),
                costs[cell.index].trials,
                finals,
            )
            for cell in cells
        }

        self._progress = progress
        self._clock = clock
        self._began = clock()
        self._seconds = 0.0
        self._stop_early = bool(config.train.target_metric and config.train.stop_at_target)
        self._arm_width = max((len(cell.arm) for cell in self._cells.values()), default=0)
        self._size_width = max((len(str(cell.size)) for cell in self._cells.values()), default=0)

    def resume(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Count trials that were finished before."""
        for record in records:
            self._count(record)
        self._progress.expect(self._total, self._done)

    def add(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Count trials that have finished now, and print their lines."""
        for record in records:
            self._count(record)
            self._seconds += record.get("seconds", 0.0)
            self._progress.say(self._line(record))
        self._progress.expect(self._total, self._done)
        self._progress.note(self._eta)

    @property
    def seconds_left(self) -> float | None:
        """Estimate of the seconds that are left; None before a trial has finished."""
        if self._seconds <= 0:
            return None
        left = sum(cell.examples_left * self._pace(cell) for cell in self._cells.values())
        return left * (self._clock() - self._began) / self._seconds

    def unfinished(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells that lack a final trial."""
        keys = ((cell, (cell.arm.name, cell.global_batch_size)) for cell in cells)
        return [cell for cell, key in keys if self._cells[key].finals > 0]

    def _pace(self, cell: _CellProgress) -> float:
        """Return the seconds per example of the finished trials that are most like a cell's."""
        nearest = min(
            (one for one in self._cells.values() if one.seconds > 0),
            key=lambda one: (abs(math.log(one.size / cell.size)), one.arm != cell.arm),
        )
        return nearest.seconds / nearest.done_examples

    def forecast(self, steps: StepTimes | None, side_by_side: int) -> list[str]:
        """Return how many trials the study has and how long they take, before they begin.

        Args:
          steps: Times of steps, measured before the first trial; None to take those of the trials
            that finished before, if there are some.
          side_by_side: Number of trials that run at the same time.
        """
        self._began = self._clock()  # compiling and timing came before, and are no trial's
        cells = self._cells.values()
        extra = sum(cell.extra for cell in cells if cell.finals > 0)
        said = f"{self._total} trials"
        if extra:
            said += f", and up to {extra} more where the best lies at an edge of its search"
        open_cells = [cell for cell in cells if cell.finals > 0]
        known = any(cell.seconds > 0 for cell in cells)
        if not open_cells or (steps is None and not known):
            return [said]

        def pace(cell: _CellProgress) -> float:
            return self._pace(cell) if steps is None else steps.at(cell.arm, cell.size) / cell.size

        least = sum(cell.examples_left * pace(cell) for cell in open_cells) / side_by_side
        most = sum(cell.most_examples_left * pace(cell) for cell in open_cells) / side_by_side
        time_left = f"about {_rough(least)}" + f" to {_rough(most)}" * (most > least)
        if self._stop_early:
            time_left = f"at most {_rough(most)}"
        if steps is None:
            return [said, f"{time_left} on this machine, as the finished trials took"]
        return [
            said,
            f"{time_left} on this machine, as busy as it is now, by the time of their steps; "
            "compiling, evaluation and probes come on top",
        ]

    def _count(self, record: Mapping[str, Any]) -> None:
        cell = self._cells.get((record["arm"], record["global_batch_size"]))
        if cell is not None:  # other shards run other cells
            cell.add(record)

    @property
    def _total(self) -> int:
        return sum(cell.planned for cell in self._cells.values())

    @property
    def _done(self) -> int:
        return sum(cell.done for cell in self._cells.values())

    @property
    def _eta(self) -> str:
        seconds = self.seconds_left
        return f"ETA {_rough(seconds)}" if seconds else ""

    def _line(self, record: Mapping[str, Any]) -> str:
        """Return a line of the table, `trial 7/72  LAMB  batch 512  lr 0.04  0.93  ETA 3 min`."""
        total = self._total
        cells = (
            f"trial {self._done:>{len(str(total))}}/{total}",
            f"{record['arm']:<{self._arm_width}}",
            f"batch {record['global_batch_size']:>{self._size_width}}",
            f"lr {record['learning_rate']:<8.3g}",
            f"{record['phase']:<6}",
            f"{_score(record):<8}",
            self._eta,
        )
        return "  ".join(cells).rstrip()


def _score(record: Mapping[str, Any]) -> str:
    """Return the validation score of a finished trial, with the name of an unusual metric.

    >>> _score({"diverged": False, "metric": "r2", "validation_r2": 0.45678})
    'r2 0.4568'
    """
    metric = metric_of(record)
    score = record[f"validation_{metric}"]
    if record["diverged"] or score is None:
        return "diverged" if record["diverged"] else f"{metric} is not finite"
    if metric == "accuracy":
        return f"{score:.4f}"
    return f"{score:.4g}" if metric == "perplexity" else f"{metric} {score:.4g}"


def _rough(seconds: float) -> str:
    """Return a time in the unit that suits it.

    >>> [_rough(seconds) for seconds in (0.4, 47, 170, 9000, 200000)]
    ['1 s', '47 s', '3 min', '2.5 h', '2.3 days']
    """
    if seconds < 2 * _MINUTE_S:
        return f"{max(1, round(seconds))} s"
    if seconds < 2 * _HOUR_S:
        return f"{round(seconds / _MINUTE_S)} min"
    if seconds < 2 * _DAY_S:
        return f"{seconds / _HOUR_S:.1f} h"
    return f"{seconds / _DAY_S:.1f} days"
