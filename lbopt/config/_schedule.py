"""The learning rate over a run, as a rule over batch sizes."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses
from typing import Any

from lbopt.config._checks import LARGEST_INTEGER, at_least
from lbopt.errors import require, require_choice

SCALING_RULES = ("linear", "none", "sqrt")
WARMUP_RULES = ("epochs", "legw", "none")
DECAYS = ("constant", "cosine", "exponential", "polynomial", "step")
DECAY_ORIGINS = ("start", "warmup_end")


@dataclasses.dataclass
class ScheduleConfig:
    """The learning rate, as a rule over batch sizes.

    Attributes:
      base_learning_rate: the peak at `base_batch_size`.
      base_batch_size: the batch the base values belong to.
      scaling_rule: "sqrt", "linear" or "none".
      warmup_rule: "legw" (base_warmup_epochs * batch / base batch epochs, so a constant number of steps), "epochs"
        (base_warmup_epochs at every batch) or "none".
      base_warmup_epochs: warmup at the base batch.
      decay: "polynomial", "cosine" or "constant", from the end of warmup to the end of the run; "exponential" or "step",
        in stairs.
      power: of the polynomial.
      end_factor: what is left of the peak at the end (polynomial, cosine).
      first_step: the number of the first update, 0 (learning rate 0 there) or 1.
      warmup_power: exponent of the ramp.
      warmup_from: the rate at the start of the ramp, whatever the batch.
      start_step: where the ramp begins, also below 0.
      decay_from: "warmup_end", or "start": the decay counts from step 0, so the rate jumps at the end of warmup.
      end_learning_rate: the rate at the end, instead of `end_factor`.
      decay_rate: factor of a stair (exponential, step).
      warmup_steps: optimizer steps of warmup, instead of what the rule gives; may be fractional (MLPerf's 18 epochs of 39.25 steps).
      decay_steps: optimizer steps of the decay, instead of those from its origin to the end of the run.
      stair_epochs: exponential: one number, the epochs between two stairs; step: the epochs at which stairs are;
        those past the end of the run are not reached.
    """

    base_learning_rate: float = 0.01
    base_batch_size: int = 64
    scaling_rule: str = "sqrt"
    warmup_rule: str = "legw"
    base_warmup_epochs: float = 0.5
    decay: str = "polynomial"
    power: float = 1.0
    end_factor: float = 0.0
    first_step: int = 1
    warmup_power: float = 1.0
    warmup_from: float = 0.0
    start_step: int = 0
    decay_from: str = "warmup_end"
    end_learning_rate: float | None = None
    warmup_steps: float | None = None
    decay_steps: float | None = None
    decay_rate: float = 0.97
    stair_epochs: tuple[float, ...] = (2.4,)


def validate_schedule(schedule: ScheduleConfig, prefix: str) -> None:
    """Check the schedule's fields."""
    require_choice(f"{prefix}.scaling_rule", schedule.scaling_rule, SCALING_RULES)
    require_choice(f"{prefix}.warmup_rule", schedule.warmup_rule, WARMUP_RULES)
    require_choice(f"{prefix}.decay", schedule.decay, DECAYS)
    at_least(f"{prefix}.base_batch_size", schedule.base_batch_size, 1)
    at_least(f"{prefix}.base_learning_rate", schedule.base_learning_rate, 0)
    at_least(f"{prefix}.base_warmup_epochs", schedule.base_warmup_epochs, 0)
    require(
        0 < schedule.power < LARGEST_INTEGER,
        f"{prefix}.power",
        schedule.power,
        "give a number > 0 (and below 2^31)",
    )
    require(
        0 <= schedule.end_factor <= 1,
        f"{prefix}.end_factor",
        schedule.end_factor,
        "give a number in [0, 1]",
    )
    require(
        schedule.first_step in (0, 1), f"{prefix}.first_step", schedule.first_step, "use 0 or 1"
    )
    require(
        0 < schedule.warmup_power < LARGEST_INTEGER,
        f"{prefix}.warmup_power",
        schedule.warmup_power,
        "give a number > 0 (and below 2^31)",
    )
    require(
        abs(schedule.start_step) < LARGEST_INTEGER,
        f"{prefix}.start_step",
        schedule.start_step,
        "give a step below 2^31",
    )
    at_least(f"{prefix}.warmup_from", schedule.warmup_from, 0)
    require_choice(f"{prefix}.decay_from", schedule.decay_from, DECAY_ORIGINS)
    _validate_end(schedule, prefix)
    _validate_no_idle_field(schedule, prefix)


def _validate_no_idle_field(schedule: ScheduleConfig, prefix: str) -> None:
    """Refuse what the schedule would not look at."""
    idle: dict[str, Any] = {"power": 1.0} if schedule.decay != "polynomial" else {}
    if schedule.decay not in ("exponential", "step"):
        idle |= {"decay_rate": 0.97, "stair_epochs": (2.4,)}
    if schedule.decay not in ("polynomial", "cosine"):
        idle["end_factor"] = 0.0
    still = schedule.warmup_rule == "none" or schedule.base_warmup_epochs == 0
    if schedule.warmup_steps == 0 or (schedule.warmup_steps is None and still):
        idle |= {"warmup_power": 1.0, "warmup_from": 0.0}
    for name, default in idle.items():
        value = getattr(schedule, name)
        what = "no warmup" if name.startswith("warmup") else f"decay = {schedule.decay!r}"
        require(
            value == default,
            f"{prefix}.{name}",
            value,
            f"has no effect with {what}; leave it {default}",
        )
    if schedule.decay == "constant":
        fix = "has no effect with decay = 'constant'; leave it 'warmup_end'"
        require(
            schedule.decay_from == "warmup_end", f"{prefix}.decay_from", schedule.decay_from, fix
        )


def _validate_end(schedule: ScheduleConfig, prefix: str) -> None:
    if schedule.warmup_steps is not None:
        at_least(f"{prefix}.warmup_steps", schedule.warmup_steps, 0)
    steps = schedule.decay_steps
    require(
        steps is None or 0 < steps < LARGEST_INTEGER,
        f"{prefix}.decay_steps",
        steps,
        "give a number > 0, or None",
    )
    require(
        steps is None or schedule.decay in ("polynomial", "cosine"),
        f"{prefix}.decay_steps",
        steps,
        "only for a polynomial or cosine decay; leave it None",
    )
    stairs, rate = schedule.stair_epochs, schedule.decay_rate
    require(0 < rate <= 1, f"{prefix}.decay_rate", rate, "give a number in (0, 1]")
    require(
        len(stairs) > 0
        and list(stairs) == sorted(stairs)
        and stairs[0] > 0
        and stairs[-1] < LARGEST_INTEGER,
        f"{prefix}.stair_epochs",
        stairs,
        "give ascending epochs > 0",
    )
    if schedule.decay == "exponential":
        require(
            len(stairs) == 1,
            f"{prefix}.stair_epochs",
            stairs,
            "give one number for an exponential decay",
        )
    if schedule.end_learning_rate is not None:
        at_least(f"{prefix}.end_learning_rate", schedule.end_learning_rate, 0)
        require(
            schedule.end_factor == 0 and schedule.decay in ("polynomial", "cosine"),
            f"{prefix}.end_learning_rate",
            schedule.end_learning_rate,
            "only for a polynomial or cosine decay, and not beside end_factor",
        )
