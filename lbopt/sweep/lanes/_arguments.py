"""What differs between trials that share a program, kept in the optimizer's state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lbopt import types
from lbopt.config import ScheduleConfig, scaled_modules
from lbopt.recipes import make_optimizer, make_schedule
from lbopt.sweep._trials import Cell, Trial


class Arguments(NamedTuple):
    """Numbers of one trial, fp32 scalars; of a batch of trials, every leaf has a leading trial axis.

    Attributes:
      learning_rate: the peak.
      warmup_steps: of a run of the whole length.
      weight_decay: of the optimizer.
      num_steps: length of the run; the schedule is rescaled to it.
    """

    learning_rate: Any
    warmup_steps: Any
    weight_decay: Any
    num_steps: Any

    @classmethod
    def of(cls, trial: Trial) -> Arguments:
        """Return those of a trial, as NumPy scalars."""
        numbers = trial.learning_rate, trial.warmup_steps, trial.weight_decay, trial.num_steps
        return cls(*map(np.float32, numbers))


class AdjustableState(NamedTuple):
    """The state of an optimizer whose numbers are arguments of the program.

    Attributes:
      arguments: of this trial.
      inner: the optimizer's own state.
    """

    arguments: Arguments
    inner: Any


def adjustable(
    make: Callable[[Arguments], optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that reads its numbers from its state.

    Args:
      make: arguments, traced -> optimizer. The shapes of its state do not depend on them.

    Returns:
      A transformation whose state is an `AdjustableState`. Its arguments are 0 after `init`: see `with_arguments`.

    Note:
      `optax.inject_hyperparams` injects into the arguments of one factory; here a schedule, a rule of warmup and a whole
      chain are made anew from four numbers.
    """

    def init_fn(params: types.Params) -> AdjustableState:
        blank = Arguments(*(jnp.zeros((), jnp.float32) for _ in Arguments._fields))
        # Traced, as in an update: zeros that are known would be checked as if somebody had asked for them.
        return AdjustableState(
            blank, jax.jit(lambda arguments: make(arguments).init(params))(blank)
        )

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


def make_tx(cell: Cell, decays: bool) -> optax.GradientTransformationExtraArgs:
    """Build the optimizer of a cell's trials.

    Args:
      cell: which.
      decays: whether there is weight decay at all: some variants adapt decayed leaves only.

    Returns:
      The optimizer, see `adjustable`; the schedule is rescaled from the cell's length to the trial's.
    """

    def make(arguments: Arguments) -> optax.GradientTransformation:
        numbers = arguments.learning_rate, arguments.warmup_steps, arguments.num_steps
        schedule = make_schedule(cell.train.schedule, cell.resolved, *numbers)
        decay = arguments.weight_decay if decays else 0.0
        stacked = cell.problem.stacked
        labels = scaled_modules(cell.train.aggregator)
        return make_optimizer(
            cell.train.optimizer, schedule, decay, cell.global_batch_size, stacked, labels
        )

    return adjustable(make)


def with_arguments(state: Any, arguments: Arguments) -> Any:
    """Return a training state whose optimizer has these numbers.

    Args:
      state: a `TrainState` of an optimizer from `make_tx`.
      arguments: with the leading axes, if any, that the state has.
    """
    return state.replace(opt_state=state.opt_state._replace(arguments=arguments))


def program_key(cell: Cell, trial: Trial) -> str:
    """Return what trials have in common that share a compiled program: all but the arguments and the seed.

    Args:
      cell: to which the trial belongs.
      trial: only whether it has weight decay matters.
    """
    train = cell.train
    optimizer = dataclasses.replace(train.optimizer, weight_decay=0.0)
    learned = train.data, train.model, train.loss, train.parallel, train.aggregator
    whole = cell.global_batch_size, cell.resolved.num_steps
    return repr((learned, optimizer, _without_rule(train.schedule), whole, trial.weight_decay > 0))


def _without_rule(schedule: ScheduleConfig) -> ScheduleConfig:
    """Leave out what only gives the peak and the warmup."""
    return dataclasses.replace(
        schedule,
        base_learning_rate=0.0,
        base_batch_size=1,
        scaling_rule="none",
        warmup_rule="none",
        base_warmup_epochs=0.0,
        warmup_steps=None,
    )
