"""The configuration of one training run."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses

from lbopt.config import checks
from lbopt.config.checks import LARGEST, at_least
from lbopt.config.data import TASKS, DataConfig, validate_data
from lbopt.config.loss import LossConfig, validate_loss
from lbopt.config.model import FAMILIES, ModelConfig, validate_model
from lbopt.config.optimizer import OptimizerConfig, validate_optimizer
from lbopt.config.parallel import ParallelConfig, validate_parallel
from lbopt.config.schedule import ScheduleConfig, validate_schedule
from lbopt.errors import require, require_choice

STATUSES = ("measured here", "planned by the TPU compiler", "not yet run")


@dataclasses.dataclass
class About:
    """What `lbopt recipes` says of a config.

    Attributes:
      paper: what it follows, with the arXiv id.
      published_result: the number to reach, with its source; "-" if there is none.
      status: "measured here", "planned by the TPU compiler" or "not yet run".
    """

    paper: str = "-"
    published_result: str = "-"
    status: str = "not yet run"


@dataclasses.dataclass
class CheckpointConfig:
    """When state is saved and what is kept.

    Attributes:
      every_steps: save so often (and at the end, and on SIGTERM).
      keep: the latest so many are kept, and the best one.
      best_metric: the evaluation metric that says which is best; higher is better unless it ends in "loss".
    """

    every_steps: int = 100
    keep: int = 3
    best_metric: str = "eval/accuracy"


@dataclasses.dataclass
class TrainConfig:
    """One training run.

    Attributes:
      name: of the recipe.
      about: what `lbopt recipes` says.
      seed: of initialisation, shuffle and dropout.
      global_batch_size: examples per optimizer step over all devices and microsteps.
      num_epochs: length of the run; steps are rounded up.
      eval_global_batch_size: any size; evaluation is exact.
      log_every_steps: a line in metrics.jsonl so often.
      eval_every_steps: evaluate on the validation split so often, and at the end.
    """

    name: str = "unnamed"
    about: About = dataclasses.field(default_factory=About)
    seed: int = 0
    global_batch_size: int = 256
    num_epochs: float = 20.0
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    eval_global_batch_size: int = 256
    log_every_steps: int = 10
    eval_every_steps: int = 50

    def validate(self) -> None:
        """Check every field that can be checked without data or devices.

        Raises:
          UserError: naming the field, its value and the fix.
        """
        checks.check_types(self)
        for field in ("global_batch_size", "eval_global_batch_size", "log_every_steps", "eval_every_steps"):
            at_least(f"config.{field}", getattr(self, field), 1)
        require_seed("config.seed", self.seed)
        require_name("config.name", self.name)
        require(
            0 < self.num_epochs < LARGEST,
            "config.num_epochs",
            self.num_epochs,
            "give a number > 0",
        )
        require_choice("config.about.status", self.about.status, STATUSES)
        validate_data(self.data, "config.data")
        validate_model(self.model, "config.model")
        _validate_fit(self.data, self.model)
        validate_loss(self.loss, "config.loss")
        validate_optimizer(self.optimizer, "config.optimizer")
        validate_schedule(self.schedule, "config.schedule")
        validate_parallel(self.parallel)
        _validate_checkpoint(self.checkpoint)


def _validate_fit(data: DataConfig, model: ModelConfig) -> None:
    """Check that the model is for such data."""
    fitting = FAMILIES[TASKS[data.name]]
    require(
        model.name in fitting,
        "config.model.name",
        model.name,
        f"config.data.name = {data.name!r} is for {' or '.join(fitting)}; change one of the two",
    )


def _validate_checkpoint(checkpoint: CheckpointConfig) -> None:
    at_least("config.checkpoint.every_steps", checkpoint.every_steps, 1)
    at_least("config.checkpoint.keep", checkpoint.keep, 1)
    require_choice("config.checkpoint.best_metric", checkpoint.best_metric, ("eval/accuracy", "eval/loss"))


def require_name(field: str, name: str) -> None:
    """Check that a name can be shown."""
    require(name.strip(), field, name, "give a name")


def require_seed(field: str, seed: int) -> None:
    """Check that a seed is a number that a JAX key tells apart from all others."""
    require(0 <= seed < LARGEST, field, seed, "give a number in [0, 2147483648)")
