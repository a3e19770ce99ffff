"""Cells of a study, which are arms at a batch size, and the trials in each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from lbopt import errors
from lbopt.config import (
    Arm,
    BatchRatios,
    ResolvedSchedule,
    SearchConfig,
    SweepConfig,
    TrainConfig,
    at_batch_size,
    batch_ratios,
    moment_decays,
    naming_growth,
    naming_step,
    optimizer_numbers,
    resolve_schedule,
    scale_optimizer,
    step_options,
)
from lbopt.errors import require
from lbopt.parallel import available_devices, on_one_device, splits_evenly
from lbopt.recipes import (
    LoadedProblem,
    batch_phases_of,
    check_batch,
    check_growth,
    check_pairs,
    check_patterns,
    check_size,
    make_problem,
    with_layout,
)
from lbopt.replicas import Replicas
from lbopt.schedules import BatchPhase, Units
from lbopt.sweep.search import Factors, Proposal, search_cost
from lbopt.train import count_multiples, is_due
from lbopt.transforms import MomentDecays, resolve_labels

_STEP_IN_EXAMPLES = 32
"""Cost of a step besides its examples, in examples: a guess that only orders the cells."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One training run: the arguments of a compiled program.

    Attributes:
      phase: "search" (chooses the candidate on validation) or "final" (is tested).
      factors: The candidate, as multiples of the values that the arm's rules give.
      fidelity: Length as a fraction of the full run's, in (0, 1].
      seed: Seed of initialisation, shuffle and the steps' random numbers.
      learning_rate: Peak learning rate.
      warmup_steps: Optimizer steps of warmup in a run of the full length, not rounded; the schedule
        of a shorter run is rescaled.
      weight_decay: Weight decay of the optimizer.
      num_steps: Length in optimizer steps.
      optimizer_numbers: Other numbers of the optimizer by name, from `config.optimizer_numbers`.
    """

    phase: str
    factors: Factors
    fidelity: float
    seed: int
    learning_rate: float
    warmup_steps: float
    weight_decay: float
    num_steps: int
    optimizer_numbers: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class GrowthPhase:
    """The steps of one batch size in the trials of a cell whose batch grows.

    Attributes:
      steps: The steps, and their place in the run.
      train: Config of a run at this batch size, with the optimizer's numbers.
      ratios: Numbers at this batch size over those at the first one.
      moments: Decays of the moments, each in the phase before and in this one; None if they stay.
    """

    steps: BatchPhase
    train: TrainConfig
    ratios: BatchRatios
    moments: MomentDecays | None


@dataclasses.dataclass(frozen=True)
class Cell:
    """An arm at a batch size, which its batch schedule may enlarge.

    Attributes:
      index: Index of the arm in the study.
      arm: The arm: optimizer and rules.
      train: Config of a run, from `SweepConfig.cell_train`, with the numbers of the optimizer that
        the arm's scaling rule gives at the batch size.
      problem: Data, model and loss.
      global_batch_size: Number of examples in a step, at the start.
      resolved: Scaled learning rate, warmup and length at that batch size.
      growth: The phases of a batch that grows; () for one batch size.
    """

    index: int
    arm: Arm
    train: TrainConfig
    problem: LoadedProblem
    global_batch_size: int
    resolved: ResolvedSchedule
    growth: tuple[GrowthPhase, ...] = ()

    @property
    def num_steps(self) -> int:
        """Optimizer steps of a trial of the full length."""
        if not self.growth:
            return self.resolved.num_steps
        last = self.growth[-1].steps
        return last.first_step + last.num_steps

    @property
    def final_batch_size(self) -> int:
        """Number of examples in the last step of a trial of the full length."""
        return self.growth[-1].steps.global_batch_size if self.growth else self.global_batch_size

    @property
    def largest_batch_size(self) -> int:
        """Largest number of examples in a step of a trial."""
        sizes = [each.steps.global_batch_size for each in self.growth]
        return max(sizes, default=self.global_batch_size)

    def examples(self, step: int) -> int:
        """Return the number of examples in the first steps of a trial.

        Args:
          step: Number of steps.
        """
        for phase in (each.steps for each in self.growth):
            if step <= phase.first_step + phase.num_steps:
                return phase.first_example + (step - phase.first_step) * phase.global_batch_size
        return self.units.examples(step)

    def evaluated_steps(self, num_steps: int) -> set[int]:
        """Return the steps of a trial after which it is evaluated for its target.

        Args:
          num_steps: Length of the trial.
        """
        train = self.train
        if not train.target_metric:
            return set()
        within = range(1, num_steps)
        examples = train.examples_between_evaluations(self.units.num_examples)
        if examples is None:
            every = train.steps_between_evaluations(self.resolved.steps_per_epoch)
            return {num_steps, *(step for step in within if is_due(step, every))}
        counted = [count_multiples(self.examples(step), examples) for step in range(num_steps)]
        return {num_steps, *(step for step in within if counted[step] > counted[step - 1])}

    @property
    def name(self) -> str:
        """Name of the cell for messages."""
        return f"{self.arm.name} at batch {self.global_batch_size}"

    @property
    def units(self) -> Units:
        """Epochs, steps and examples of this cell, at its first batch size."""
        return Units(len(self.problem.splits.train), self.global_batch_size)

    @property
    def longest_warmup(self) -> float:
        """Largest factor whose warmup ends before a run of the full length; 0 warmups always do."""
        own = self.resolved.warmup_steps
        return self._longest_steps(self.resolved.num_steps) / own if own > 0 else math.inf

    def _longest_steps(self, num_steps: int) -> float:
        """Return the longest warmup in a run of this many steps, not rounded."""
        return max(num_steps - 1 - self.arm.schedule.start_step, 0)

    def trial(self, phase: str, proposal: Proposal, seed: int) -> Trial:
        """Return the trial of a proposal, its length rounded up to whole steps.

        A warmup that is longer than the run ends one step before it.

        Args:
          phase: "search" or "final".
          proposal: Factors and fidelity.
          seed: Seed of the trial.
        """
        factors = proposal.factors
        whole = self.resolved.num_steps
        num_steps = max(1, math.ceil(proposal.fidelity * whole - 1e-9))
        assert not self.growth or proposal.fidelity == 1, "the config refuses shorter trials"
        schedule = self.arm.schedule
        stretched = (whole + schedule.first_step) / (num_steps + schedule.first_step)
        longest = self._longest_steps(num_steps) * stretched
        return Trial(
            phase=phase,
            factors=factors,
            fidelity=proposal.fidelity,
            seed=seed,
            learning_rate=self.resolved.learning_rate * factors.learning_rate,
            warmup_steps=min(self.resolved.warmup_steps * factors.warmup, longest),
            weight_decay=self.train.optimizer.weight_decay * factors.weight_decay,
            num_steps=self.num_steps if self.growth else num_steps,
            optimizer_numbers=optimizer_numbers(self.train.optimizer),
        )

    def warmup_steps(self, trial: Trial) -> float:
        """Return the steps of warmup in a trial's own length, not rounded."""
        if self.growth:
            return trial.warmup_steps
        first = self.arm.schedule.first_step
        return trial.warmup_steps * (trial.num_steps + first) / (self.resolved.num_steps + first)


def make_problems(config: SweepConfig) -> list[LoadedProblem]:
    """Load data and build models for all arms; arms of the same problem share it.

    Args:
      config: A validated config.

    Returns:
      The problem of each arm, in the order of the arms.

    Raises:
      UserError: Naming the field, if a model cannot take the examples.
      EnvironmentProblem: If data cannot be loaded.
    """
    known: dict[str, LoadedProblem] = {}
    platform = available_devices()[0].platform
    trains = [with_layout(config.arm_train(each), platform) for each in range(len(config.arms))]
    for index, train in enumerate(trains):
        name = repr((train.data, train.model, train.loss))
        if name not in known:
            with config.naming_trials(index):
                known[name] = make_problem(train.data, train.model, train.loss)
    return [known[repr((train.data, train.model, train.loss))] for train in trains]


def make_cells(config: SweepConfig, problems: Sequence[LoadedProblem]) -> list[Cell]:
    """Return the cells of a study, arm after arm, ascending in batch size.

    Args:
      config: A validated config.
      problems: The problem of each arm, from `make_problems`.

    Raises:
      UserError: Naming the field: a batch or probe larger than the training set, an unknown target
        metric, a warmup that does not end before training, a warmup or weight decay of 0 with
        factors other than 1, a metric that the data do not have, or, for trials on one device,
        microsteps or groups of batch norm that do not fit.
    """
    for index, problem in enumerate(problems):
        with config.naming_trials(index):
            _check_sizes(config, index, problem)
    judged = sorted({judged_by(config, problem) for problem in problems})
    fix = f"the arms would be judged by {' and '.join(judged)}; name the metric of them all"
    require(len(judged) == 1, "config.metric", config.metric, fix, code="conflict")

    cells = []
    for index, (arm, problem) in enumerate(zip(config.arms, problems, strict=True)):
        for size in config.global_batch_sizes:
            train = _scaled(config, index, size)
            resolved = _resolve(config, train, index, size, len(problem.splits.train))
            cell = Cell(index, arm, train, problem, size, resolved)
            cells.append(dataclasses.replace(cell, growth=_growth(config, cell)))

    # A trial on one device runs its replicas and microsteps one after another.
    if config.trial_devices == "one":
        for cell in cells:
            with config.naming_trials(cell.index):
                for train in [each.train for each in cell.growth] or [cell.train]:
                    _check_microsteps(cell, train)
    return cells


def _scaled(config: SweepConfig, index: int, size: int) -> TrainConfig:
    """Return the config of an arm's runs at a batch size, its optimizer's numbers scaled to it."""
    train = config.cell_train(index, size, _num_devices(config))
    with config.naming_trials(index):
        optimizer = scale_optimizer(train.optimizer, train.schedule, size)
    return dataclasses.replace(train, optimizer=optimizer)


def _growth(config: SweepConfig, cell: Cell) -> tuple[GrowthPhase, ...]:
    """Return the phases of a cell whose arm has a batch schedule; () for one batch size."""
    growing = cell.train.batch_schedule
    if growing is None:
        return ()

    first = cell.global_batch_size
    found: list[GrowthPhase] = []
    with config.naming_trials(cell.index):
        # The rule counts from the arm's own optimizer.
        whole = dataclasses.replace(cell.train, optimizer=cell.arm.optimizer)
        for steps in batch_phases_of(whole, cell.problem):
            size = steps.global_batch_size
            with naming_growth(growing, size):
                check_size(cell.problem, size)
            train = at_batch_size(_scaled(config, cell.index, size), size, _num_devices(config))
            moments = moment_decays(found[-1].train.optimizer, train.optimizer) if found else None
            found.append(GrowthPhase(steps, train, batch_ratios(whole, first, size), moments))
        check_growth(whole, cell.problem, [each.steps.global_batch_size for each in found])
    return tuple(found) if len(found) > 1 else ()


def judged_by(config: SweepConfig, problem: LoadedProblem) -> str:
    """Return the name of the metric by which a study judges the trials of a problem."""
    return config.metric.removeprefix("eval/") or problem.main_metric


def deal_cells(cells: Sequence[Cell], config: SweepConfig) -> list[Cell]:
    """Return the cells in the order in which shards and processes take them, the longest first.

    The estimated cost of a cell is the number of its full runs, times the examples of each and a
    cost per step.

    Args:
      cells: The cells, from `make_cells`.
      config: The config of the study.
    """
    searches = [
        search_cost(config.arm_search(index)).full_runs for index in range(len(config.arms))
    ]

    def cost(cell: Cell) -> float:
        runs = searches[cell.index] + len(config.final_seeds)
        examples = cell.examples(cell.num_steps)
        return runs * (examples + cell.num_steps * _STEP_IN_EXAMPLES)

    return sorted(cells, key=cost, reverse=True)


def _num_devices(config: SweepConfig) -> int:
    """Return the number of devices that share a trial."""
    if config.trial_devices == "one":
        return 1
    return config.train.parallel.num_devices or jax.device_count()


def _check_microsteps(cell: Cell, train: TrainConfig) -> None:
    """Check that replicas, microsteps and groups of batch norm divide a batch of a cell."""
    size = train.global_batch_size
    microsteps = train.parallel.num_microsteps
    fix = f"it does not divide batch {size}; use a divisor of it"
    fits = splits_evenly(size, 1, microsteps)
    require(fits, "parallel.num_microsteps", microsteps, fix, code="mismatch")

    replicas = train.aggregator.replicas_per_device
    fix = (
        f"{replicas} replicas, of {microsteps} microsteps each, do not divide batch {size}; use "
        "fewer"
    )
    fits = splits_evenly(size, replicas, microsteps)
    require(fits, "aggregator.replicas_per_device", replicas, fix, code="mismatch")
    options = step_options(train, cell.problem.stacked)
    with naming_step():
        on_one_device(options.reduction)  # an aggregator may ask for an even number of replicas
        options.check_parts(replicas)
    check_batch(train.model, Replicas(simulated=replicas), size // (microsteps * replicas))


def _check_sizes(config: SweepConfig, index: int, problem: LoadedProblem) -> None:
    """Check batch sizes, probes and metrics of an arm against its problem."""
    train = config.arm_train(index)
    sizes = config.global_batch_sizes
    in_arm = errors.under(f"in arm {config.arms[index].name!r}, ")
    # If the training set has enough examples for the largest batch, it has for all.
    with errors.about("config.global_batch_sizes", sizes), in_arm:
        check_size(problem, sizes[-1])

    check_patterns(train, problem)
    _check_probes(config, train, problem)

    names = set(problem.metric_names)
    fix = f"a study needs the loss, and the evaluation gives {sorted(names)}; use lbopt train"
    require("loss" in names, "data.name", train.data.name, fix, code="conflict")
    problem.check_metric("config.metric", f"eval/{judged_by(config, problem)}")

    if train.target_metric:
        problem.check_metric("target_metric", train.target_metric)


def _check_probes(config: SweepConfig, train: TrainConfig, problem: LoadedProblem) -> None:
    """Check the probes of a study against the problem of an arm."""
    measure = config.measure
    if not measure.num_probes:
        return
    modules = measure.phi_modules
    if modules:
        place = "config.measure.phi_modules"
        with errors.about(place, modules, code="mismatch"), errors.under("", labels=place):
            resolve_labels(dict(modules), problem.params)

    size = measure.probe_part_size
    place = "config.measure.probe_part_size"
    with errors.about(place, size):
        check_size(problem, measure.probe_parts * size)
    if train.loss.mixup_alpha:
        with errors.about(place, size, "num_examples", code="conflict"):
            check_pairs(size)
    check_batch(train.model, Replicas(), size)


def _resolve(
    config: SweepConfig, train: TrainConfig, index: int, size: int, examples: int
) -> ResolvedSchedule:
    """Return the schedule of an arm at a batch size; check that searched values are not 0."""
    schedule = train.schedule
    decay = train.optimizer.weight_decay
    search = config.arm_search(index)
    with config.naming_trials(index):
        resolved = resolve_schedule(schedule, size, examples, train.num_epochs, train.num_steps)

        # A multiple of 0 is 0: the factors would have no effect.
        fix = "the search multiplies the warmup, and a multiple of 0 is 0; give the arm a warmup"
        varies = _varies(search, "warmup") and resolved.warmup_steps <= 0
        rule = schedule.warmup_rule
        require(not varies, "schedule.warmup_rule", rule, fix, code="conflict")

        fix = (
            "the search multiplies the weight decay, and a multiple of 0 is 0; give the arm a "
            "weight decay > 0, or a search of its own"
        )
        varies = _varies(search, "weight_decay") and decay <= 0
        require(not varies, "optimizer.weight_decay", decay, fix, code="conflict")
    return resolved


def _varies(search: SearchConfig, name: str) -> bool:
    """Return whether a candidate changes the rule's "warmup" or "weight_decay"."""
    field = f"{name}_factors" if search.method == "grid" else f"{name}_range"
    return any(factor != 1 for factor in getattr(search, field))


def trial_identity(record: Mapping[str, Any]) -> tuple:
    """Return the fields that identify a finished trial in its study.

    Args:
      record: The trial's record of `results.jsonl`, or its line of `test_examples.jsonl`.

    Returns:
      Arm, global batch size, phase, fidelity, factors and seed.
    """
    factors = record["learning_rate_factor"], record["warmup_factor"], record["weight_decay_factor"]
    return (
        record["arm"],
        record["global_batch_size"],
        record["phase"],
        record["fidelity"],
        factors,
        record["seed"],
    )


def planned_identity(cell: Cell, trial: Trial) -> tuple:
    """Return the `trial_identity` that a trial's record will have.

    Args:
      cell: The cell of the trial.
      trial: The trial, not yet run.
    """
    return (
        cell.arm.name,
        cell.global_batch_size,
        trial.phase,
        trial.fidelity,
        tuple(trial.factors),
        trial.seed,
    )
