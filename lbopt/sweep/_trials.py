"""What has to be run: cells of (arm, batch size), and the trials in each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from lbopt.config import Arm, SearchConfig, SweepConfig, TrainConfig
from lbopt.errors import UserError, require, require_choice
from lbopt.recipes import Problem, ResolvedSchedule, check_batch, make_problem, resolve_schedule
from lbopt.replicas import Replicas
from lbopt.schedules import Units
from lbopt.sweep.search import Factors, Proposal, search_cost
from lbopt.transforms import resolve_labels

SEARCH, FINAL = "search", "final"
_STEP_IN_EXAMPLES = 32
"""What a step costs besides its examples, in examples: a guess that only says which cell is dealt first."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One training run: the arguments of a compiled program.

    Attributes:
      phase: "search" (chooses the candidate on validation) or "final" (is tested).
      factors: the candidate, as multiples of what the arm's rules give.
      fidelity: length as a part of the whole run's, in (0, 1].
      seed: of initialisation, shuffle, and what a step draws.
      learning_rate: the peak.
      warmup_steps: optimizer steps in a run of the whole length, fractions too; the schedule of a shorter one is rescaled.
      weight_decay: of the optimizer.
      num_steps: length in optimizer steps.
    """

    phase: str
    factors: Factors
    fidelity: float
    seed: int
    learning_rate: float
    warmup_steps: float
    weight_decay: float
    num_steps: int


@dataclasses.dataclass(frozen=True)
class Cell:
    """An arm at a batch size.

    Attributes:
      index: of the arm.
      arm: optimizer and rules.
      train: what is trained, from `SweepConfig.cell_train`.
      problem: data, model and loss, loaded.
      global_batch_size: examples per step.
      resolved: scaled learning rate, warmup and length.
    """

    index: int
    arm: Arm
    train: TrainConfig
    problem: Problem
    global_batch_size: int
    resolved: ResolvedSchedule

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.arm.name} at batch {self.global_batch_size}"

    @property
    def units(self) -> Units:
        """Epochs, steps and examples of this cell."""
        return Units(len(self.problem.splits.train), self.global_batch_size)

    def trial(self, phase: str, proposal: Proposal, seed: int) -> Trial:
        """Turn a proposal into numbers; a warmup that is longer than the run ends one step before it.

        Args:
          phase: "search" or "final".
          proposal: factors and fidelity.
          seed: of the trial.

        Returns:
          The trial, its length rounded up to whole steps.
        """
        factors, whole = proposal.factors, self.resolved.num_steps
        num_steps = max(1, math.ceil(proposal.fidelity * whole - 1e-9))
        schedule = self.arm.schedule
        stretched = (whole + schedule.first_step) / (num_steps + schedule.first_step)
        longest = max(num_steps - 1 - schedule.start_step, 0) * stretched
        return Trial(
            phase,
            factors,
            proposal.fidelity,
            seed,
            self.resolved.learning_rate * factors.learning_rate,
            min(self.resolved.warmup_steps * factors.warmup, longest),
            self.arm.optimizer.weight_decay * factors.weight_decay,
            num_steps,
        )

    def warmup_steps(self, trial: Trial) -> float:
        """Return the steps of warmup that a trial of this cell really has, not rounded: fewer in a run of lower fidelity."""
        first = self.arm.schedule.first_step
        return trial.warmup_steps * (trial.num_steps + first) / (self.resolved.num_steps + first)


def make_problems(config: SweepConfig) -> list[Problem]:
    """Load what each arm learns; arms that learn the same share it.

    Args:
      config: validated.

    Returns:
      One for each arm, in their order.

    Raises:
      UserError: naming the field of `config.model` or `config.data`, if a model cannot take its examples.
      EnvironmentProblem: if data cannot be had.
    """
    known: dict[str, Problem] = {}
    for index in range(len(config.arms)):
        train = config.arm_train(index)
        name = repr((train.data, train.model, train.loss))
        if name not in known:
            with config.naming_trials(index):
                known[name] = make_problem(train.data, train.model, train.loss)
    trains = map(config.arm_train, range(len(config.arms)))
    return [known[repr((train.data, train.model, train.loss))] for train in trains]


def make_cells(config: SweepConfig, problems: Sequence[Problem]) -> list[Cell]:
    """Lay the study out, arm after arm.

    Args:
      config: validated.
      problems: of each arm, from `make_problems`.

    Returns:
      The cells of the first arm, ascending in batch size, then those of the next.

    Raises:
      UserError: naming the field: `config.global_batch_sizes` above the size of a training set, `config.measure.probe_part_size`
        that does not fit it, an unknown `config.train.target_metric`, the `schedule` of an arm whose warmup does not end before
        training or is none and yet searched (as weight decay must not be), data whose evaluation is of another kind, or, if a trial has one device, microsteps or groups of batch norm that do not fit.
    """
    for index, problem in enumerate(problems):
        with config.naming_trials(index):
            _check_sizes(config, index, problem)
    cells = [
        Cell(
            index,
            arm,
            train := config.cell_train(index, size, _num_devices(config)),
            problems[index],
            size,
            _resolve(config, train, index, size, len(problems[index].splits.train)),
        )
        for index, arm in enumerate(config.arms)
        for size in config.global_batch_sizes
    ]
    if config.trial_devices == "one":
        for cell in cells:
            with config.naming_trials(cell.index):
                _check_microsteps(cell)
    return cells


def deal_cells(cells: Sequence[Cell], config: SweepConfig) -> list[Cell]:
    """Return the cells in the order in which they are dealt out to shards and processes: those that take longest first.

    A cell is taken to cost its full runs times the examples and, as steps cost something by themselves, the steps of each.

    Args:
      cells: from `make_cells`.
      config: of the study.
    """

    searches = [
        search_cost(config.arm_search(index)).full_runs for index in range(len(config.arms))
    ]

    def cost(cell: Cell) -> float:
        runs = searches[cell.index] + len(config.final_seeds)
        return runs * cell.resolved.num_steps * (cell.global_batch_size + _STEP_IN_EXAMPLES)

    return sorted(cells, key=cost, reverse=True)


def _num_devices(config: SweepConfig) -> int:
    """Return how many devices share a trial."""
    return (
        1
        if config.trial_devices == "one"
        else config.train.parallel.num_devices or jax.device_count()
    )


def _check_microsteps(cell: Cell) -> None:
    parts, size = cell.train.parallel.num_microsteps, cell.global_batch_size
    fix = f"it does not divide batch {size}"
    require(size % parts == 0, "parallel.num_microsteps", parts, fix, code="mismatch")
    rows = cell.train.aggregator.replicas_per_device
    fix = f"so many replicas, of {parts} microsteps each, do not divide batch {size}"
    fits = size % (rows * parts) == 0
    require(fits, "aggregator.replicas_per_device", rows, fix, code="mismatch")
    parts *= rows
    measured = cell.train.optimizer.track_noise_scale
    fix = f"batch {size} is one part; accumulate 2 or more microsteps"
    place = "optimizer.track_noise_scale"
    require(not measured or parts > 1, place, measured, fix, code="conflict")
    check_batch(cell.train.model, Replicas(rows=rows), size // parts)


def _check_sizes(config: SweepConfig, index: int, problem: Problem) -> None:
    train, sizes = config.arm_train(index), config.global_batch_sizes
    examples = len(problem.splits.train)
    fix = (
        f"the training set of arm {config.arms[index].name!r} has {examples} examples; use at "
        "most that"
    )
    require(sizes[-1] <= examples, "config.global_batch_sizes", sizes, fix, code="mismatch")
    _check_probes(config, train, problem)
    names = set(problem.metric_names)
    fix = (
        f"a study chooses by loss and accuracy or perplexity, and the evaluation gives "
        f"{sorted(names)}; use lbopt train"
    )
    scored = "loss" in names and bool(names & {"accuracy", "perplexity"})
    require(scored, "data.name", train.data.name, fix, code="conflict")
    if train.target_metric:
        known = [f"eval/{name}" for name in problem.metric_names]
        require_choice("target_metric", train.target_metric, known)


def _check_probes(config: SweepConfig, train: TrainConfig, problem: Problem) -> None:
    measure, examples = config.measure, len(problem.splits.train)
    if not measure.num_probes:
        return
    modules, size = measure.phi_modules, measure.probe_part_size
    if modules:
        params, _ = jax.eval_shape(problem.init, jax.random.key(0))
        try:
            resolve_labels(dict(modules), params)
        except ValueError as error:
            place = "config.measure.phi_modules"
            raise UserError(place, modules, f"{error}", code="mismatch") from error
    place = "config.measure.probe_part_size"
    fix = f"the training set has {examples} examples; use at most that in all parts"
    require(measure.probe_parts * size <= examples, place, size, fix, code="mismatch")
    mixes = train.loss.mixup_alpha and size % 2
    require(not mixes, place, size, "mixup mixes pairs; give an even number", code="conflict")
    check_batch(train.model, Replicas(), size)


def _resolve(
    config: SweepConfig, train: TrainConfig, index: int, size: int, examples: int
) -> ResolvedSchedule:
    schedule, decay = train.schedule, train.optimizer.weight_decay
    search = config.arm_search(index)
    with config.naming_trials(index):
        resolved = resolve_schedule(schedule, size, examples, train.num_epochs, train.num_steps)
        fix = "the search varies the warmup, and a multiple of none is none; give the arm a warmup"
        varies = _varies(search, "warmup") and resolved.warmup_steps <= 0
        field, rule = "schedule.warmup_rule", schedule.warmup_rule
        require(not varies, field, rule, fix, code="conflict")
        fix = (
            "the search varies the weight decay, and a multiple of none is none; give the arm "
            "some, or a search of its own"
        )
        varies = _varies(search, "weight_decay") and decay <= 0
        require(not varies, "optimizer.weight_decay", decay, fix, code="conflict")
    return resolved


def _varies(search: SearchConfig, name: str) -> bool:
    """Return whether candidates differ in "warmup" or "weight_decay"."""
    if search.method == "grid":
        return len(getattr(search, f"{name}_factors")) > 1
    low, high = getattr(search, f"{name}_range")
    return low != high


def key(row: Mapping[str, Any]) -> tuple:
    """Return what identifies a finished trial in `results.jsonl`.

    Args:
      row: of it.

    Returns:
      (arm, global batch size, phase, fidelity, factors, seed).
    """
    factors = row["learning_rate_factor"], row["warmup_factor"], row["weight_decay_factor"]
    return row["arm"], row["global_batch_size"], row["phase"], row["fidelity"], factors, row["seed"]


def trial_key(cell: Cell, trial: Trial) -> tuple:
    """Return the `key` that a trial's row will have.

    Args:
      cell: to which it belongs.
      trial: not yet run.
    """
    return (
        cell.arm.name,
        cell.global_batch_size,
        trial.phase,
        trial.fidelity,
        tuple(trial.factors),
        trial.seed,
    )
