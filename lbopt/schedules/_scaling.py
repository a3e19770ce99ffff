"""Scaling rules: the learning rate as a function of the batch size."""

from __future__ import annotations

from typing import TypeVar

import jax

from lbopt import _scalars
from lbopt.schedules._rules import rule_changes

Rate = TypeVar("Rate", float, jax.Array)


def scale_learning_rate(
    base_learning_rate: Rate,
    base_batch_size: int,
    global_batch_size: int,
    rule: str = "sqrt",
) -> Rate:
    r"""Return the learning rate for another batch size.

    Args:
      base_learning_rate: Learning rate tuned at `base_batch_size`; may be a traced scalar.
      base_batch_size: Batch size at which it was tuned.
      global_batch_size: Batch size to train with.
      rule: "sqrt" (times the root of global / base batch; You et al. for the optimizer LAMB and
        linear-epoch warmup), "linear" (times global / base batch; Goyal et al., arXiv
        1706.02677v2), "none" (the base value), or another rule of `scale_recipe`.

    Returns:
      The scaled rate: a float, or a traced scalar if given one.

    Raises:
      UserError: If an argument is out of range; names the argument.

    >>> scale_learning_rate(0.1, 256, 1024, "sqrt"), scale_learning_rate(0.1, 256, 1024, "linear")
    (0.2, 0.4)
    """
    change = rule_changes(rule).get("learning_rate")
    sizes = {"base_batch_size": base_batch_size, "global_batch_size": global_batch_size}
    base, size = (
        _scalars.checked(name, size, "a number >= 1", lambda n: n >= 1)
        for name, size in sizes.items()
    )
    rate = _scalars.checked("base_learning_rate", base_learning_rate, traced=True)
    return rate if change is None else change.apply(rate, size / base)
