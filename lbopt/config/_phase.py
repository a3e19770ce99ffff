"""A second part of a run: another batch, longer sequences, a schedule of its own."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses

from lbopt.config._checks import at_least
from lbopt.config._schedule import ScheduleConfig, validate_schedule
from lbopt.errors import require_choice

OPTIMIZER_STATES = ("keep", "reset")


@dataclasses.dataclass
class PhaseConfig:
    """What changes when the second phase of a run begins; everything else stays.

    The schedule counts the steps of its own phase, so that a warmup ramps up from zero again.

    Attributes:
      num_steps: optimizer steps of this phase.
      global_batch_size: examples per optimizer step.
      num_microsteps: gradient accumulation.
      eval_global_batch_size: any size.
      sequence_length: tokens of an example.
      max_predictions: tokens of an example that are predicted, at most.
      remat: what bert's backward pass computes again.
      schedule: of this phase.
      optimizer_state: "keep" the moments (and the averaged parameters), or "reset" them.
    """

    num_steps: int = 1
    global_batch_size: int = 256
    num_microsteps: int = 1
    eval_global_batch_size: int = 256
    sequence_length: int = 512
    max_predictions: int = 76
    remat: str = "none"
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    optimizer_state: str = "keep"


_ELSEWHERE = {
    "config.num_steps": "num_steps",
    "config.global_batch_size": "global_batch_size",
    "config.eval_global_batch_size": "eval_global_batch_size",
    "config.parallel.num_microsteps": "num_microsteps",
    "config.data.sequence_length": "sequence_length",
    "config.data.max_predictions": "max_predictions",
    "config.model.remat": "remat",
    "config.schedule": "schedule",
}
"""Where the config of the phase as a run of its own has the fields."""


def as_of_phase2(message: str) -> str:
    """Say what was wrong with the second phase, as a run of its own, in the words of the whole config.

    >>> as_of_phase2("config.schedule.power = -1: give a number > 0")
    'config.phase2.schedule.power = -1: give a number > 0'
    """
    for there, here in _ELSEWHERE.items():
        message = message.replace(there, f"config.phase2.{here}")
    return message if "config.phase2." in message else f"config.phase2: {message}"


def validate_phase(phase: PhaseConfig, prefix: str) -> None:
    """Check what the configuration of the phase as a run of its own does not."""
    for field in ("num_steps", "global_batch_size", "num_microsteps", "eval_global_batch_size"):
        at_least(f"{prefix}.{field}", getattr(phase, field), 1)
    validate_schedule(phase.schedule, f"{prefix}.schedule")
    require_choice(f"{prefix}.optimizer_state", phase.optimizer_state, OPTIMIZER_STATES)
