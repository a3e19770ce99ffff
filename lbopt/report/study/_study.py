"""A study as dataclasses: arms, their cells, the candidates that were tried, and their results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from lbopt.config import Arm, SearchConfig, SweepConfig, TrainConfig
from lbopt.report._branches import Branched
from lbopt.report.study._critical_batch import CriticalBatch
from lbopt.report.study._critical_growth import CriticalGrowth
from lbopt.report.study._limit import LimitEstimate
from lbopt.report.study._metric import Metric, Spread
from lbopt.report.study._steps_to_target import CellSteps, Scaling
from lbopt.report.study._three_term_law import LawEstimate
from lbopt.sweep import ExampleScores, FinishedTrial
from lbopt.sweep.search import Factors

Points = tuple[tuple[int, float], ...]
"""(step, value), ascending in the step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate of a search at one fidelity, with the mean over its search seeds.

    Attributes:
      factors: Multiples of the values by the arm's rules.
      fidelity: Length of the runs as a fraction of the full length.
      warmup_steps: Warmup of the first run, in optimizer steps.
      trials: Number of runs.
      diverged: Number of runs that diverged.
      score: Mean validation score, where a diverged classifier counts as 0; None if a run
        diverged and another metric judges.
    """

    factors: Factors
    fidelity: float
    warmup_steps: float
    trials: int
    diverged: int
    score: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Means:
    """Mean losses and accuracies over the final seeds; None where a seed diverged or has no number.

    In a study judged by accuracy, a seed that diverged counts as 0 in those of validation and test.
    """

    train_loss: float | None
    train_accuracy: float | None
    validation_loss: float | None
    validation_accuracy: float | None
    test_loss: float | None
    test_accuracy: float | None

    def of(self, split: str, name: str) -> float | None:
        """Return the mean "loss" or "accuracy" of a split."""
        return getattr(self, f"{split}_{name}")


@dataclasses.dataclass(frozen=True, slots=True)
class Edges:
    """Whether each chosen factor lies at an edge of all that was tried: others might be better."""

    learning_rate: bool
    warmup: bool
    weight_decay: bool


@dataclasses.dataclass(frozen=True, slots=True)
class MeanDiffusion:
    """Means over the final seeds of the fits of the distance from the start."""

    log_r2: float
    power_r2: float
    exponent: float
    seeds: int


@dataclasses.dataclass(frozen=True, slots=True)
class TargetCost:
    """Cost of the target over the final seeds; a seed that missed it counts as the slowest.

    Attributes:
      reached: Number of seeds that reached the target.
      steps_median: Median optimizer steps; None if the median run did not reach the target.
      examples_median: Median examples seen; None with `steps_median`.
      steps_run: Steps of the longest run.
    """

    reached: int
    steps_median: float | None
    examples_median: float | None
    steps_run: float


@dataclasses.dataclass(frozen=True, slots=True)
class Noise:
    """Gradient noise scale of a cell in examples; infinite where the estimate of |G|^2 is not > 0.

    Attributes:
      scale: Median over the probed steps.
      steps: Probed optimizer steps.
      scales: Noise scale at each of them.
    """

    scale: float
    steps: tuple[int, ...]
    scales: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Peak:
    """The probed step at which the curvature along the gradient is largest in a run.

    Attributes:
      step: Optimizer step.
      at_edge: Whether the step is the first or the last one probed in the run.
    """

    step: int
    at_edge: bool


@dataclasses.dataclass(frozen=True, slots=True)
class CellResults:
    """An arm at one batch size whose chosen candidate was tested.

    Attributes:
      global_batch_size: Examples per step.
      search: Runs that chose the candidate.
      final: Runs of the chosen candidate, which are tested, at least one.
      examples: Score of each final run on every test example; None where it was not recorded.
      candidates: Candidates that were tried, ascending in the factors and then the fidelity.
      scores: Test score of each final seed.
      test: Spread of `scores`.
      validation: Mean validation score of the final seeds; None if one is not finite.
      means: Mean losses and accuracies.
      learned: Whether the training loss fell, None if a seed has no losses; see `_read.learned`.
      edges: Chosen factors that lie at an edge of the search.
      cut_warmups: Warmup factors whose warmups would outlast the run, and so end one step before
        it.
      num_beyond: Number of candidates that were tried beyond the edges of the search.
      distance: Mean ||w_T - w_0||; None where it was not measured.
      diffusion: Fits of the distance; None where there are none.
      target: Cost of the target; None for a study without one.
      noise: Gradient noise scale; None where it was not probed.
      lipschitz: Mean Lipschitz constant over the seeds at every probed step.
      peaks: Peak of every seed that did not diverge and was probed twice or more.
      phi: Mean phi over steps and seeds; None where it was not probed.
    """

    global_batch_size: int
    search: tuple[FinishedTrial, ...]
    final: tuple[FinishedTrial, ...]
    examples: tuple[ExampleScores | None, ...]
    candidates: tuple[Candidate, ...]
    scores: tuple[float, ...]
    test: Spread
    validation: float | None
    means: Means
    learned: bool | None
    edges: Edges
    cut_warmups: frozenset[float]
    num_beyond: int
    distance: float | None
    diffusion: MeanDiffusion | None
    target: TargetCost | None
    noise: Noise | None
    lipschitz: Points
    peaks: tuple[Peak, ...]
    phi: float | None

    @property
    def first(self) -> FinishedTrial:
        """A final run: all of them have the chosen rate, warmup, weight decay and length."""
        return self.final[0]

    @property
    def chosen(self) -> Factors:
        """Factors of the chosen candidate."""
        return factors_of(self.first)

    def mean_of(self, split: str, metric: Metric) -> float | None:
        """Return the mean of a metric on "train", "validation" or "test"; None if there is none."""
        if metric.name in ("loss", "accuracy"):
            return self.means.of(split, metric.name)
        return metric.spread(metric.scores(self.final, split)).mean

    @property
    def seeds(self) -> int:
        """Number of final seeds."""
        return len(self.final)

    @property
    def steps_of_seeds(self) -> CellSteps:
        """Steps to the target of every final seed, infinite for one that missed it."""
        steps = [
            math.inf if run.steps_to_target is None else run.steps_to_target for run in self.final
        ]
        return CellSteps(self.global_batch_size, np.array(steps, float), round(self.first.steps))

    @property
    def diverged(self) -> int:
        """Number of final seeds that diverged."""
        return sum(run.diverged for run in self.final)

    @property
    def divergence_step(self) -> int | None:
        """Earliest step at which a final seed diverged."""
        steps = [run.divergence_step for run in self.final if run.divergence_step is not None]
        return int(min(steps)) if steps else None

    @property
    def full(self) -> list[Candidate]:
        """Candidates that were run at full length."""
        return [one for one in self.candidates if one.fidelity == 1]

    @property
    def full_runs(self) -> float:
        """Length of the whole search, in runs of full length."""
        return round(math.fsum(run.fidelity for run in self.search), 9)

    def tried(self, name: str) -> list[float]:
        """Return the tried factors of "learning_rate", "warmup" or "weight_decay", ascending."""
        return sorted({getattr(one.factors, name) for one in self.candidates})


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """What failed at the first batch size past the limit.

    Attributes:
      global_batch_size: The first batch size past the limit.
      kind: "optimise" or "generalise"; None if it cannot be told.
      diverged: Number of final seeds that diverged there.
      seeds: Number of final seeds.
      test_lost: Loss of test score against the small batches, in points of accuracy, or rise of the
        mean loss.
      train_lost: Loss of training score, in the same unit; both are None if a mean is missing.
      train_share: train_lost / test_lost; None if the mean test score did not fall.
    """

    global_batch_size: int
    kind: str | None
    diverged: int
    seeds: int
    test_lost: float | None
    train_lost: float | None
    train_share: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class ArmResults:
    """An optimizer with its scaling and warmup rule, and its tested cells.

    Attributes:
      place: Position in `SweepConfig.arms`.
      config: Optimizer, rules, and fields that replace those of the study.
      train: Config of the arm's runs.
      search: Config of the arm's search.
      cells: Tested cells, ascending in batch size.
      colour: Colour in figures: its optimizer's, or another one if all arms had the same.
      limit: Estimate of the limit; None where the study has none, or the smallest batch has no
        result yet.
      limit_over_examples: Whether the bootstrap of the limit resamples test examples too, not
        only seeds.
      failure: Failure at the first batch size past the limit; None without a result there.
      scaling: Steps to the target as a function of the batch size; None for a study without one.
      critical_batch: Fit of the median steps to the target; None where there is none, and where the
        batch grows.
      growth: Critical batches of easier targets than the study's; None where they cannot be fitted.
      law: Fit of the final losses over batch size and steps, or the reason why there is none; None
        without a result.
      twins: Number of earlier arms whose optimizer has the same colour.
    """

    place: int
    config: Arm
    train: TrainConfig
    search: SearchConfig
    cells: tuple[CellResults, ...]
    colour: str
    limit: LimitEstimate | None = None
    limit_over_examples: bool = False
    failure: Failure | None = None
    scaling: Scaling | None = None
    critical_batch: CriticalBatch | None = None
    growth: CriticalGrowth | None = None
    law: LawEstimate | None = None
    twins: int = 0

    @property
    def name(self) -> str:
        """Name, as in the config."""
        return self.config.name

    @property
    def grows(self) -> bool:
        """Whether the batch changes within a run, so that the cell's is that of the start alone."""
        return self.train.batch_schedule is not None or self.train.phase2 is not None

    @property
    def missed_sizes(self) -> list[int]:
        """Batch sizes at which the median run did not reach the target."""
        return [
            cell.global_batch_size
            for cell in self.cells
            if cell.target and cell.target.steps_median is None
        ]

    def cell(self, global_batch_size: int) -> CellResults | None:
        """Return the tested cell at a batch size, if there is one."""
        return next((c for c in self.cells if c.global_batch_size == global_batch_size), None)


@dataclasses.dataclass(frozen=True, slots=True)
class WaterfallStep:
    """An arm of the waterfall at the largest batch, and its gain over the arm before.

    Attributes:
      arm: Name of the arm.
      mean: Mean test score.
      std: Standard deviation of the test score over seeds.
      gain: Gain in the unit of the metric, points of accuracy for instance, positive for the
        better; None for the first arm.
      gain_low: Lower end of the 95 % Welch interval of the gain; None without one that can be.
      gain_high: Upper end of that interval; None with the lower one.
      gain_spread: Standard deviation of the difference of two single seeds; None with one seed.
      told_apart: Whether Welch's interval excludes 0; None without an interval.
    """

    arm: str
    mean: float
    std: float
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    gain_spread: float | None = None
    told_apart: bool | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Waterfall:
    """The gain of each arm over the arm before it, at the largest batch."""

    global_batch_size: int
    steps: tuple[WaterfallStep, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Study:
    """A study, complete or not.

    Attributes:
      config: Config of the study.
      metric: The measure that judges it.
      arms: All arms, in the order of the config.
      waterfall: Gains of its arms at the largest batch; None if the study has no waterfall, or an
        arm of it has no result there.
      runs: Every finished trial, as in `results.jsonl`.
      branched: Measurements of the critical batch by branches of single runs.
    """

    config: SweepConfig
    metric: Metric
    arms: tuple[ArmResults, ...]
    waterfall: Waterfall | None
    runs: tuple[FinishedTrial, ...]
    branched: tuple[Branched, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes, ascending."""
        return self.config.global_batch_sizes

    @property
    def measured(self) -> list[ArmResults]:
        """Arms with a tested cell."""
        return [arm for arm in self.arms if arm.cells]

    @property
    def num_cells(self) -> int:
        """Number of cells, (arm, batch size)."""
        return len(self.arms) * len(self.sizes)

    @property
    def num_complete(self) -> int:
        """Number of cells tested with every final seed."""
        wanted = set(self.config.final_seeds)
        cells = [cell for arm in self.arms for cell in arm.cells]
        return sum({run.seed for run in cell.final} >= wanted for cell in cells)

    @property
    def complete(self) -> bool:
        """Whether every cell is tested with every final seed."""
        return self.num_complete == self.num_cells

    @property
    def has_target(self) -> bool:
        """Whether candidates are chosen by their steps to a target."""
        return bool(self.config.train.target_metric)

    @property
    def has_limits(self) -> bool:
        """Whether limits are estimated: not if runs stop at a target, which makes scores equal."""
        return not (self.has_target and self.config.train.stop_at_target)


def factors_of(run: FinishedTrial) -> Factors:
    """Return the candidate of a run."""
    return Factors(run.learning_rate_factor, run.warmup_factor, run.weight_decay_factor)


def comparable(arms: Sequence[ArmResults], same_budget: bool = False) -> list[list[ArmResults]]:
    """Sort arms into groups that train the same model on the same data with the same loss.

    The groups are in the order of their first arms.

    Args:
      arms: The arms.
      same_budget: Whether arms of a group also have the same budget for their search.
    """

    def key(arm: ArmResults) -> tuple[object, ...]:
        problem = (arm.train.data, arm.train.model, arm.train.loss)
        return (*problem, _budget(arm.search)) if same_budget else problem

    groups: list[list[ArmResults]] = []
    for arm in arms:
        same = (group for group in groups if key(group[0]) == key(arm))
        group = next(same, None)
        if group is None:
            groups.append([arm])
        else:
            group.append(arm)
    return groups


def _budget(search: SearchConfig) -> tuple[object, ...]:
    """Return what decides how many trials a search has in a cell, and how long they are.

    Fields that do not apply to the method are at their defaults.
    """
    factors = search.learning_rate_factors, search.warmup_factors, search.weight_decay_factors
    candidates = math.prod(map(len, factors)), search.num_candidates, search.widen_candidates
    rungs = search.eta, search.min_fidelity, search.pruner
    return search.method, candidates, rungs, len(search.seeds)
