"""A running trial, and the record of `results.jsonl` that it ends as."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lbopt.config import SweepConfig
from lbopt.errors import require
from lbopt.sweep import _fits
from lbopt.sweep._finished_trial import FINAL, SPLITS, Probes
from lbopt.sweep._noise import noise_scales
from lbopt.sweep._trials import Cell, Trial, judged_by
from lbopt.train import Target
from lbopt.workdir import finite_or_none

_CURVE_POINTS = 64
"""Most points in the curves of a final trial's record."""


@dataclasses.dataclass(eq=False)
class RunningTrial:
    """The measurements of a trial up to its last step.

    Attributes:
      config: The config of the study.
      cell: The cell of the trial.
      trial: The trial.
      losses: Training losses of all steps so far: fp32 arrays [steps], one after another.
      distances: ||w_t - w_0|| after each step, in arrays like `losses`; 0 if not measured.
      evaluations: Pairs of step and validation scores, if the study has a target.
      probes: Pairs of step and measurements, for a final trial.
      seconds: Seconds so far, shared equally among trials that run side by side.
      done: Number of steps so far.
      divergence_step: The first step, counted from 1, whose loss is not finite; None if all are.
      steps_to_target: Number of steps at the first evaluation that reached the target; None if none
        did.
    """

    config: SweepConfig
    cell: Cell
    trial: Trial
    losses: list[np.ndarray] = dataclasses.field(default_factory=list)
    distances: list[np.ndarray] = dataclasses.field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = dataclasses.field(default_factory=list)
    probes: list[tuple[int, dict[str, float]]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    done: int = 0
    divergence_step: int | None = None
    steps_to_target: int | None = None

    def __post_init__(self) -> None:
        measure = self.config.measure
        whole = self.trial.num_steps
        self._metric = judged_by(self.config, self.cell.problem)
        probed = self.trial.phase == FINAL and measure.num_probes
        self._probe_at = frozenset(
            _fits.log_spaced_steps(whole, measure.num_probes) if probed else ()
        )
        self._evaluate_at = frozenset(self.cell.evaluated_steps(whole))
        changes = {each.steps.first_step for each in self.cell.growth} - {0}
        self._stops = sorted({whole, *changes, *self._probe_at, *self._evaluate_at})

    @property
    def steps_to_next_stop(self) -> int:
        """Number of steps until the trial is probed or evaluated, changes its batch or ends."""
        return next(stop for stop in self._stops if stop > self.done) - self.done

    @property
    def wants_probe(self) -> bool:
        """Whether the trial's gradients are to be probed now."""
        return self.done in self._probe_at and not self.diverged

    @property
    def wants_evaluation(self) -> bool:
        """Whether the trial is to be evaluated now."""
        return self.done in self._evaluate_at and not self.diverged

    @property
    def diverged(self) -> bool:
        """Whether a training loss was not finite."""
        return self.divergence_step is not None

    @property
    def ended(self) -> bool:
        """Whether the trial has no more steps to take."""
        at_target = self.cell.train.stop_at_target and self.steps_to_target is not None
        return self.diverged or at_target or self.done == self.trial.num_steps

    def extend(self, losses: np.ndarray, distances: np.ndarray) -> None:
        """Add steps; steps after the first loss that is not finite are dropped.

        Args:
          losses: Training losses of the steps after `done`, fp32 [steps].
          distances: ||w_t - w_0|| after each of them, fp32 [steps].
        """
        broken = np.flatnonzero(~np.isfinite(losses))
        if len(broken):
            losses = losses[: broken[0] + 1]
            distances = distances[: broken[0] + 1]
            self.divergence_step = self.done + len(losses)
        self.losses.append(losses)
        self.distances.append(distances)
        self.done += len(losses)

    def evaluated(self, scores: Mapping[str, float]) -> None:
        """Add an evaluation on validation after `done` steps; note whether it reached the target.

        Args:
          scores: Means over the split by metric, that of the target included; without "eval/" in
            the names.
        """
        self.evaluations.append((self.done, dict(scores)))
        train = self.cell.train
        target = Target(train.target_metric.removeprefix("eval/"), train.target_value)
        reached = target.reached(scores)
        if reached and self.steps_to_target is None:
            self.steps_to_target = self.done

    def probed(self, measured: Mapping[str, float]) -> None:
        """Add measurements after `done` steps.

        Args:
          measured: Numbers by name; those of layers as `phi_layers/PATH` and `trust_ratio/PATH`,
            those of modules as `phi_modules/NAME`.
        """
        self.probes.append((self.done, dict(measured)))

    def record(self, scores: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
        """Return the record of the finished trial.

        Args:
          scores: Means by split and metric; with "test" for a final trial only.

        Returns:
          JSON data. Numbers that are not finite or were not measured are null, and so is every
          score of a split whose loss is not finite. Scores are loss, accuracy in [0, 1] and
          perplexity, where the task has them, and `metric`, which judges the trial. `diverged` is
          also true if the validation loss at the end is not finite; `divergence_step` is null if
          every training loss was finite. `steps_to_target` and `examples_to_target` are there in a
          study with a target, and null if it was not reached.

          Final trials also have `outputs` (number of classes or tokens), `trivial_loss` (the loss
          of outputs that do not look at the input; null if it is not known) and `curve`, at
          log-spaced steps of the planned length and at the last step; and, if they were measured,
          `diffusion`, `evaluations`, `probes` and `noise_scale` (in examples, the median over
          probed steps).

        Raises:
          UserError: Naming `loss.name`, if a metric of the user's loss that is called accuracy is
            no share.
        """
        cell = self.cell
        arm = cell.arm
        trial = self.trial
        losses = np.concatenate(self.losses)
        distances = np.concatenate(self.distances)
        at_the_end = dataclasses.replace(cell.units, global_batch_size=cell.final_batch_size)
        last_epoch = losses[-min(len(losses), at_the_end.steps(1)) :]
        # The last update may diverge after the last training loss was taken.
        diverged = self.diverged or not math.isfinite(scores["validation"]["loss"])

        work_to_target: dict[str, Any] = {}
        if cell.train.target_metric:
            steps = self.steps_to_target
            examples = None if steps is None else cell.examples(steps)
            work_to_target = {"steps_to_target": steps, "examples_to_target": examples}
        distance = float(distances[-1]) if self.config.measure.distance else math.nan

        return {
            "study": self.config.name,
            "arm": arm.name,
            "optimizer": arm.optimizer.name,
            "scaling_rule": arm.schedule.scaling_rule,
            "warmup_rule": arm.schedule.warmup_rule,
            "global_batch_size": cell.global_batch_size,
            **({"final_batch_size": cell.final_batch_size} if cell.growth else {}),
            "phase": trial.phase,
            "fidelity": trial.fidelity,
            "learning_rate": trial.learning_rate,
            "learning_rate_factor": trial.factors.learning_rate,
            "warmup_steps": _rounded(cell.warmup_steps(trial)),
            "warmup_factor": trial.factors.warmup,
            "weight_decay": trial.weight_decay,
            "weight_decay_factor": trial.factors.weight_decay,
            "seed": trial.seed,
            "steps": trial.num_steps,
            "steps_run": self.done,
            "examples_seen": cell.examples(self.done),
            "metric": self._metric,
            **self._scored(scores),
            "last_epoch_loss": finite_or_none(float(np.mean(last_epoch))),
            "diverged": diverged,
            "divergence_step": self.divergence_step,
            **work_to_target,
            "distance": finite_or_none(distance),
            **(self._measured(losses, distances) if trial.phase == FINAL else {}),
            "seconds": round(self.seconds, 4),
        }

    def _measured(self, losses: np.ndarray, distances: np.ndarray) -> dict[str, Any]:
        """Return the fields that only the record of a final trial has."""
        problem = self.cell.problem
        trivial_loss = problem.trivial_loss
        found: dict[str, Any] = {"outputs": problem.outputs, "trivial_loss": trivial_loss}

        steps = _curve_steps(self.trial.num_steps, len(losses))
        at = np.asarray(steps) - 1
        found["curve"] = {"step": list(steps), "train_loss": _numbers(losses[at])}
        if self.config.measure.distance:
            found["curve"]["distance"] = _numbers(distances[at])
            every = range(1, len(distances) + 1)
            warmed_up = max(1, math.ceil(self.cell.warmup_steps(self.trial)))
            fit = _fits.fit_diffusion(every, distances.tolist(), from_step=warmed_up)
            found["diffusion"] = None if fit is None else dataclasses.asdict(fit)

        if self.evaluations:
            _, first = self.evaluations[0]
            target = self.cell.train.target_metric.removeprefix("eval/")
            names = ("loss", "accuracy", self._metric, target)
            kept = [name for name in names if name in first]
            columns = {name: f"validation_{name}" for name in kept}
            found["evaluations"] = _columns(self.evaluations, columns)
        if self.probes:
            found |= _probes(self.probes)
        return found

    def _scored(self, scores: Mapping[str, Mapping[str, float]]) -> dict[str, float | None]:
        """Return the scores of a record; those on the test split are None unless they are given.

        If the loss is not finite, all scores are None: the accuracy of outputs that are not numbers
        is that of the first class.
        """
        record: dict[str, float | None] = {}
        names = dict.fromkeys(("loss", "accuracy", "perplexity", "bits_per_byte", self._metric))
        for split in SPLITS:
            usable = split in scores and math.isfinite(scores[split]["loss"])
            for name in names:
                if name in scores["validation"]:
                    score = finite_or_none(scores[split][name]) if usable else None
                    record[f"{split}_{name}"] = score
            if usable and "accuracy" in scores[split]:
                self._check_share(scores[split]["accuracy"])
        return record

    def _check_share(self, accuracy: float) -> None:
        """Refuse an accuracy that is no share; only a loss of the user's own gives one."""
        fix = f"its metric accuracy is {accuracy:g}; return shares in [0, 1], or change its name"
        require(0 <= accuracy <= 1, "loss.name", self.cell.train.loss.name, fix)


def _curve_steps(planned: int, run: int) -> list[int]:
    """Return the steps that a curve keeps: the same ones for runs of one planned length.

    Args:
      planned: Planned number of steps.
      run: Number of steps that were run.

    >>> _curve_steps(3, 3), _curve_steps(1000, 20)[-3:]
    ([1, 2, 3], [17, 19, 20])
    """
    return [step for step in _fits.log_spaced_steps(planned, _CURVE_POINTS) if step < run] + [run]


def _rounded(value: float) -> float:
    """Return a whole number as an integer, another number as it is."""
    return int(value) if value == int(value) else value


def _numbers(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """Return numbers for JSON, with the seven digits of fp32."""
    return [finite_or_none(float(f"{value:.7g}")) for value in values]


def _columns(
    found: Sequence[tuple[int, Mapping[str, float]]], names: Mapping[str, str]
) -> dict[str, list[Any]]:
    """Return pairs of step and values as columns, under other names."""
    columns: dict[str, list[Any]] = {"step": [step for step, _ in found]}
    for name, column in names.items():
        columns[column] = _numbers([values[name] for _, values in found])
    return columns


def _probes(found: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, Any]:
    """Return measurements by name, those of layers in groups, and the noise scale of the run."""
    names = {name: name for name in found[0][1]}
    columns = _columns(found, names)
    grouped: dict[str, Any] = {}
    for name, values in columns.items():
        kind, _, layer = name.partition("/")
        if layer:
            grouped.setdefault(kind, {})[layer] = values
        else:
            grouped[kind] = values
    measured = Probes(
        grouped["step"], grouped.get("noise_trace"), grouped.get("gradient_square_norm")
    )
    scales = [scale for _, scale in noise_scales([measured])]
    return {
        "probes": grouped,
        "noise_scale": finite_or_none(statistics.median(scales)) if scales else None,
    }
