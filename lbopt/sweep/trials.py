"""What has to be run: cells of (arm, batch size), and the trials in each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from lbopt.config.sweep import Arm, SweepConfig
from lbopt.errors import require
from lbopt.recipes import schedule as schedules
from lbopt.recipes.problem import check_batch
from lbopt.replicas import Replicas

SEARCH, FINAL = "search", "final"


@dataclasses.dataclass(frozen=True)
class Trial:
    """One training run: the arguments of a cell's compiled program.

    Attributes:
      phase: "search" (chooses the learning rate on validation) or "final" (is tested).
      learning_rate: the peak.
      learning_rate_factor: the peak divided by the arm's scaled rate.
      seed: of initialisation and shuffle.
    """

    phase: str
    learning_rate: float
    learning_rate_factor: float
    seed: int


@dataclasses.dataclass(frozen=True)
class Cell:
    """An arm at a batch size; all its trials share one compiled program.

    Attributes:
      arm: optimizer and rules.
      global_batch_size: examples per step.
      resolved: scaled learning rate, warmup and length.
    """

    arm: Arm
    global_batch_size: int
    resolved: schedules.Resolved

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.arm.name} at batch {self.global_batch_size}"

    def search_trials(self, config: SweepConfig) -> list[Trial]:
        """Every learning rate with every search seed."""
        return [
            self._trial(SEARCH, factor, seed) for factor in config.learning_rate_factors for seed in config.search_seeds
        ]

    def final_trials(self, config: SweepConfig, factor: float) -> list[Trial]:
        """The chosen learning rate with every final seed."""
        return [self._trial(FINAL, factor, seed) for seed in config.final_seeds]

    def _trial(self, phase: str, factor: float, seed: int) -> Trial:
        return Trial(phase, self.resolved.learning_rate * factor, factor, seed)


def make_cells(config: SweepConfig, num_examples: int) -> list[Cell]:
    """Lay the study out.

    Raises:
      UserError: if a batch is larger than the training set, or a warmup longer than training.
    """
    largest = config.global_batch_sizes[-1]
    require(
        largest <= num_examples,
        "config.global_batch_sizes",
        config.global_batch_sizes,
        f"the training set has {num_examples} examples; use at most that",
    )
    for size in config.global_batch_sizes:
        microsteps = config.train.parallel.num_microsteps
        require(
            size % microsteps == 0,
            "config.train.parallel.num_microsteps",
            microsteps,
            f"it does not divide batch {size}",
        )
        check_batch(config.train.model, Replicas(), size // microsteps)
    order_bytes = 4 * config.trials_per_program * num_examples * config.train.num_epochs
    require(
        order_bytes < 2**31,
        "config.train.num_epochs",
        config.train.num_epochs,
        f"the example order of {config.trials_per_program} trials needs {order_bytes / 2**30:.0f} GiB; lower it, or trials_per_program",
    )
    return [
        Cell(
            arm,
            size,
            schedules.resolve(
                arm.schedule, size, num_examples, config.train.num_epochs, f"config.arms[{index}].schedule"
            ),
        )
        for index, arm in enumerate(config.arms)
        for size in config.global_batch_sizes
    ]


def key(row: Mapping[str, Any]) -> tuple:
    """Return what identifies a finished trial in `results.jsonl`."""
    return row["arm"], row["global_batch_size"], row["phase"], row["learning_rate_factor"], row["seed"]


def trial_key(cell: Cell, trial: Trial) -> tuple:
    """Return the key a trial's row will have."""
    return cell.arm.name, cell.global_batch_size, trial.phase, trial.learning_rate_factor, trial.seed


def choose_factor(rows: Iterable[Mapping[str, Any]]) -> float:
    """Return the learning-rate factor with the best mean validation accuracy over the search seeds.

    Diverged trials count with accuracy 0. Ties go to the lower mean validation loss, then to the smaller rate. Language
    models are chosen by validation loss alone, the logarithm of their perplexity. Only validation numbers of search trials
    are looked at.
    """
    scores: dict[float, list[tuple[float, float]]] = {}
    for row in rows:
        if row["phase"] == SEARCH:
            accuracy = 0.0 if "validation_perplexity" in row else row["validation_accuracy"]
            score = (0.0, float("inf")) if row["diverged"] else (accuracy, row["validation_loss"])
            scores.setdefault(row["learning_rate_factor"], []).append(score)

    def rank(factor: float) -> tuple[float, float, float]:
        accuracies, losses = zip(*scores[factor], strict=True)
        return -sum(accuracies) / len(accuracies), sum(losses) / len(losses), factor

    return min(scores, key=rank)
