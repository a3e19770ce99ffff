"""The learning rate over a run, as a rule over batch sizes."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses

from lbopt.config._checks import LARGEST_INTEGER, at_least
from lbopt.config._fields import NOT_EMPTY, When, only
from lbopt.errors import require, require_choice

SCALING_RULES = ("linear", "none", "sqrt")
WARMUP_RULES = ("epochs", "legw", "none")
DECAYS = ("constant", "cosine", "exponential", "polynomial", "step")
DECAY_ORIGINS = ("start", "warmup_end")
_WITH_END = ("polynomial", "cosine")
_IN_STAIRS = ("exponential", "step")
_WARMS_UP: tuple[When, ...] = (
    {"warmup_steps": NOT_EMPTY},
    {
        "warmup_steps": (None,),
        "warmup_rule": ("epochs", "legw"),
        "base_warmup_epochs": NOT_EMPTY,
    },
)


@dataclasses.dataclass
class ScheduleConfig:
    """The learning rate, as a rule over batch sizes.

    Attributes:
      base_learning_rate: Peak learning rate at `base_batch_size`.
      base_batch_size: Batch size that the base values belong to.
      scaling_rule: "sqrt", "linear" or "none".
      warmup_rule: "legw" (base_warmup_epochs * batch / base batch epochs, so a constant number of
        steps), "epochs" (base_warmup_epochs at every batch) or "none".
      base_warmup_epochs: Epochs of warmup at the base batch.
      decay: "polynomial", "cosine" or "constant", from the end of warmup to the end of the run;
        "exponential" or "step", in stairs.
      power: Exponent of the polynomial.
      end_factor: Fraction of the peak that is left at the end, in [0, 1].
      first_step: Number of the first update: 0 (learning rate 0 there) or 1.
      warmup_power: Exponent of the ramp.
      warmup_from: Learning rate at the start of the ramp, at any batch size.
      start_step: Step at which the ramp begins; may be below 0.
      decay_from: "warmup_end", or "start": the decay counts from step 0, so the rate jumps at the
        end of warmup.
      end_learning_rate: Learning rate at the end, instead of `end_factor`.
      warmup_steps: Optimizer steps of warmup, instead of the rule's; may be fractional (MLPerf's 18
        epochs of 39.25 steps).
      decay_steps: Optimizer steps of the decay, instead of those from its origin to the end of the
        run.
      decay_rate: Factor of a stair.
      stair_epochs: For "exponential" one number, the epochs between two stairs; for "step" the
        epochs of the stairs, of which those past the end of the run are not reached.
    """

    base_learning_rate: float = 0.01
    base_batch_size: int = 64
    scaling_rule: str = "sqrt"
    warmup_rule: str = only("legw", unless="warmup_steps")
    base_warmup_epochs: float = only(0.5, warmup_rule=("epochs", "legw"), unless="warmup_steps")
    decay: str = "polynomial"
    power: float = only(1.0, decay=("polynomial",))
    end_factor: float = only(0.0, decay=_WITH_END)
    first_step: int = 1
    warmup_power: float = only(1.0, *_WARMS_UP)
    warmup_from: float = only(0.0, *_WARMS_UP)
    start_step: int = 0
    decay_from: str = only("warmup_end", decay=(*_WITH_END, *_IN_STAIRS))
    end_learning_rate: float | None = only(None, decay=_WITH_END)
    warmup_steps: float | None = None
    decay_steps: float | None = only(None, decay=_WITH_END)
    decay_rate: float = only(0.97, decay=_IN_STAIRS)
    stair_epochs: tuple[float, ...] = only((2.4,), decay=_IN_STAIRS)


def check_schedule(schedule: ScheduleConfig) -> None:
    """Raise `UserError` for a value that no schedule takes."""
    require_choice("scaling_rule", schedule.scaling_rule, SCALING_RULES)
    require_choice("warmup_rule", schedule.warmup_rule, WARMUP_RULES)
    require_choice("decay", schedule.decay, DECAYS)
    require_choice("decay_from", schedule.decay_from, DECAY_ORIGINS)
    at_least("base_batch_size", schedule.base_batch_size, 1)
    for name in ("base_learning_rate", "base_warmup_epochs", "warmup_from"):
        at_least(name, getattr(schedule, name), 0)
    for name in ("warmup_steps", "end_learning_rate"):
        if getattr(schedule, name) is not None:
            at_least(name, getattr(schedule, name), 0)

    for name in ("power", "warmup_power"):
        value = getattr(schedule, name)
        require(0 < value < LARGEST_INTEGER, name, value, "give a number > 0 (and below 2^31)")
    end = schedule.end_factor
    first = schedule.first_step
    start = schedule.start_step
    require(0 <= end <= 1, "end_factor", end, "give a number in [0, 1]")
    require(first in (0, 1), "first_step", first, "use 0 or 1")
    require(abs(start) < LARGEST_INTEGER, "start_step", start, "give a step below 2^31")
    _check_decay(schedule)


def _check_decay(schedule: ScheduleConfig) -> None:
    steps = schedule.decay_steps
    rate = schedule.decay_rate
    stairs = schedule.stair_epochs
    given = steps is None or 0 < steps < LARGEST_INTEGER
    require(given, "decay_steps", steps, "give a number > 0, or None")
    require(0 < rate <= 1, "decay_rate", rate, "give a number in (0, 1]")
    ascending = (
        list(stairs) == sorted(stairs) and stairs[:1] > (0,) and stairs[-1] < LARGEST_INTEGER
    )
    require(ascending, "stair_epochs", stairs, "give ascending epochs > 0")
    one = schedule.decay != "exponential" or len(stairs) == 1
    require(one, "stair_epochs", stairs, "give one number for an exponential decay")
    end = schedule.end_learning_rate
    fix = "give this or {end_factor}; the other one stays at its default"
    alone = end is None or schedule.end_factor == 0
    require(alone, "end_learning_rate", end, fix, code="conflict", also=["end_factor"])
