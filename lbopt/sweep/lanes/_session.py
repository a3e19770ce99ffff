"""Trials in the lanes of one program: begun, advanced, scored and probed together."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from lbopt.config import SweepConfig
from lbopt.data import DAMAGED, example_indices
from lbopt.recipes import Problem
from lbopt.sweep._record import Record
from lbopt.sweep._trials import Trial
from lbopt.sweep.lanes._arguments import Arguments
from lbopt.sweep.lanes._gauges import make_probe
from lbopt.sweep.lanes._program import Beginning, Lanes, Program, Spread
from lbopt.sweep.lanes._scores import Scorer, Tested, means

_PROBED = 0
"""Seed of the choice of the examples on which all trials of a problem are probed, and of the loss's draws there."""
Made = TypeVar("Made")


class Once(Generic[Made]):
    """Make something the first time it is asked for; other threads that ask meanwhile wait.

    Args:
      make: what makes it; what it raises is raised, and the next one who asks makes it anew.
    """

    def __init__(self, make: Callable[[], Made]):
        self._make, self._lock = make, threading.Lock()
        self._made: list[Made] = []

    @property
    def made(self) -> bool:
        """Whether nobody would have to wait."""
        return bool(self._made)

    def __call__(self) -> Made:
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]


class Equipment:
    """What all trials of a problem share.

    Args:
      problem: what is learned.
      config: of the study.
      spread: how trials share a program.

    Attributes:
      begin: seeds -> fresh parameters, see `Beginning`.
      score: see `Scorer`.
    """

    def __init__(self, problem: Problem, config: SweepConfig, spread: Spread):
        self.begin = Beginning(problem, spread)
        at_once = min(config.train.eval_global_batch_size, spread.most_examples)
        self.score = Scorer(problem, spread, at_once)
        self._problem, self._measure, self._spread = problem, config.measure, spread

    @functools.cached_property
    def probe(self) -> Callable[[Any, Any], dict[str, Any]]:
        """(params, model_state), with a lane axis -> measurements of each lane, from the same examples in every trial."""
        parts, train = self._measure.probe_parts, self._problem.splits.train
        indices = example_indices(len(train), _PROBED, 0, parts * self._measure.probe_part_size)
        batch = train.draw(indices, np.zeros_like(indices), _PROBED)
        batch.pop(DAMAGED, None)  # the next good ones are in their places
        gauge = make_probe(self._problem.loss_fn, parts, dict(self._measure.phi_modules))

        def measured(batch: Any, params: Any, model_state: Any) -> dict[str, Any]:
            return gauge(params, model_state, batch, jax.random.key(_PROBED)).flat()

        return functools.partial(self._spread.jit(measured, num_shared=1), batch)


class Session:
    """The lanes of a program.

    Args:
      program: compiled.
      equipment: of its problem, for as many lanes.

    Attributes:
      width: number of lanes.
    """

    def __init__(self, program: Program, equipment: Equipment):
        self._program, self._equipment = program, equipment
        self.width = program.spread.width
        self._lanes: Lanes | None = None
        self._seeds = np.zeros(self.width, np.int32)

    def begin(self, trials: Mapping[int, Trial]) -> None:
        """Put fresh trials into lanes.

        Args:
          trials: lane -> trial, at least one. Other lanes go on, or at the first call get a copy that nobody looks at.
        """
        for lane, trial in trials.items():
            self._seeds[lane] = trial.seed
        some = next(iter(trials.values()))
        each = [Arguments.of(trials.get(lane, some)) for lane in range(self.width)]
        arguments = Arguments(*map(np.stack, zip(*each, strict=True)))
        fresh = self._program.create(arguments, self._seeds, *self._equipment.begin(self._seeds))
        if self._lanes is None or len(trials) == self.width:
            self._lanes = fresh
        else:
            chosen = np.isin(np.arange(self.width), list(trials))
            self._lanes = self._program.merge(fresh, self._lanes, chosen)

    def advance(self, records: Mapping[int, Record]) -> None:
        """Take steps in all lanes, as many as the next one that has to be looked at allows, and one call is fed with at most.

        Args:
          records: lane -> the record of its trial, which is told of every step; lanes without one are not looked at.
        """
        feed = self._program.feed
        count = min(feed.num_steps, *(record.steps_to_next_stop for record in records.values()))
        some = next(iter(records))
        of = [records.get(lane, records[some]) for lane in range(self.width)]
        fed = [feed.take(record.trial.seed, record.done, count) for record in of]
        stacked = jax.tree.map(lambda *each: np.stack(each), *fed)
        assert self._lanes is not None, "begin comes first"
        self._lanes, history = self._program.advance(self._lanes, stacked, count)
        losses, distances = (np.asarray(values)[:, :count] for values in history)
        for lane, record in records.items():
            record.extend(losses[lane], distances[lane])

    def score(self, split: str) -> list[dict[str, float]]:
        """Return the mean metrics of each lane on "train" or "validation"; see `Scorer`."""
        return self._equipment.score(split, *self._variables())

    def test(self) -> list[Tested]:
        """Return the metrics of each lane on the test split, and on each of its examples."""
        pairs = self._equipment.score.examples("test", *self._variables())
        return [Tested(means(of_lane), of_lane) for of_lane in pairs]

    def probe(self) -> list[dict[str, float]]:
        """Return what is measured of each lane's gradients, and the trust ratios of its last update.

        Returns:
          For each lane: the names of `lbopt.sweep.lanes._gauges.Probe.flat` and `trust_ratio/PATH` -> number.
        """
        assert self._lanes is not None, "begin comes first"
        found = {
            **self._equipment.probe(*self._variables()),
            **self._program.trust_ratios(self._lanes.state),
        }
        values = jax.device_get(found)
        return [
            {name: float(value[lane]) for name, value in values.items()}
            for lane in range(self.width)
        ]

    def _variables(self) -> tuple[Any, Any]:
        assert self._lanes is not None, "begin comes first"
        return self._program.variables(self._lanes)
