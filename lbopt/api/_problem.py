"""What is learned: data, model and loss, and the config of a run of it."""

# No `from __future__ import annotations` here, as in every config: the fields' types are read.
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from lbopt.config import (
    DataConfig,
    FromText,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    free_arguments,
)
from lbopt.errors import LboptError, require, require_choice

_OPTIMIZER: Any = "lamb"
_GROUPS = {
    "data": (DataConfig, "arrays by name, a table, three splits, a function, a path or a name"),
    "model": (ModelConfig, "a module, a function that makes one, or a name"),
    "loss": (LossConfig, "a function (outputs, batch)"),
    "optimizer": (OptimizerConfig, "an optimizer, a function of learning_rate, or a name"),
    "schedule": (ScheduleConfig, "a number, or a function of the number of updates"),
}
"""Groups of a config that may be given as objects: their class, and what it is made of."""


@dataclasses.dataclass
class Problem(FromText):
    """What is learned: the data, the model and the loss.

    Attributes:
      data: Arrays by name, of which validation and test are drawn (or a table of pandas); three
        splits (`lbopt.Splits`, or a tuple) of arrays by name, of `lbopt.Dataset`s or of
        random-access sources; a function that returns splits; a path, or the name of a data set,
        as text; or a `DataConfig`, `ArraysConfig` for instance.
      model: What makes a module of Linen, NNX, Equinox or Haiku, a module, or a
        `lbopt.models.Model` (see `lbopt.models.make_model`); the name of a model; or a
        `ModelConfig`.
      loss: Function (outputs, batch) -> the loss of each example, or (sum, weight), and perhaps a
        dict of metrics in these forms; a `LossConfig`; or None for the loss of the data's task.

    >>> import flax.linen as nn, numpy as np
    >>> x = np.linspace(-1, 1, 600, dtype=np.float32)[:, None]
    >>> problem = Problem({"x": x, "label": (x[:, 0] > 0).astype(np.int32)}, nn.Dense(2))
    >>> problem.data.name, problem.loss.label_smoothing
    ('arrays', 0.0)
    >>> Problem("digits", "cnn").model.name  # what the recipes use, by name
    'cnn'
    """

    data: DataConfig
    model: ModelConfig
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)

    def __post_init__(self) -> None:
        if self.loss is None:
            self.loss = LossConfig()


def train_config(problem: Problem, optimizer: Any, schedule: Any, **fields: Any) -> TrainConfig:
    """Return the config of a run of a problem.

    Args:
      problem: The problem.
      optimizer: As `run_training` takes it.
      schedule: As `run_training` takes it.
      **fields: Other fields of `TrainConfig`.

    Raises:
      UserError: For a field that there is not, or for a problem that is none.
    """
    fix = "give lbopt.Problem(data, model)"
    require(isinstance(problem, Problem), "problem", problem, fix, code="type")
    named = {"data", "model", "loss", "optimizer", "schedule", "global_batch_size"}
    known = {field.name for field in dataclasses.fields(TrainConfig)} - named
    for name in fields:
        require_choice("argument", name, known | {"global_batch_size"})
    config = TrainConfig(data=problem.data, model=problem.model, loss=problem.loss, **fields)
    config.optimizer = _OPTIMIZER if optimizer is None else optimizer
    config.schedule = schedule_for(optimizer, schedule)
    check_objects(config)
    return config


def check_objects(config: Any, place: str = "") -> None:
    """Raise `UserError` for an object that no group of a config can be made of.

    Args:
      config: A config, or an arm of a study.
      place: Its place with a dot, for errors.
    """
    for name, (kind, fix) in _GROUPS.items():
        value = getattr(config, name, None)
        fits = value is None or isinstance(value, kind)
        require(fits, f"{place}{name}", value, f"give {fix}, or a {kind.__name__}", code="type")


def schedule_for(optimizer: Any, schedule: Any) -> Any:
    """Return a schedule; the default is LEGW's, and none for an optimizer that has a rate."""
    if schedule is not None:
        return schedule
    is_finished = hasattr(optimizer, "init") and hasattr(optimizer, "update")
    has_rate = callable(optimizer) and "learning_rate" not in free_arguments(optimizer)
    return 1.0 if is_finished or has_rate else ScheduleConfig()


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    """Name the fields of errors as arguments, without the config that commands have.

    Raises:
      UserError: In a program of several processes.
    """
    alone = jax.process_count() == 1
    fix = "start the processes with lbopt train or lbopt sweep; these functions are for one"
    require(alone, "jax.process_count()", jax.process_count(), fix, code="conflict")
    try:
        yield
    except LboptError as error:
        if error.field is not None:
            error.field = _argument(error.field)
        error.also = {name: _argument(shown) for name, shown in error.also.items()}
        raise


def _argument(field: str) -> str:
    return field.removeprefix("config.train.").removeprefix("config.").removeprefix("--")
