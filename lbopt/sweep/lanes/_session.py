"""The lanes of one program: their trials start, advance, and are scored and probed together."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from lbopt.config import SweepConfig
from lbopt.data import DAMAGED, example_indices
from lbopt.recipes import LoadedProblem
from lbopt.sweep._running_trial import RunningTrial
from lbopt.sweep._trials import Trial
from lbopt.sweep.lanes._gauges import make_probe
from lbopt.sweep.lanes._program import GrowingProgram, Initialiser, Lanes, Program, TrialBatching
from lbopt.sweep.lanes._scores import Scorer, Tested, means
from lbopt.sweep.lanes._trial_arguments import Arguments

_PROBED = 0
"""Seed of the examples on which all trials of a problem are probed, and of the loss there."""
Made = TypeVar("Made")


class Once(Generic[Made]):
    """Calls a function once and keeps its result; other threads wait for it.

    Args:
      make: The function. If it raises an error, the next call tries again.
    """

    def __init__(self, make: Callable[[], Made]):
        self._make = make
        self._lock = threading.Lock()
        self._made: list[Made] = []

    @property
    def made(self) -> bool:
        """Whether the result is there."""
        return bool(self._made)

    def __call__(self) -> Made:
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]


class Equipment:
    """Programs that all trials of a problem share.

    Args:
      problem: The problem.
      config: The config of the study.
      batching: Lanes of the programs.

    Attributes:
      initialise: Function of seeds that returns fresh parameters, an `Initialiser`.
      score: Function that evaluates, a `Scorer`.
    """

    def __init__(self, problem: LoadedProblem, config: SweepConfig, batching: TrialBatching):
        self.initialise = Initialiser(problem, batching)
        at_once = min(config.train.eval_global_batch_size, batching.most_examples)
        self.score = Scorer(problem, batching, at_once)
        self._problem = problem
        self._measure = config.measure
        self._batching = batching

    @functools.cached_property
    def probe(self) -> Callable[[Any, Any], dict[str, Any]]:
        """Function of (params, model_state), with a lane axis, that returns the measurements.

        All trials are probed on the same examples.
        """
        num_slices = self._measure.probe_parts
        train = self._problem.splits.train
        indices = example_indices(
            len(train), _PROBED, 0, num_slices * self._measure.probe_part_size
        )
        batch = train.draw(indices, np.zeros_like(indices), _PROBED)
        batch.pop(DAMAGED, None)  # the next good records are in the places of damaged ones
        gauge = make_probe(self._problem.loss_fn, num_slices, dict(self._measure.phi_modules))

        def measured(batch: Any, params: Any, model_state: Any) -> dict[str, Any]:
            return gauge(params, model_state, batch, jax.random.key(_PROBED)).flat()

        return functools.partial(self._batching.jit(measured, num_shared=1), batch)


class Session:
    """The lanes of a program, and the trials in them.

    Args:
      program: The program.
      equipment: The shared programs of its problem, for the same number of lanes.

    Attributes:
      width: Number of lanes.
    """

    def __init__(self, program: Program | GrowingProgram, equipment: Equipment):
        self._program = program
        self._equipment = equipment
        self.width = program.batching.width
        self._lanes: Lanes | None = None
        self._seeds = np.zeros(self.width, np.int32)

    def begin(self, trials: Mapping[int, Trial]) -> None:
        """Put fresh trials into lanes.

        Args:
          trials: Trials by lane, at least one. Other lanes keep their trials; at the first call
            they get a copy of the first given trial.
        """
        for lane, trial in trials.items():
            self._seeds[lane] = trial.seed
        first = next(iter(trials.values()))
        each = [Arguments.of(trials.get(lane, first)) for lane in range(self.width)]
        arguments = jax.tree.map(lambda *numbers: np.stack(numbers), *each)
        fresh = self._program.create(
            arguments, self._seeds, *self._equipment.initialise(self._seeds)
        )
        if self._lanes is None or len(trials) == self.width:
            self._lanes = fresh
        else:
            chosen = np.isin(np.arange(self.width), list(trials))
            self._lanes = self._program.merge(fresh, self._lanes, chosen)

    def advance(self, running: Mapping[int, RunningTrial]) -> None:
        """Take steps in all lanes, until a trial has to be probed or evaluated, or ends.

        A call takes at most `Feed.num_steps` steps, and may stop before that.

        Args:
          running: The running trials by lane, to which the steps are added; lanes without one
            are ignored.
        """
        # All lanes take the same steps; those without a trial get the input of another one.
        first = next(iter(running.values()))
        program = self._program.at(first.done)
        feed = program.feed
        count = min(feed.num_steps, *(run.steps_to_next_stop for run in running.values()))
        of_lanes = [running.get(lane, first) for lane in range(self.width)]
        fed = [feed.take(run.trial.seed, run.done, count) for run in of_lanes]
        stacked = jax.tree.map(lambda *each: np.stack(each), *fed)
        assert self._lanes is not None, "begin comes first"
        if first.done and first.done == feed.first_step:
            self._lanes = program.entered(self._lanes)
        self._lanes, taken = program.advance(self._lanes, stacked, count)
        losses, distances = (np.asarray(values)[:, :count] for values in taken)
        for lane, run in running.items():
            run.extend(losses[lane], distances[lane])

    def time_steps(self, trial: Trial, seconds: float) -> float:
        """Return the seconds that a step takes in all lanes, after one that compiles the program.

        Args:
          trial: The trial that all lanes run for a while.
          seconds: About how long to take steps.
        """
        self.begin({0: trial})
        program = self._program.at(0)
        fed = program.feed.take(trial.seed, 0, program.feed.num_steps)
        stacked = jax.tree.map(lambda each: np.stack([each] * self.width), fed)

        def take(count: int) -> float:
            assert self._lanes is not None
            begin = time.perf_counter()
            self._lanes, taken = program.advance(self._lanes, stacked, count)
            jax.block_until_ready(taken)
            return (time.perf_counter() - begin) / count

        take(1)
        return take(max(1, min(program.feed.num_steps, round(seconds / take(1)))))

    def score(self, split: str) -> list[dict[str, float]]:
        """Return the mean metrics of each lane on "train" or "validation"; see `Scorer`."""
        return self._equipment.score(split, *self._variables())

    def test(self) -> list[Tested]:
        """Return the metrics of each lane on the test split, and on each of its examples."""
        pairs = self._equipment.score.examples("test", *self._variables())
        return [Tested(means(of_lane), of_lane) for of_lane in pairs]

    def probe(self) -> list[dict[str, float]]:
        """Return the measurements of `Probe.flat`, and `trust_ratio/PATH` of each layer.

        Returns:
          Numbers by name for each lane; the trust ratios are those of the last update.
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
