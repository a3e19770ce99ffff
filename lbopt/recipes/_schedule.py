"""The numbers a schedule rule gives at one batch size."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax

from lbopt.config import LARGEST_INTEGER, MOST_STEPS, ScheduleConfig
from lbopt.errors import UserError
from lbopt.schedules import (
    Units,
    exponential_factor,
    scale_batch,
    step_factor,
    stretch_schedule,
    warmup_schedule,
)


@dataclasses.dataclass(frozen=True)
class ResolvedSchedule:
    """A rule worked out for one batch size.

    Attributes:
      learning_rate: the peak.
      warmup_steps: optimizer steps of warmup.
      num_steps: optimizer steps of the whole run.
      steps_per_epoch: optimizer steps of one epoch, not rounded.
    """

    learning_rate: float
    warmup_steps: float
    num_steps: int
    steps_per_epoch: float


def resolve_schedule(
    config: ScheduleConfig,
    global_batch_size: int,
    num_examples: int,
    num_epochs: float,
    field: str = "config.schedule",
    num_steps: int | None = None,
) -> ResolvedSchedule:
    """Work out learning rate, warmup and length.

    Args:
      config: the rule.
      global_batch_size: examples per step.
      num_examples: of the training set.
      num_epochs: length of the run.
      field: what messages call the rule.
      num_steps: length of the run, instead of `num_epochs`.

    Raises:
      UserError: if the warmup does not end before training does.
    """
    scaled = scale_batch(
        global_batch_size,
        config.base_learning_rate,
        config.base_batch_size,
        config.base_warmup_epochs,
        num_examples,
        num_epochs,
        config.scaling_rule,  # type: ignore[arg-type]
        config.warmup_rule,  # type: ignore[arg-type]
    )
    rate = scaled.learning_rate
    warmup_steps = scaled.warmup_steps if config.warmup_steps is None else config.warmup_steps
    length = (
        f"config.num_epochs = {num_epochs!r}"
        if num_steps is None
        else f"config.num_steps = {num_steps!r}"
    )
    num_steps = scaled.total_steps if num_steps is None else num_steps
    if not rate < LARGEST_INTEGER:
        raise UserError(
            f"{field}.base_learning_rate = {config.base_learning_rate!r}: scaled to batch {global_batch_size} it is {rate!r}; use a smaller one"
        )
    for name, value in (
        ("warmup_from", config.warmup_from),
        ("end_learning_rate", config.end_learning_rate),
    ):
        if value is not None and rate < value:
            raise UserError(
                f"{field}.{name} = {value!r}: the peak at batch {global_batch_size} is {rate!r}, below it; "
                "use a smaller one, or a larger base_learning_rate"
            )
    if min(warmup_steps, config.start_step + warmup_steps) <= 0 and (
        config.warmup_from != 0 or config.warmup_power != 1
    ):
        raise UserError(
            f"{_named(config, field)}: no step of warmup at batch {global_batch_size}, so warmup_from and warmup_power have no effect; "
            "warm up for longer, or leave them 0 and 1"
        )
    if num_steps >= MOST_STEPS:
        raise UserError(f"{length}: that is {num_steps} steps; train for fewer than 2^30")
    if config.start_step + warmup_steps >= num_steps:
        raise UserError(
            f"{_named(config, field)}: {warmup_steps} warmup steps do not end before the "
            f"{num_steps} steps of training at batch {global_batch_size}; warm up for less, or train for longer"
        )
    return ResolvedSchedule(
        rate, warmup_steps, num_steps, Units(num_examples, global_batch_size).exact_steps(1)
    )


def _named(config: ScheduleConfig, field: str) -> str:
    if config.warmup_steps is not None:
        return f"{field}.warmup_steps = {config.warmup_steps!r}"
    return (
        f"{field}.base_warmup_epochs = {config.base_warmup_epochs!r} (rule {config.warmup_rule!r})"
    )


def make_schedule(
    config: ScheduleConfig,
    resolved: ResolvedSchedule,
    learning_rate: float | jax.Array | None = None,
    warmup_steps: float | jax.Array | None = None,
    num_steps: int | jax.Array | None = None,
) -> optax.Schedule:
    """Build the schedule; rate and warmup may be given instead of the resolved ones, also traced.

    With `num_steps`, also traced, all of it is rescaled from the resolved length to that one.
    """
    decay = {"exponential": _stairs, "step": _steps}.get(config.decay)
    whole = warmup_schedule(
        resolved.learning_rate if learning_rate is None else learning_rate,
        resolved.warmup_steps if warmup_steps is None else warmup_steps,
        resolved.num_steps,
        config.decay if decay is None else decay(config, resolved.steps_per_epoch),
        config.power,
        config.end_factor,
        config.first_step,
        warmup_power=config.warmup_power,
        warmup_from=config.warmup_from,
        start_step=config.start_step,
        decay_from=config.decay_from,  # type: ignore[arg-type]
        decay_steps=config.decay_steps,
        end_learning_rate=config.end_learning_rate,
    )
    if num_steps is None:
        return whole
    return stretch_schedule(whole, resolved.num_steps, num_steps, config.first_step)


def _stairs(config: ScheduleConfig, steps_per_epoch: float) -> Any:
    return exponential_factor(config.decay_rate, config.stair_epochs[0] * steps_per_epoch)


def _steps(config: ScheduleConfig, steps_per_epoch: float) -> Any:
    return step_factor(
        config.decay_rate, tuple(epoch * steps_per_epoch for epoch in config.stair_epochs)
    )
