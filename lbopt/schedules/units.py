"""The one place where epochs, steps and examples are turned into each other."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

from lbopt import scalars


def require_number(argument: str, value: Any, above: bool = False, traced: bool = False) -> None:
    """Raise ValueError unless the value is a finite number >= 0, or > 0 if `above`; a traced one passes if it may."""
    value = scalars.known(value)
    if traced and scalars.is_traced(value):
        return
    good = scalars.is_number(value) and math.isfinite(float(value))
    if not good or not (value > 0 if above else value >= 0):
        raise ValueError(f"{argument} = {value!r}: give a finite number {'>' if above else '>='} 0")


@dataclasses.dataclass(frozen=True)
class Units:
    """A data set and the batch that walks through it.

    An epoch is `num_examples` examples, whatever the batch: epochs need not be whole numbers of steps, and batches run
    on across epoch ends. Steps of a run are rounded up, so no budget is cut short; warmup steps to the nearest.

    Attributes:
      num_examples: size of the training set.
      global_batch_size: examples per optimizer step, over all devices.

    >>> Units(num_examples=1_281_167, global_batch_size=32768).steps(epochs=90)
    3519
    """

    num_examples: int
    global_batch_size: int

    def __post_init__(self) -> None:
        for name in ("num_examples", "global_batch_size"):
            value = getattr(self, name)
            if not isinstance(value, numbers.Integral) or isinstance(value, bool) or not int(value) >= 1:
                raise ValueError(f"{name} = {value!r}: give a whole number >= 1")

    def exact_steps(self, epochs: float) -> float:
        """Return the optimizer steps that `epochs` take, not rounded."""
        return epochs * self.num_examples / self.global_batch_size

    def steps(self, epochs: float) -> int:
        """Return the optimizer steps that `epochs` take, rounded up (3e-9 of slack for decimal fractions)."""
        return math.ceil(self.exact_steps(epochs) - 3e-9)

    def epochs(self, steps: float) -> float:
        """Return the epochs that `steps` optimizer steps make."""
        return steps * self.global_batch_size / self.num_examples

    def examples(self, steps: int) -> int:
        """Return the examples that `steps` optimizer steps see."""
        return steps * self.global_batch_size

    def warmup_steps(self, epochs: float) -> int:
        """Return the warmup steps nearest to `epochs`.

        >>> Units(1_281_167, 32768).warmup_steps(20), Units(1_281_167, 512).warmup_steps(0.3125)
        (782, 782)
        """
        return round(self.exact_steps(epochs))
