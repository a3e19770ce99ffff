"""The numbers of an optimizer that a compiled program can take as arguments."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from lbopt.config import _foreign
from lbopt.config._optimizer import OptimizerConfig


def optimizer_numbers(config: OptimizerConfig) -> dict[str, float]:
    """Return the options of an optimizer that may be traced.

    Args:
      config: The optimizer.

    Returns:
      Numbers by name, of our own optimizers only: the code of Optax's and of the user's may look at
      the numbers. Whole numbers, which shape the program, are left out.

    >>> optimizer_numbers(OptimizerConfig("muonh", options={"momentum": 0.9, "steps": 4}))
    {'momentum': 0.9}

    Note:
      The fields `b1`, `b2`, `momentum` and `eps` stay constants of the program. In fp32, 1 - 0.999
      is off by 1e-5 of itself, and a trial would no longer equal the run of `lbopt train`.
    """
    if config.name not in _foreign.LIBRARY:
        return {}
    factory = _foreign.named(config.name)
    assert factory is not None
    arguments = inspect.signature(factory).parameters
    return {
        option: value
        for option, value in config.options.items()
        if isinstance(value, float) and "jax.Array" in str(arguments[option].annotation)
    }


def with_optimizer_numbers(config: OptimizerConfig, numbers: Mapping[str, Any]) -> OptimizerConfig:
    """Return an optimizer with other numbers, which may be traced.

    Args:
      config: The optimizer.
      numbers: Numbers by name, with names of `optimizer_numbers`.
    """
    return dataclasses.replace(config, options={**config.options, **numbers})
