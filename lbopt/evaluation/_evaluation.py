"""An evaluation: a compiled step, and the function that runs it over a whole data set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from lbopt.parallel import Step, TrainState


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An evaluation of whole data sets; a call with (state, data set, batch size) returns metrics.

    Attributes:
      step: The compiled step.
      run: Function of (step, state, data set, global batch size) that returns the metrics.
      arguments: Function of the same arguments that returns the shapes of the step's arguments.
    """

    step: Step
    run: Callable[[Any, Any, Any, int], dict[str, float]]
    arguments: Callable[[Any, Any, Any, int], tuple[Any, ...]]

    def __call__(self, state: TrainState, dataset: Any, global_batch_size: int) -> dict[str, float]:
        return self.run(self.step, state, dataset, global_batch_size)

    def lower(self, state: TrainState, dataset: Any, global_batch_size: int) -> Any:
        """Return the step, lowered for the shapes of its arguments; nothing is compiled or run."""
        return self.step.lower(*self.arguments(self.step, state, dataset, global_batch_size))


Evaluator = Callable[[Mesh, str], Evaluation]
"""Function of (mesh, backend) that returns an `Evaluation`."""
