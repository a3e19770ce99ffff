"""The numbers in which trials of one program differ, kept in the optimizer's state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lbopt import types
from lbopt.config import (
    ScheduleConfig,
    make_optimizer,
    make_schedule,
    optimizer_numbers,
    scaled_modules,
    with_optimizer_numbers,
)
from lbopt.schedules import phase_schedule
from lbopt.sweep._trials import Cell, GrowthPhase, Trial


class Arguments(NamedTuple):
    """Numbers of one trial, fp32 scalars; for a batch of trials, fp32 [lanes].

    Attributes:
      learning_rate: Peak learning rate.
      warmup_steps: Steps of warmup in a run of the full length.
      weight_decay: Weight decay of the optimizer.
      num_steps: Length of the run, to which the schedule is rescaled.
      optimizer: Other numbers of the optimizer by name.
    """

    learning_rate: Any
    warmup_steps: Any
    weight_decay: Any
    num_steps: Any
    optimizer: dict[str, Any]

    @classmethod
    def of(cls, trial: Trial) -> Arguments:
        """Return the numbers of a trial, as NumPy scalars."""
        numbers = trial.learning_rate, trial.warmup_steps, trial.weight_decay, trial.num_steps
        arguments = cls(*numbers, dict(trial.optimizer_numbers))
        return jax.tree.map(np.float32, arguments)

    @classmethod
    def blank(cls, cell: Cell, *lanes: int) -> Arguments:
        """Return zeros for the numbers of a cell's trials, fp32 of shape `lanes`."""
        zero = np.zeros(lanes, np.float32)
        names = optimizer_numbers(cell.train.optimizer)
        return cls(zero, zero, zero, zero, dict.fromkeys(names, zero))


class AdjustableState(NamedTuple):
    """The state of an optimizer whose numbers are arguments of the program.

    Attributes:
      arguments: The numbers of the trial.
      inner: The optimizer's own state.
    """

    arguments: Arguments
    inner: Any


def adjustable(
    make: Callable[[Arguments], optax.GradientTransformation], blank: Arguments
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that reads its numbers from its state.

    Args:
      make: Function of traced arguments that returns the optimizer. The shapes of its state must
        not depend on them.
      blank: Arguments with zeros.

    Returns:
      A transformation whose state is an `AdjustableState`. Its arguments are 0 after `init`, until
      `with_arguments` sets them.

    Note:
      `optax.inject_hyperparams` fills the arguments of one factory; here a schedule, its warmup and
      a whole chain are built from the numbers.
    """

    def init_fn(params: types.Params) -> AdjustableState:
        # Under jit the zeros are traced; the factory would refuse constant ones.
        init = jax.jit(lambda arguments: make(arguments).init(params))
        return AdjustableState(jax.tree.map(jnp.asarray, blank), init(blank))

    def update_fn(
        updates: optax.Updates,
        state: AdjustableState,
        params: types.Params | None = None,
        **extra: Any,
    ):
        tx = optax.with_extra_args_support(make(state.arguments))
        updates, inner = tx.update(updates, state.inner, params, **extra)
        return updates, AdjustableState(state.arguments, inner)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def make_tx(
    cell: Cell, decays: bool, phase: GrowthPhase | None = None
) -> optax.GradientTransformationExtraArgs:
    """Build the optimizer of a cell's trials.

    Args:
      cell: The cell.
      decays: Whether there is weight decay at all; some variants adapt decayed leaves only.
      phase: The phase of a batch that grows; None for one batch size.

    Returns:
      An optimizer from `adjustable`, whose schedule is rescaled from the cell's length to the
      trial's.
    """

    def make(arguments: Arguments) -> optax.GradientTransformation:
        numbers = arguments.learning_rate, arguments.warmup_steps, arguments.num_steps
        schedule = make_schedule(cell.train.schedule, cell.resolved, *numbers)
        decay = arguments.weight_decay if decays else 0.0
        optimizer = with_optimizer_numbers(cell.train.optimizer, arguments.optimizer)
        return make_optimizer(optimizer, schedule, decay, cell.global_batch_size, *of_leaves)

    def make_growing(arguments: Arguments) -> optax.GradientTransformation:
        assert phase is not None
        numbers = arguments.learning_rate, arguments.warmup_steps
        whole = make_schedule(cell.train.schedule, cell.resolved, *numbers)
        first = cell.global_batch_size
        schedule = phase_schedule(whole, phase.steps, first, phase.ratios.learning_rate)
        decay = arguments.weight_decay * phase.ratios.weight_decay if decays else 0.0
        size = phase.steps.global_batch_size
        return make_optimizer(phase.train.optimizer, schedule, decay, size, *of_leaves)

    problem = cell.problem
    labels = scaled_modules(cell.train.aggregator)
    of_leaves = (problem.stacked, labels, problem.known_roles, problem.transfer)
    if phase is not None:
        return adjustable(make_growing, Arguments.blank(cell))
    return adjustable(make, Arguments.blank(cell))


def with_arguments(state: Any, arguments: Arguments) -> Any:
    """Return a training state whose optimizer has these numbers.

    Args:
      state: A `TrainState` of an optimizer from `make_tx`.
      arguments: The numbers, with the leading axes of the state, if any.
    """
    return state.replace(opt_state=state.opt_state._replace(arguments=arguments))


def program_key(cell: Cell, trial: Trial) -> str:
    """Return a text that is equal for trials that can share a compiled program.

    Such trials differ in their arguments and seeds only.

    Args:
      cell: The cell of the trial.
      trial: The trial; only whether it has weight decay matters.
    """
    train = cell.train
    blank = dict.fromkeys(trial.optimizer_numbers, 0.0)
    optimizer = with_optimizer_numbers(train.optimizer, blank)
    optimizer = dataclasses.replace(optimizer, weight_decay=0.0)
    schedule = _without_rule(train.schedule)
    problem = (train.data, train.model, train.loss, train.parallel, train.aggregator)
    size = (cell.global_batch_size, cell.resolved.num_steps)
    # Where the batch grows, the rule's numbers are constants of the programs.
    growth = (cell.arm.optimizer, cell.arm.schedule, cell.growth) if cell.growth else ()
    return repr((problem, optimizer, schedule, size, trial.weight_decay > 0, growth))


def _without_rule(schedule: ScheduleConfig) -> ScheduleConfig:
    """Return the schedule without the fields that only decide the peak and the warmup."""
    return dataclasses.replace(
        schedule,
        base_learning_rate=0.0,
        base_batch_size=1,
        scaling_rule="none",
        warmup_rule="none",
        base_warmup_epochs=0.0,
        warmup_steps=None,
    )
