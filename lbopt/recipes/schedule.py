"""The numbers a schedule rule gives at one batch size."""

from __future__ import annotations

import dataclasses

import jax
import optax

from lbopt.config.train import LARGEST, ScheduleConfig
from lbopt.errors import UserError
from lbopt.schedules import scaling, units, warmup


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A rule worked out for one batch size.

    Attributes:
      learning_rate: the peak.
      warmup_steps: optimizer steps of warmup.
      num_steps: optimizer steps of the whole run.
    """

    learning_rate: float
    warmup_steps: int
    num_steps: int


def resolve(
    config: ScheduleConfig, global_batch_size: int, num_examples: int, num_epochs: float, field: str = "config.schedule"
) -> Resolved:
    """Work out learning rate, warmup and length.

    Raises:
      UserError: if the warmup does not end before training does.
    """
    here = units.Units(num_examples, global_batch_size)
    rate = scaling.scale_learning_rate(
        config.base_learning_rate,
        config.base_batch_size,
        global_batch_size,
        config.scaling_rule,  # type: ignore[arg-type]
    )
    if not rate < LARGEST:
        raise UserError(
            f"{field}.base_learning_rate = {config.base_learning_rate!r}: scaled to batch {global_batch_size} it is {rate!r}; use a smaller one"
        )
    warmup_steps = {
        "legw": units.Units(num_examples, config.base_batch_size).warmup_steps(config.base_warmup_epochs),
        "epochs": here.warmup_steps(config.base_warmup_epochs),
        "none": 0,
    }[config.warmup_rule]
    num_steps = here.steps(num_epochs)
    if num_steps >= LARGEST:
        raise UserError(f"config.num_epochs = {num_epochs!r}: that is {num_steps} steps; train for fewer than 2^31")
    if warmup_steps >= num_steps:
        raise UserError(
            f"{field}.base_warmup_epochs = {config.base_warmup_epochs!r}: {warmup_steps} warmup steps (rule {config.warmup_rule!r}) do not end before the "
            f"{num_steps} steps of training at batch {global_batch_size}; warm up for less, or raise num_epochs"
        )
    return Resolved(rate, warmup_steps, num_steps)


def make_schedule(
    config: ScheduleConfig, learning_rate: float | jax.Array, warmup_steps: int | jax.Array, num_steps: int
) -> optax.Schedule:
    """Build the schedule; rate and warmup may be traced."""
    return warmup.warmup_schedule(
        learning_rate, warmup_steps, num_steps, config.decay, config.power, config.end_factor, config.first_step
    )
