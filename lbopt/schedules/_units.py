"""Conversions between epochs, optimizer steps and examples."""

from __future__ import annotations

import dataclasses
import math

from lbopt import _scalars


@dataclasses.dataclass(frozen=True)
class Units:
    """Size of a training set and of a batch, with the conversions that follow from them.

    An epoch is `num_examples` examples at every batch size. It need not be a whole number of steps:
    a batch may cross the end of an epoch. The steps of a run are rounded up, so that no budget is
    cut short; warmup steps are rounded to the nearest.

    Attributes:
      num_examples: Size of the training set.
      global_batch_size: Examples per optimizer step, over all devices.

    >>> Units(num_examples=1_281_167, global_batch_size=32768).steps(epochs=90)
    3519
    """

    num_examples: int
    global_batch_size: int

    def __post_init__(self) -> None:
        for name in ("num_examples", "global_batch_size"):
            # Keep Python integers: products of NumPy's narrow integers can overflow.
            object.__setattr__(self, name, _scalars.whole(name, getattr(self, name)))

    def exact_steps(self, epochs: float) -> float:
        """Return the optimizer steps that `epochs` take, not rounded."""
        return _scalars.checked("epochs", epochs) * self.num_examples / self.global_batch_size

    def steps(self, epochs: float) -> int:
        """Return the optimizer steps that `epochs` take, rounded up.

        An excess of up to 3e-9 steps is ignored, because decimal fractions are not exact.
        """
        exact = self.exact_steps(epochs)
        return max(math.ceil(exact - 3e-9), int(exact > 0))

    def epochs(self, steps: float) -> float:
        """Return the number of epochs in `steps` optimizer steps."""
        return _scalars.known(steps) * self.global_batch_size / self.num_examples

    def examples(self, steps: int) -> int:
        """Return the number of examples in `steps` optimizer steps."""
        return _scalars.known(steps) * self.global_batch_size

    def warmup_steps(self, epochs: float) -> int:
        """Return the optimizer steps that a warmup of `epochs` takes, rounded to the nearest.

        >>> Units(1_281_167, 32768).warmup_steps(20), Units(1_281_167, 512).warmup_steps(0.3125)
        (782, 782)
        """
        return round(self.exact_steps(epochs))
