"""A trial under way, and the line it ends as in `results.jsonl`."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lbopt.config import SweepConfig
from lbopt.sweep import _fits
from lbopt.sweep._noise import noise_scales
from lbopt.sweep._row import Probes
from lbopt.sweep._trials import FINAL, Cell, Trial
from lbopt.workdir import finite_or_none

_CURVE_POINTS = 64
"""Of the curves that a final trial's line keeps, at most."""


@dataclasses.dataclass(eq=False)
class Record:
    """What a trial has done so far.

    Attributes:
      config: of the study.
      cell: the trial's.
      trial: its numbers.
      losses: of every step so far, fp32 [steps] in parts.
      distances: likewise, ||w_t - w_0|| after the step; 0 if it is not measured.
      evaluations: (step, validation scores), if the study has a target.
      probes: (step, measurements), of final trials.
      seconds: that it took so far, its share of what ran beside it.
      done: steps taken so far.
      divergence_step: the first step, counted from 1, whose loss is not finite; None if there is none.
      steps_to_target: steps taken at the first evaluation that reached the target; None if none did.
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
        measure, train, whole = self.config.measure, self.cell.train, self.trial.num_steps
        probed = self.trial.phase == FINAL and measure.num_probes
        self._probe_at = frozenset(
            _fits.log_spaced_steps(whole, measure.num_probes) if probed else ()
        )
        every: float = train.eval_every_steps
        if train.eval_every_epochs is not None:
            every = train.eval_every_epochs * self.cell.resolved.steps_per_epoch
        self._evaluate_at = frozenset(_evaluated_at(every, whole) if train.target_metric else ())
        self._stops = sorted({whole, *self._probe_at, *self._evaluate_at})

    @property
    def steps_to_next_stop(self) -> int:
        """How many steps it may take before it has to be looked at."""
        return next(stop for stop in self._stops if stop > self.done) - self.done

    @property
    def wants_probe(self) -> bool:
        """Whether gradients are to be probed after the step it is at."""
        return self.done in self._probe_at and not self.diverged

    @property
    def wants_evaluation(self) -> bool:
        """Whether it is to be evaluated after the step it is at."""
        return self.done in self._evaluate_at and not self.diverged

    @property
    def diverged(self) -> bool:
        """Whether a loss was not finite."""
        return self.divergence_step is not None

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to train."""
        at_target = self.cell.train.stop_at_target and self.steps_to_target is not None
        return self.diverged or at_target or self.done == self.trial.num_steps

    def extend(self, losses: np.ndarray, distances: np.ndarray) -> None:
        """Add steps; those behind the first loss that is not finite do not count.

        Args:
          losses: training losses of the steps after `done`, [steps] fp32.
          distances: ||w_t - w_0|| after each of them, [steps] fp32.
        """
        broken = np.flatnonzero(~np.isfinite(losses))
        if len(broken):
            losses, distances = losses[: broken[0] + 1], distances[: broken[0] + 1]
            self.divergence_step = self.done + len(losses)
        self.losses.append(losses)
        self.distances.append(distances)
        self.done += len(losses)

    def evaluated(self, scores: Mapping[str, float]) -> None:
        """Add an evaluation on validation after `done` steps, and see whether it reached the target.

        Args:
          scores: metric -> mean over the split, the one of the target among them; without "eval/" in the names.
        """
        self.evaluations.append((self.done, dict(scores)))
        name, target = (
            self.cell.train.target_metric.removeprefix("eval/"),
            self.cell.train.target_value,
        )
        reached = (
            scores[name] <= target
            if name.endswith(("loss", "perplexity"))
            else scores[name] >= target
        )
        if reached and self.steps_to_target is None:
            self.steps_to_target = self.done

    def probed(self, measured: Mapping[str, float]) -> None:
        """Add what was measured after `done` steps.

        Args:
          measured: name -> number, of layers as `phi_layers/PATH` and `trust_ratio/PATH`, of modules as `phi_modules/NAME`.
        """
        self.probes.append((self.done, dict(measured)))

    def row(self, scores: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
        """Return the line of the finished trial.

        Args:
          scores: split -> metric -> mean over the split; without "test" unless it is a final trial.

        Returns:
          JSON data; null is a number that is not finite, or that was not measured, and every score of a split whose loss is not
          finite. Accuracies are in [0, 1]. `diverged` is also true if the validation loss at the end is not finite;
          `divergence_step` is null if every training loss was finite. `steps_to_target` and `examples_to_target` come with a
          target, null if it was not reached. Final trials have `outputs` (classes or tokens that are told apart) and `curve` too, at log-spaced steps of the planned length and at the
          last one that was run, and, if they were measured, `diffusion`, `evaluations`, `probes` and `noise_scale` (in examples,
          the median over the probed steps).
        """
        arm, trial, cell = self.cell.arm, self.trial, self.cell
        losses, distances = np.concatenate(self.losses), np.concatenate(self.distances)
        last_epoch = losses[-min(len(losses), cell.units.steps(1)) :]
        diverged = self.diverged or not math.isfinite(scores["validation"]["loss"])
        target = self.steps_to_target
        return {
            "study": self.config.name,
            "arm": arm.name,
            "optimizer": arm.optimizer.name,
            "scaling_rule": arm.schedule.scaling_rule,
            "warmup_rule": arm.schedule.warmup_rule,
            "global_batch_size": cell.global_batch_size,
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
            "examples_seen": cell.units.examples(self.done),
            **_scored(scores),
            "last_epoch_loss": finite_or_none(float(np.mean(last_epoch))),
            "diverged": diverged,
            "divergence_step": self.divergence_step,
            **(
                {"steps_to_target": target, "examples_to_target": _examples(cell, target)}
                if cell.train.target_metric
                else {}
            ),
            "distance": finite_or_none(float(distances[-1]))
            if self.config.measure.distance
            else None,
            **(self._measured(losses, distances) if trial.phase == FINAL else {}),
            "seconds": round(self.seconds, 4),
        }

    def _measured(self, losses: np.ndarray, distances: np.ndarray) -> dict[str, Any]:
        """Return what only final trials are measured for."""
        found: dict[str, Any] = {"outputs": self.cell.problem.outputs}
        steps = _curve_steps(self.trial.num_steps, len(losses))
        at = np.asarray(steps) - 1
        found["curve"] = {"step": list(steps), "train_loss": _numbers(losses[at])}
        if self.config.measure.distance:
            found["curve"]["distance"] = _numbers(distances[at])
            every, warmed_up = (
                range(1, len(distances) + 1),
                math.ceil(self.cell.warmup_steps(self.trial)),
            )
            fit = _fits.fit_diffusion(every, distances.tolist(), from_step=max(1, warmed_up))
            found["diffusion"] = None if fit is None else dataclasses.asdict(fit)
        if self.evaluations:
            found["evaluations"] = _columns(
                self.evaluations, {"loss": "validation_loss", "accuracy": "validation_accuracy"}
            )
        if self.probes:
            found |= _probes(self.probes)
        return found


def _curve_steps(planned: int, run: int) -> list[int]:
    """Return the steps that a curve keeps: of runs of one planned length the same ones, as far as each of them went.

    >>> _curve_steps(3, 3), _curve_steps(1000, 20)[-3:]
    ([1, 2, 3], [17, 19, 20])
    """
    return [step for step in _fits.log_spaced_steps(planned, _CURVE_POINTS) if step < run] + [run]


def _evaluated_at(every_steps: float, num_steps: int) -> list[int]:
    """Return the steps after which `lbopt train` evaluates: the first behind each multiple, and the last of all.

    >>> _evaluated_at(2.5, 9)
    [3, 5, 8, 9]
    """
    steps = range(1, num_steps + 1)
    return [
        step
        for step in steps
        if step == num_steps or step // every_steps > (step - 1) // every_steps
    ]


def _scored(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float | None]:
    """Return the scores by split and name; those of the test only if it was looked at.

    Where the loss is not finite nothing else is a score: the accuracy of outputs that are not numbers is that of the class
    which happens to come first.
    """
    row: dict[str, float | None] = {}
    for split in ("train", "validation", "test"):
        usable = split in scores and math.isfinite(scores[split]["loss"])
        for name in ("loss", "accuracy", "perplexity"):
            if name in scores["validation"]:
                row[f"{split}_{name}"] = finite_or_none(scores[split][name]) if usable else None
    return row


def _examples(cell: Cell, steps: int | None) -> int | None:
    return None if steps is None else cell.units.examples(steps)


def _rounded(value: float) -> float:
    """Return a whole number as one."""
    return int(value) if value == int(value) else value


def _numbers(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """Return numbers for JSON, to the seven digits that fp32 has."""
    return [finite_or_none(float(f"{value:.7g}")) for value in values]


def _columns(
    found: Sequence[tuple[int, Mapping[str, float]]], names: Mapping[str, str]
) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {"step": [step for step, _ in found]}
    for name, column in names.items():
        columns[column] = _numbers([values[name] for _, values in found])
    return columns


def _probes(found: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, Any]:
    """Return measurements by name, those of layers in groups, and the noise scale of this one run, null where it is infinite."""
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
