"""An evaluation: a compiled step, and how it is run over a whole data set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from lbopt.parallel.state import TrainState
from lbopt.parallel.step import Step


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The evaluation of whole data sets: call it with (state, data set, global batch size) for its metrics.

    Attributes:
      step: the compiled step.
      run: (step, state, data set, global batch size) -> metrics.
      arguments: (step, state, data set, global batch size) -> shapes of the arguments of one call of the step.
    """

    step: Step
    run: Callable[[Any, Any, Any, int], dict[str, float]]
    arguments: Callable[[Any, Any, Any, int], tuple[Any, ...]]

    def __call__(self, state: TrainState, dataset: Any, global_batch_size: int) -> dict[str, float]:
        return self.run(self.step, state, dataset, global_batch_size)

    def lower(self, state: TrainState, dataset: Any, global_batch_size: int) -> Any:
        """Lower the step for these shapes; nothing is compiled or run."""
        return self.step.lower(*self.arguments(self.step, state, dataset, global_batch_size))


Evaluator = Callable[[Mesh, str], Evaluation]
"""(mesh, backend) -> `Evaluation`."""
