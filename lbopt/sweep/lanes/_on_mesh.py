"""Trials that are data-parallel over all devices and processes, one after another."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from lbopt import errors, tree
from lbopt.config import SweepConfig, TrainConfig, naming
from lbopt.data import DAMAGED, TrainBatches, example_indices, train_iterator
from lbopt.job import beat
from lbopt.parallel import TrainState, local_parts, put_batch, put_replicated
from lbopt.recipes import (
    LoadedProblem,
    build_mesh,
    build_state,
    check_batch_fits,
    make_step,
    with_averaged_params,
)
from lbopt.sweep._running_trial import RunningTrial
from lbopt.sweep._trials import Cell, Trial
from lbopt.sweep.lanes import _trial_arguments
from lbopt.sweep.lanes._gauges import make_probe
from lbopt.sweep.lanes._program import trust_ratios
from lbopt.sweep.lanes._scores import Tested, scored_split
from lbopt.sweep.lanes._trial_arguments import Arguments
from lbopt.transforms import has_evaluated_params

_STEPS = 100
"""Most steps in a call, so that divergence and a request to stop are noticed soon."""
_TIMED_STEPS = 4
_TIMED_EXAMPLES = 100_000
"""Most steps, and most examples in more than one step, that are timed."""
ProbeFn: TypeAlias = Callable[[Any, Any], dict[str, Any]]
_CHOSEN = 0
"""Seed of the choice of the training examples that are probed."""


class MeshProgram:
    """The step of `lbopt train` over all devices, for trials with other arguments and seeds.

    Args:
      cell: A cell whose trials the program runs; other cells differ in their arguments only.
      decays: Whether there is weight decay, see `make_tx`.
      config: The config of the study.

    Attributes:
      train: The config of a run of the cell.
      problem: The problem.
      config: The config of the study.
      mesh: The devices.
      step: The training step, from `lbopt.recipes.make_step`.
      evaluate: The evaluation, a `lbopt.evaluation.Evaluation`.

    Raises:
      UserError: Naming the field, if the mesh or the step cannot be made.
    """

    def __init__(self, cell: Cell, decays: bool, config: SweepConfig):
        self.train = cell.train
        self.problem = cell.problem
        self.config = config
        tx = _trial_arguments.make_tx(cell, decays)
        loss_fn = cell.problem.loss_fn
        stacked = cell.problem.stacked
        with config.naming_trials(cell.index):
            self.mesh = build_mesh(self.train.parallel)
            self.step = make_step(self.train, loss_fn, tx, self.mesh, stacked)
        self.evaluate = cell.problem.evaluator(self.mesh, self.train.parallel.backend)
        self._tx = tx
        self._blank = Arguments.blank(cell)

    @functools.cached_property
    def init(self) -> Callable[[Any, Arguments], TrainState]:
        """Function of (int32 seed, arguments) that returns the first state, laid out."""

        def first(seed: Any, arguments: Arguments) -> TrainState:
            state = self.step.with_aggregator_state(build_state(self.problem, self._tx, seed))
            return _trial_arguments.with_arguments(state, arguments)

        shapes = jax.eval_shape(first, np.int32(0), self._blank)
        return jax.jit(first, out_shardings=self.step.state_sharding(shapes))


def check_cells(cells: list[Cell]) -> None:
    """Check that all batches fit the devices, before anything is compiled.

    Args:
      cells: The cells of a study with `trial_devices="all"`.

    Raises:
      UserError: Naming `config.global_batch_sizes`, with the arm and the field in conflict.
    """
    for cell in cells:
        place = errors.about("config.global_batch_sizes", cell.global_batch_size)
        in_arm = errors.under(f"in arm {cell.arm.name!r}, ")
        with place, in_arm, naming("config.train", TrainConfig):
            check_batch_fits(cell.train, cell.problem, build_mesh(cell.train.parallel))


class MeshSession:
    """One lane on all devices, with the methods of `Session`.

    Args:
      program: The program.
      probe: The probe of its problem, from `make_mesh_probe`.
    """

    width = 1

    def __init__(self, program: MeshProgram, probe: ProbeFn):
        self._program = program
        self._probe = probe
        self._state: Any = None
        self._start: Any = None
        self._batches: Iterator[Any] = iter(())

    def begin(self, trials: Mapping[int, Trial]) -> None:
        """Start a trial, when the one before has ended.

        Args:
          trials: The trial, by lane 0.
        """
        (trial,) = trials.values()
        program = self._program
        self._state = program.init(np.int32(trial.seed), Arguments.of(trial))
        # A copy, because the first step takes the state's own arrays.
        self._start = (
            jax.tree.map(jnp.copy, self._state.params) if program.config.measure.distance else None
        )
        mesh = program.mesh
        batches = TrainBatches(
            program.problem.splits.train,
            trial.seed,
            program.train.global_batch_size,
            trial.num_steps,
            mesh.size,
            local_parts(mesh),
        )
        self._batches = train_iterator(batches)

    def advance(self, running: Mapping[int, RunningTrial]) -> None:
        """Take steps until the trial has to be probed or evaluated, or ends; 100 at most.

        Args:
          running: The running trial, by lane 0, to which the steps are added.
        """
        (run,) = running.values()
        found = [self._step() for _ in range(min(_STEPS, run.steps_to_next_stop))]
        losses, distances = (
            np.asarray(jax.device_get(values), np.float32) for values in zip(*found, strict=True)
        )
        run.extend(losses, distances)

    def time_steps(self, trial: Trial, seconds: float) -> float:
        """Return the seconds of a step, the mean of a few; 0 after the first one, which compiles.

        Args:
          trial: The trial that runs for a while.
          seconds: 0 for the first step alone. The number of the others does not depend on it, as
            all processes take the same steps.
        """
        self.begin({0: trial})
        jax.block_until_ready(self._state)
        examples = self._program.train.global_batch_size
        count = min(_TIMED_STEPS, trial.num_steps, max(1, _TIMED_EXAMPLES // examples))
        begin = time.perf_counter()
        for _ in range(count if seconds else 1):
            self._step()
        jax.block_until_ready(self._state)
        return (time.perf_counter() - begin) / count if seconds else 0.0

    def _step(self) -> tuple[Any, Any]:
        mesh = self._program.mesh
        beat()
        self._state, metrics = self._program.step(self._state, put_batch(mesh, next(self._batches)))
        total, count = metrics["loss"]
        if mesh.devices.flat[0].platform == "cpu":
            # Queued collectives of many steps deadlock on a few CPU cores.
            jax.block_until_ready(metrics)
        distance = 0.0 if self._start is None else _distance(self._state.params, self._start)
        return total / count, distance

    def score(self, split: str) -> list[dict[str, float]]:
        """Return the mean metrics on a split; see `scored_split`.

        Args:
          split: "train", "validation" or "test".

        Returns:
          Means by metric, in a list of one.
        """
        splits = self._program.problem.splits
        state = self._evaluated()
        dataset = scored_split(splits, split)
        return [self._program.evaluate(state, dataset, self._program.train.eval_global_batch_size)]

    def test(self) -> list[Tested]:
        """Return the mean metrics on the test split; those of each example stay on the devices."""
        return [Tested(means, None) for means in self.score("test")]

    def probe(self) -> list[dict[str, float]]:
        """Return the measurements of `Probe.flat`, and `trust_ratio/PATH` of each layer.

        Returns:
          Numbers by name, in a list of one; the trust ratios are those of the last update.
        """
        state = self._evaluated()
        found = jax.device_get(
            {**self._probe(state.params, state.model_state), **trust_ratios(self._state)}
        )
        return [{name: float(value) for name, value in found.items()}]

    def _evaluated(self) -> TrainState:
        """Return the state that is evaluated, with averaged parameters if they are kept."""
        if not has_evaluated_params(self._state.opt_state):
            return self._state
        state = with_averaged_params(self._state)
        return state.replace(params=put_replicated(self._program.mesh, state.params))


def make_mesh_probe(problem: LoadedProblem, config: SweepConfig) -> ProbeFn:
    """Build a function of (params, model_state) that returns the measurements of `Probe.flat`.

    Every device computes all of them, on the same examples for all trials.

    Args:
      problem: The problem; the probed examples are from its training set.
      config: The config of the study; `config.measure` has the number and size of the slices.

    Returns:
      The function, which takes replicated parameters.
    """
    measure = config.measure
    train = problem.splits.train
    gauges = make_probe(problem.loss_fn, measure.probe_parts, dict(measure.phi_modules))
    gauge = jax.jit(lambda *given: gauges(*given).flat())

    def probe(params: Any, model_state: Any) -> dict[str, Any]:
        (place,) = {leaf.sharding for leaf in jax.tree.leaves(params)[:1]}
        count = measure.probe_parts * measure.probe_part_size
        indices = example_indices(len(train), _CHOSEN, 0, count)
        batch = train.draw(indices, np.zeros_like(indices), _CHOSEN)
        batch.pop(DAMAGED, None)  # the next good records are in the places of damaged ones
        return gauge(
            params, model_state, put_replicated(place.mesh, batch), jax.random.key(_CHOSEN)
        )

    return probe


@jax.jit
def _distance(params: Any, start: Any) -> jax.Array:
    moved = jax.tree.map(jnp.subtract, params, start)
    return tree.global_norm(moved)
