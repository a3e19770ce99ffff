"""Everything the training loop needs, as objects: the loop knows no config and no names."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from lbopt.data import DAMAGED, Dataset, TrainBatches
from lbopt.data.text import NO_VOCABULARY, Vocabulary
from lbopt.errors import UserError, require_choice
from lbopt.parallel import Step, TrainState


@dataclasses.dataclass(frozen=True)
class Cadence:
    """How often things happen, in optimizer steps, counted from the start of a phase. Each also happens at its end.

    A number need not be whole: so often on average, at the first step behind each multiple.
    """

    log_every_steps: float
    eval_every_steps: float
    checkpoint_every_steps: float


@dataclasses.dataclass(frozen=True)
class Target:
    """What a run is to reach.

    Attributes:
      metric: of the evaluation, "eval/accuracy" for instance.
      value: at least so much, or at most if the metric's name ends in "loss" or "perplexity".
      stop: end the run there.
    """

    metric: str
    value: float
    stop: bool = False

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Return whether an evaluation reaches it.

        Raises:
          UserError: if the evaluation has no such metric.
        """
        require_choice("config.target_metric", self.metric, metrics)
        lower = self.metric.endswith(("loss", "perplexity"))
        return metrics[self.metric] <= self.value if lower else metrics[self.metric] >= self.value


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run before it starts, or a phase of one.

    Attributes:
      mesh: the devices.
      shapes: () -> shapes, dtypes and shardings of the state.
      init: () -> the state before the first update, laid out so.
      train_step: from `make_train_step`.
      batches: this process's part of every step's global batch.
      evaluate: state -> metrics on the validation split.
      evaluate_test: state -> metrics on the test split.
      lower_evaluation: () -> the lowered step of the evaluation on the validation split.
      validation: that split.
      global_batch_size: examples per step.
      num_steps: length of the run or phase.
      cadence: how often to log, evaluate and save.
      keep_checkpoints: how many of the latest to keep.
      best_metric: which evaluation metric says which checkpoint is best.
      first_step: how many steps the phases before it have.
      first_example: how many examples they see.
      check_start: raises `UserError` if what the run is to start from does not fit.
      vocabulary: of text, kept in the workdir.
      enter: the last state of the phase before -> this one's first state.
      damaged: () -> what is to be logged of records that were left out.
      target: what is to be reached; None for nothing.
      mllog: what MLPerf's log says at the beginning; None for no such log.
      stop_at_nan: end the run where a logged loss, or a network that is to be saved, is not finite.
      steps_per_epoch: optimizer steps of an epoch, not rounded.
      then: the next phase; None if this is the last.
    """

    mesh: Mesh
    shapes: Callable[[], TrainState]
    init: Callable[[], TrainState]
    train_step: Step
    batches: TrainBatches
    evaluate: Callable[[TrainState], dict[str, float]]
    evaluate_test: Callable[[TrainState], dict[str, float]]
    lower_evaluation: Callable[[], Any]
    validation: Dataset
    global_batch_size: int
    num_steps: int
    cadence: Cadence
    keep_checkpoints: int
    best_metric: str
    first_step: int = 0
    first_example: int = 0
    check_start: Callable[[], None] = lambda: None
    vocabulary: Vocabulary = NO_VOCABULARY
    enter: Callable[[TrainState], TrainState] | None = None
    damaged: Callable[[], dict[str, float]] = dict
    target: Target | None = None
    mllog: Mapping[str, Any] | None = None
    stop_at_nan: bool = False
    steps_per_epoch: float = 1.0
    then: Run | None = None

    @property
    def last_step(self) -> int:
        """The step of the whole run at which this phase ends."""
        return self.first_step + self.num_steps

    def examples_seen(self, step: int) -> int:
        """Return how many examples have been seen after a step of the whole run that is one of this phase."""
        return self.first_example + (step - self.first_step) * self.global_batch_size

    def epoch_at(self, step: int) -> float:
        """Return the epochs that have passed, in this phase and those after it, at a step of the whole run."""
        here = max(0, min(step, self.last_step) - self.first_step) / self.steps_per_epoch
        return here + (self.then.epoch_at(step) if self.then else 0.0)

    def phases(self) -> list[Run]:
        """Return this phase and those after it."""
        return [self, *(self.then.phases() if self.then else [])]

    def phase_at(self, step: int) -> Run:
        """Return the phase whose state a checkpoint of this step of the whole run holds."""
        return next(
            (phase for phase in self.phases() if step <= phase.last_step), self.phases()[-1]
        )

    def lower(self) -> Any:
        """Trace and lower the training step for this run's shapes; nothing is compiled or run.

        Raises:
          UserError: if the model, for instance its batch-norm groups, does not fit the batch or the devices.
        """
        one = self.batches.piece(0, 0, 1)
        one.pop(DAMAGED, None)
        shape = lambda x: jax.ShapeDtypeStruct((self.global_batch_size, *x.shape[1:]), x.dtype)  # noqa: E731
        return self.train_step.lower(self.shapes(), jax.tree.map(shape, one))

    def check_memory(self) -> None:
        """Raise `UserError` if the state of training is larger than the memory here: on a CPU, XLA would wait without end.

        What a step needs beside it is not counted.
        """
        shapes, devices = jax.tree.leaves(self.shapes()), self.mesh.local_devices
        each = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in shapes)
        needed, there = each, (devices[0].memory_stats() or {}).get("bytes_limit")
        if devices[0].platform == "cpu":  # all of them share the host's
            needed, there = (
                each * len(devices),
                os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            )
        if there is not None and needed > there:
            raise UserError(
                f"config.model: parameters and optimizer state take {needed / 1e9:,.0f} GB, the memory has {there / 1e9:,.0f} GB; "
                "use a smaller model, or more devices with config.parallel.shard_update"
            )
