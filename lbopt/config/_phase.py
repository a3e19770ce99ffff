"""The configuration of a run's second phase: batch, sequence length and schedule of its own."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses

from lbopt.config._data import OF_TASK, TEXT
from lbopt.config._fields import PLACE, only
from lbopt.config._model import TRANSFORMERS
from lbopt.config._schedule import ScheduleConfig
from lbopt.errors import require_choice

OPTIMIZER_STATES = ("keep", "reset")


@dataclasses.dataclass
class PhaseConfig:
    """The settings that a run's second phase changes; all others stay.

    The schedule counts the steps of its own phase, so that a warmup ramps up from zero again.

    Attributes:
      num_steps: Optimizer steps of this phase.
      global_batch_size: Examples per optimizer step.
      num_microsteps: Number of microsteps over which gradients are accumulated.
      eval_global_batch_size: Examples per step of evaluation; any size.
      sequence_length: Tokens of an example.
      max_predictions: Largest number of predicted tokens of an example.
      remat: Arrays that the backward pass of bert, decoder_lm or your own model recomputes, see
        `ModelConfig`.
      schedule: Learning rate of this phase.
      optimizer_state: "keep" the moments (and the averaged parameters), or "reset" them.

    >>> from lbopt.config import TrainConfig
    >>> phase = PhaseConfig(num_steps=100, global_batch_size=512)
    >>> config = TrainConfig(data="digits", model="cnn", num_steps=900, phase2=phase)
    >>> config.validate()
    >>> [one.global_batch_size for one in config.phases()]
    [256, 512]
    """

    num_steps: int = 1
    global_batch_size: int = 256
    num_microsteps: int = 1
    eval_global_batch_size: int = 256
    sequence_length: int = only(512, {"data.name": TEXT})
    max_predictions: int = only(76, {"data.name": OF_TASK["masked_lm"]})
    remat: str = only("none", {"model.name": TRANSFORMERS}, {"model.name": PLACE})
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    optimizer_state: str = "keep"


ELSEWHERE = {
    "num_steps": "phase2.num_steps",
    "global_batch_size": "phase2.global_batch_size",
    "eval_global_batch_size": "phase2.eval_global_batch_size",
    "parallel.num_microsteps": "phase2.num_microsteps",
    "data.sequence_length": "phase2.sequence_length",
    "data.max_predictions": "phase2.max_predictions",
    "model.remat": "phase2.remat",
    "schedule": "phase2.schedule",
}
"""Fields of the phase as a run of its own -> where they stand in the whole config."""


def check_phase(phase: PhaseConfig) -> None:
    """Raise `UserError` for a value that no phase takes.

    The fields in `ELSEWHERE` are checked as those of a run of its own.
    """
    require_choice("optimizer_state", phase.optimizer_state, OPTIMIZER_STATES)
