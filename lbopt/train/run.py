"""Everything the training loop needs, as objects: the loop knows no config and no names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from lbopt.data.batches import TrainBatches
from lbopt.parallel.state import TrainState
from lbopt.parallel.step import Step


@dataclasses.dataclass(frozen=True)
class Cadence:
    """How often things happen, in optimizer steps. Each also happens at the end."""

    log_every_steps: int
    eval_every_steps: int
    checkpoint_every_steps: int


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run before it starts.

    Attributes:
      mesh: the devices.
      shapes: () -> shapes, dtypes and shardings of the state.
      init: () -> the state before the first update, laid out so.
      train_step: from `make_train_step`.
      batches: this process's part of every step's global batch.
      evaluate: state -> metrics on the validation split.
      evaluate_test: state -> metrics on the test split.
      global_batch_size: examples per step.
      num_steps: length of the run.
      cadence: how often to log, evaluate and save.
      keep_checkpoints: how many of the latest to keep.
      best_metric: which evaluation metric says which checkpoint is best.
    """

    mesh: Mesh
    shapes: Callable[[], TrainState]
    init: Callable[[], TrainState]
    train_step: Step
    batches: TrainBatches
    evaluate: Callable[[TrainState], dict[str, float]]
    evaluate_test: Callable[[TrainState], dict[str, float]]
    global_batch_size: int
    num_steps: int
    cadence: Cadence
    keep_checkpoints: int
    best_metric: str

    def lower(self) -> Any:
        """Trace and lower the training step for this run's shapes; nothing is compiled or run.

        Raises:
          UserError: if the model, for instance its batch-norm groups, does not fit the batch or the devices.
        """
        shape = lambda x: jax.ShapeDtypeStruct((self.global_batch_size, *x.shape[1:]), x.dtype)  # noqa: E731
        return self.train_step.lower(self.shapes(), jax.tree.map(shape, self.batches[0]))
