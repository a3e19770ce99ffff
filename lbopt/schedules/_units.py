"""The one place where epochs, steps and examples are turned into each other."""

from __future__ import annotations

import dataclasses
import math

from lbopt import _scalars


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
            # As Python's: NumPy's narrow numbers overflow.
            object.__setattr__(self, name, _scalars.whole(name, getattr(self, name)))

    def exact_steps(self, epochs: float) -> float:
        """Return the optimizer steps that `epochs` take, not rounded."""
        return _scalars.checked("epochs", epochs) * self.num_examples / self.global_batch_size

    def steps(self, epochs: float) -> int:
        """Return the optimizer steps that `epochs` take, rounded up (3e-9 of slack for decimal fractions)."""
        exact = self.exact_steps(epochs)
        return max(math.ceil(exact - 3e-9), int(exact > 0))

    def epochs(self, steps: float) -> float:
        """Return the epochs that `steps` optimizer steps make."""
        return _scalars.known(steps) * self.global_batch_size / self.num_examples

    def examples(self, steps: int) -> int:
        """Return the examples that `steps` optimizer steps see."""
        return _scalars.known(steps) * self.global_batch_size

    def warmup_steps(self, epochs: float) -> int:
        """Return the warmup steps nearest to `epochs`.

        >>> Units(1_281_167, 32768).warmup_steps(20), Units(1_281_167, 512).warmup_steps(0.3125)
        (782, 782)
        """
        return round(self.exact_steps(epochs))
