"""Scaling rules: the learning rate as a function of the batch size."""

from __future__ import annotations

from typing import Literal, TypeVar

import jax

from lbopt import _scalars
from lbopt.errors import require_choice

ScalingRule = Literal["sqrt", "linear", "none"]
Rate = TypeVar("Rate", float, jax.Array)
EXPONENTS: dict[str, float] = {"sqrt": 0.5, "linear": 1.0, "none": 0.0}


def scale_learning_rate(
    base_learning_rate: Rate,
    base_batch_size: int,
    global_batch_size: int,
    rule: ScalingRule = "sqrt",
) -> Rate:
    r"""Return the learning rate for another batch size: base * (global / base batch)^p.

    Args:
      base_learning_rate: Learning rate tuned at `base_batch_size`; may be a traced scalar.
      base_batch_size: Batch size at which it was tuned.
      global_batch_size: Batch size to train with.
      rule: "sqrt" (p = 1/2; You et al. for the optimizer LAMB and linear-epoch warmup), "linear"
        (p = 1; Goyal et al., arXiv 1706.02677v2) or "none" (p = 0).

    Returns:
      The scaled rate: a float, or a traced scalar if given one.

    Raises:
      UserError: If an argument is out of range; names the argument.

    >>> scale_learning_rate(0.1, 256, 1024, "sqrt"), scale_learning_rate(0.1, 256, 1024, "linear")
    (0.2, 0.4)
    """
    require_choice("rule", rule, EXPONENTS)
    sizes = {"base_batch_size": base_batch_size, "global_batch_size": global_batch_size}
    base, size = (
        _scalars.checked(name, size, "a number >= 1", lambda n: n >= 1)
        for name, size in sizes.items()
    )
    rate = _scalars.checked("base_learning_rate", base_learning_rate, traced=True)
    return rate * (size / base) ** EXPONENTS[rule]
