"""How the learning rate follows the batch size."""

from __future__ import annotations

import math
from typing import Literal, TypeVar

import jax

from lbopt import scalars

ScalingRule = Literal["sqrt", "linear", "none"]
Rate = TypeVar("Rate", float, jax.Array)
EXPONENTS: dict[str, float] = {"sqrt": 0.5, "linear": 1.0, "none": 0.0}


def scale_learning_rate(
    base_learning_rate: Rate, base_batch_size: int, global_batch_size: int, rule: ScalingRule = "sqrt"
) -> Rate:
    r"""Return the learning rate for another batch size: base * (global / base batch)^p.

    Args:
      base_learning_rate: the rate that works at `base_batch_size`; may be a traced scalar.
      base_batch_size: the batch it was tuned at.
      global_batch_size: the batch to train with.
      rule: "sqrt" (p = 1/2: You et al. for LAMB and LEGW), "linear" (p = 1: Goyal et al., arXiv 1706.02677), "none".

    Returns:
      The scaled rate: a float, or a traced scalar if given one.

    Raises:
      ValueError: naming the argument, for an unknown rule or sizes below 1.

    >>> scale_learning_rate(0.1, 256, 1024, "sqrt"), scale_learning_rate(0.1, 256, 1024, "linear")
    (0.2, 0.4)
    """
    if rule not in EXPONENTS:
        raise ValueError(f"rule = {rule!r}: use one of {', '.join(EXPONENTS)}")
    for name, size in (("base_batch_size", base_batch_size), ("global_batch_size", global_batch_size)):
        size = scalars.known(size)
        if not (scalars.is_number(size) and 1 <= size < math.inf):
            raise ValueError(f"{name} = {size!r}: give a number >= 1")
    base_learning_rate = scalars.known(base_learning_rate)
    if scalars.is_number(base_learning_rate) and not 0 <= base_learning_rate < math.inf:
        raise ValueError(f"base_learning_rate = {base_learning_rate!r}: give a finite number >= 0")
    return base_learning_rate * (global_batch_size / base_batch_size) ** EXPONENTS[rule]
