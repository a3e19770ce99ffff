"""A training run as objects that the training loop needs, without a config."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from lbopt import types
from lbopt.data import DAMAGED, Dataset, Splits, TrainBatches
from lbopt.data.text import NO_VOCABULARY, Vocabulary
from lbopt.errors import EnvironmentProblem, UserError, require_choice
from lbopt.evaluation import Evaluation
from lbopt.parallel import Step, TrainState, put_replicated, with_shardings
from lbopt.train._ranking import lower_is_better
from lbopt.transforms import (
    LearningRateState,
    MomentDecays,
    evaluated_params,
    find_states,
    reweigh_moments,
)


@dataclasses.dataclass(frozen=True)
class Cadence:
    """Optimizer steps between two logs, evaluations and checkpoints, from the start of a phase.

    Each of these also happens at the end of the phase. A number may be a fraction: with 2.5, the
    steps are 3, 5, 8, 10 and so on, the first ones at or after each multiple.

    Attributes:
      log_every_steps: Steps between two logs.
      eval_every_steps: Steps between two evaluations.
      checkpoint_every_steps: Steps between two checkpoints.
      eval_every_examples: Examples between two evaluations, instead of `eval_every_steps`, for a
        run whose batch changes; None for those steps.
    """

    log_every_steps: float
    eval_every_steps: float
    checkpoint_every_steps: float
    eval_every_examples: float | None = None


_ROUNDOFF = 1e-12
"""Relative error allowed in a multiple: decimal fractions of an epoch are not exact."""


def count_multiples(number: float, every: float) -> int:
    """Return the number of positive multiples of a number up to another, by roundoff above it too.

    Args:
      number: The other number.
      every: The number.

    >>> count_multiples(512, 0.1 * 1024), 512 // (0.1 * 1024)
    (5, 4.0)
    """
    return math.floor(number * (1 + _ROUNDOFF) / every)


def is_due(step: int, every_steps: float) -> bool:
    """Return whether a step, counted from 1, is the first at or after a multiple of a number.

    >>> [step for step in range(1, 10) if is_due(step, 2.5)]
    [3, 5, 8]
    """
    return count_multiples(step, every_steps) > count_multiples(step - 1, every_steps)


@dataclasses.dataclass(frozen=True)
class Target:
    """The value of a metric that a run is to reach.

    Attributes:
      metric: Name of a metric of the evaluation, for instance "eval/accuracy".
      value: Smallest value that reaches the target; the largest one where lower is better, see
        `lower_is_better`.
      stop: Whether the run ends when it reaches the target.
    """

    metric: str
    value: float
    stop: bool = False

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the metrics of an evaluation reach the target.

        Raises:
          UserError: If the evaluation has no such metric.
        """
        require_choice("target_metric", self.metric, metrics)
        if lower_is_better(self.metric):
            return metrics[self.metric] <= self.value
        return metrics[self.metric] >= self.value


class InitialValues(Protocol):
    """Parameters and model state of an earlier run, or of another program, to start from."""

    def check(self, shapes: TrainState, vocabulary: Vocabulary) -> None:
        """Raise `UserError` unless the values fit a state of these shapes, and the text."""

    def read(self, shapes: TrainState) -> tuple[types.Params, types.ModelState]:
        """Return parameters and model state, with None for leaves that start fresh."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run, or one phase of it; `recipes.build_run` makes it from a config.

    A run of several phases is the first one, which knows the next. "Step" means a step of the
    whole run: those of a phase begin at `first_step`.

    Attributes:
      make_state: Function that returns the state before the first update, not laid out over the
        devices. It takes the result of `InitialValues.read`, or nothing.
      tx: The optimizer.
      train_step: The compiled training step, from `make_train_step`.
      batches: This process's share of the global batch of every step.
      splits: The training, validation and test sets.
      evaluation: The compiled evaluation.
      eval_global_batch_size: Number of examples in a step of the evaluation.
      cadence: Steps between two logs, evaluations and checkpoints.
      steps_per_epoch: Optimizer steps in an epoch, not rounded.
      keep_checkpoints: Number of the latest checkpoints to keep.
      best_metric: Name of the evaluation metric that says which checkpoint is best.
      evaluates_average: Whether the evaluation takes the moving average of the parameters, which
        the optimizer then keeps.
      initial: The values to start from; None for fresh ones.
      vocabulary: The vocabulary of text, which the workdir keeps.
      target: The target of the run; None for none.
      mllog: Keys and values at the beginning of MLPerf's log; None for no such log.
      stop_at_nan: Whether the run ends if a logged loss, or a network to be saved, is not finite.
      first_step: Number of steps in earlier phases.
      resets_optimizer: Whether the phase begins with a fresh state of the optimizer.
      continues: Whether the phase is only another batch size: its learning rate, its cadence and
        the ranking of its checkpoints go on from those of the phase before.
      growth: The batch sizes among which the run chooses as it goes; None if its phases are known.
      reweighing: Program that suits the moments to the decays of this phase; None if they stay.
      next_phase: The next phase; None if this is the last one.
    """

    make_state: Callable[..., TrainState]
    tx: optax.GradientTransformation
    train_step: Step
    batches: TrainBatches
    splits: Splits
    evaluation: Evaluation
    eval_global_batch_size: int
    cadence: Cadence
    steps_per_epoch: float
    keep_checkpoints: int
    best_metric: str
    evaluates_average: bool = False
    initial: InitialValues | None = None
    vocabulary: Vocabulary = NO_VOCABULARY
    target: Target | None = None
    mllog: Mapping[str, Any] | None = None
    stop_at_nan: bool = False
    first_step: int = 0
    resets_optimizer: bool = False
    continues: bool = False
    reweighing: Reweighing | None = None
    growth: NoiseGrowth | None = None
    next_phase: Run | None = None

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.train_step.mesh

    @property
    def global_batch_size(self) -> int:
        """Number of examples in a step of this phase."""
        return self.batches.global_batch_size

    @property
    def num_steps(self) -> int:
        """Number of steps in this phase."""
        return len(self.batches)

    @property
    def is_first(self) -> bool:
        """Whether no phase of another cadence comes before this one."""
        return self.first_step == 0 or self.continues

    @property
    def is_end(self) -> bool:
        """Whether the phase ends with a log, an evaluation and a checkpoint."""
        return self.next_phase is None or not self.next_phase.continues

    @property
    def counts_from(self) -> int:
        """Number of steps before the first one that the cadence counts."""
        return 0 if self.continues else self.first_step

    @property
    def last_step(self) -> int:
        """The step at which this phase ends."""
        return self.first_step + self.num_steps

    def examples_seen(self, step: int) -> int:
        """Return the number of examples in the run up to a step of this phase."""
        return self.batches.first_example + (step - self.first_step) * self.global_batch_size

    def epoch_at(self, step: int) -> float:
        """Return the epochs of this phase, and of those after it, up to a step."""
        here = max(0, min(step, self.last_step) - self.first_step) / self.steps_per_epoch
        return here + (self.next_phase.epoch_at(step) if self.next_phase else 0.0)

    def phases(self) -> list[Run]:
        """Return this phase and those after it."""
        return [self, *(self.next_phase.phases() if self.next_phase else [])]

    def phase_at(self, step: int) -> Run:
        """Return the phase whose state the checkpoint of a step holds."""
        phases = self.phases()
        return next((phase for phase in phases if step <= phase.last_step), phases[-1])

    def examples_left(self, step: int) -> int:
        """Return the number of examples from a step to the end of its phase.

        Phases that differ in the batch alone count as one.
        """
        here = self.phase_at(step)
        end = here
        while end.next_phase is not None and end.next_phase.continues:
            end = end.next_phase
        return end.examples_seen(end.last_step) - here.examples_seen(step)

    def shapes(self) -> TrainState:
        """Return the shapes, dtypes and shardings of the state."""
        return self._shapes

    @functools.cached_property
    def _shapes(self) -> TrainState:
        bare = jax.eval_shape(self._make_complete_state)
        return with_shardings(bare, self.train_step.state_sharding(bare))

    def _make_complete_state(self, *initial: Any) -> TrainState:
        """Return the state before the first update, with the state of an aggregator."""
        return self.train_step.with_aggregator_state(self.make_state(*initial))

    def init(self) -> TrainState:
        """Return the state before the first update, laid out over the devices."""
        shardings = jax.tree.map(lambda x: x.sharding, self.shapes())
        make = jax.jit(self._make_complete_state, out_shardings=shardings)
        return make() if self.initial is None else make(self.initial.read(self.shapes()))

    def enter(self, state: TrainState) -> TrainState:
        """Return the first state of this phase from the last one of the phase before it.

        The learning rate's schedule starts again. The rest of the optimizer's state is kept, with
        moments that suit the decays of this phase, or is fresh if `resets_optimizer`. If the phase
        `continues`, the moments are suited by a program that `compile` has made.

        The arrays of the given state must not be used again.
        """
        if self.continues:
            opt_state = state.opt_state
            if self.reweighing is not None:
                opt_state = self.reweighing.of(self.shapes())(opt_state)
            # The rate of a batch that doubles as it goes counts steps of the present batch.
            count = self.first_step
            if self.growth is not None:
                count = self.batches.first_example // self.global_batch_size
            return state.replace(opt_state=_with_schedule_count(opt_state, count))

        def entered(state: TrainState) -> TrainState:
            if self.resets_optimizer:
                state = state.replace(opt_state=self.tx.init(state.params))
                return self.train_step.with_aggregator_state(state)
            decays = None if self.reweighing is None else self.reweighing.decays
            opt_state = reweigh_moments(state.opt_state, decays)
            return state.replace(opt_state=_with_schedule_count(opt_state, 0))

        return jax.jit(entered, out_shardings=self.train_step.state_sharding(state))(state)

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Return the metrics of a state on the validation set."""
        return self._evaluate_on(self.splits.validation, state)

    def evaluate_test(self, state: TrainState) -> dict[str, float]:
        """Return the metrics of a state on the test set."""
        return self._evaluate_on(self.splits.test, state)

    def _evaluate_on(self, dataset: Dataset, state: TrainState) -> dict[str, float]:
        if self.evaluates_average:
            average = evaluated_params(state.opt_state, state.params)
            state = state.replace(params=put_replicated(self.mesh, average))
        return self.evaluation(state, dataset, self.eval_global_batch_size)

    def lower(self) -> Any:
        """Trace and lower the training step for this run's shapes; nothing is compiled or run.

        Raises:
          UserError: If the model, for instance its groups of batch norm, does not fit the batch or
            the devices.
        """
        example = self.batches.slice(0, 0, 1)
        example.pop(DAMAGED, None)

        def of_batch(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.global_batch_size, *x.shape[1:]), x.dtype)

        return self.train_step.lower(self.shapes(), jax.tree.map(of_batch, example))

    def compile(self) -> None:
        """Compile the training step, and what `enter` needs, before they are called."""
        self.lower().compile()
        if self.reweighing is not None and self.continues:
            self.reweighing.of(self.shapes())

    def lower_evaluation(self) -> Any:
        """Trace and lower the step of the evaluation on the validation set; nothing is compiled."""
        validation = self.splits.validation
        return self.evaluation.lower(self.shapes(), validation, self.eval_global_batch_size)

    def check_initial(self) -> None:
        """Raise `UserError` if the values to start from do not fit the model or the text."""
        if self.initial is not None:
            self.initial.check(self.shapes(), self.vocabulary)

    def check_memory(self) -> None:
        """Raise `UserError` if the state is larger than the memory of the devices.

        On a CPU, XLA would wait without end. Memory that a step needs beside the state is not
        counted.
        """
        devices = self.mesh.local_devices
        leaves = jax.tree.leaves(self.shapes())
        sizes = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves]
        needed = sum(sizes)
        limit = (devices[0].memory_stats() or {}).get("bytes_limit")

        # CPU devices share the host's memory.
        if devices[0].platform == "cpu":
            needed = needed * len(devices)
            limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

        if limit is not None and needed > limit:
            raise UserError(
                "model",
                reason=f"parameters and optimizer state take {needed / 1e9:,.0f} GB, the memory "
                f"has {limit / 1e9:,.0f} GB; use a smaller model, or more devices with "
                "{shard_update}",
                code="resource",
                also=["shard_update"],
            )

    def damaged_counts(self) -> dict[str, float]:
        """Return for the log how many damaged records were skipped, where that can happen."""
        counts = {
            "train": getattr(self.splits.train, "damaged", None),
            "validation": getattr(self.splits.validation, "damaged", None),
        }
        return {
            f"data/damaged_{name}_records": float(len(count))
            for name, count in counts.items()
            if count is not None
        }


class Reweighing:
    """`reweigh_moments` as one compiled program, which can be made before it is needed.

    Args:
      decays: The decays of the optimizer's moments, before and after.
    """

    def __init__(self, decays: MomentDecays):
        self.decays = decays
        self._compiled: Any = None

    def of(self, shapes: TrainState) -> Any:
        """Return the compiled function of an optimizer's state; it takes the state's arrays.

        Args:
          shapes: Shapes and shardings of the training state.
        """
        if self._compiled is None:
            shardings = jax.tree.map(lambda x: x.sharding, shapes.opt_state)
            reweigh = functools.partial(reweigh_moments, decays=self.decays)
            jitted = jax.jit(reweigh, out_shardings=shardings, donate_argnums=0)
            self._compiled = jitted.lower(shapes.opt_state).compile()
        return self._compiled


def _with_schedule_count(opt_state: Any, count: int) -> Any:
    """Return an optimizer's state whose learning-rate schedules are at a step."""

    def is_rate(node: Any) -> bool:
        return getattr(node, "schedule_count", None) is not None

    def moved(node: Any) -> Any:
        if not is_rate(node):
            return node
        old = node.schedule_count
        if isinstance(old, jax.core.Tracer):
            return node._replace(schedule_count=jnp.full_like(old, count))
        return node._replace(schedule_count=_in_place_of(old, np.full(old.shape, count)))

    return jax.tree.map(moved, opt_state, is_leaf=is_rate)


def _in_place_of(old: jax.Array, value: np.ndarray) -> jax.Array:
    """Return host values laid out as an array is, without a compiled program."""
    new = np.asarray(value, old.dtype)
    return jax.make_array_from_callback(old.shape, old.sharding, lambda index: new[index])


def linked(phases: Sequence[Run]) -> Run:
    """Return the first of some phases, each of which knows the next.

    Args:
      phases: At least one phase, in order.
    """
    whole = phases[-1]
    for phase in reversed(phases[:-1]):
        whole = dataclasses.replace(phase, next_phase=whole)
    return whole


@dataclasses.dataclass(frozen=True)
class NoiseGrowth:
    """A batch that doubles where the run's own gradient noise scale is large enough.

    Whether it does is decided at equal distances in examples. The state that decides is the same
    in every process and after a restart, and so is the decision.

    Attributes:
      candidates: A run for each batch size, each twice the one before. Its learning rate is a
        function of the steps that the examples so far would take at its batch size.
      every_examples: Examples between two decisions, a multiple of every batch size.
      factor: Smallest noise scale for a batch, as a multiple of that batch.
      num_examples: Length of the run in examples.
    """

    candidates: tuple[Run, ...]
    every_examples: int
    factor: float
    num_examples: float

    def chain(self, doubled_at: Sequence[int]) -> Run:
        """Return the run with the phases so far, the last of which goes to the end.

        Args:
          doubled_at: Steps after which the batch was doubled.
        """
        phases: list[Run] = []
        step = 0
        example = 0
        for candidate, end in zip(self.candidates, (*doubled_at, None), strict=False):
            size = candidate.global_batch_size
            left = math.ceil((self.num_examples - example) / size - 3e-9)
            count = left if end is None else end - step
            phase = dataclasses.replace(
                candidate,
                batches=candidate.batches.moved(example, count),
                first_step=step,
                growth=self,
            )
            phases.append(phase)
            step += count
            example += count * size

        return linked(phases)

    def after(self, phase: Run) -> Run | None:
        """Return the run of the batch size after that of a phase; None for the last one."""
        sizes = [candidate.global_batch_size for candidate in self.candidates]
        place = sizes.index(phase.global_batch_size) + 1
        return self.candidates[place] if place < len(sizes) else None

    def check(self, state: TrainState, phase: Run) -> None:
        """Raise `EnvironmentProblem` if a state does not belong to a phase.

        The batch sizes so far stand in the log. Without its lines the state would be trained on
        other examples than it was.

        Args:
          state: A state that was saved in the phase.
          phase: The phase, from `chain`.
        """
        step = int(state.step)
        expected = phase.examples_seen(step) // phase.global_batch_size
        for rate in find_states(state.opt_state, [LearningRateState]):
            count = int(np.asarray(jax.device_get(rate.schedule_count)))
            fix = (
                f"its lines say that batch {phase.global_batch_size} has seen {expected} steps' "
                f"examples at step {step}, and the checkpoint says {count}; restore the file"
            )
            if count != expected:
                raise EnvironmentProblem("metrics.jsonl", reason=fix, code="mismatch")

    def decides(self, phase: Run, step: int) -> bool:
        """Return whether it is decided after a step of a phase if the batch doubles."""
        at = phase.examples_seen(step) % self.every_examples == 0
        return at and step < phase.last_step and self.after(phase) is not None
