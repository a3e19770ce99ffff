"""`suggest`: numbers to begin with, as `lbopt suggest`."""

from __future__ import annotations

from typing import Any

from lbopt.api._problem import Problem, in_python, train_config
from lbopt.cli import Advice, suggest_for
from lbopt.config import ScheduleConfig


def suggest(
    problem: Problem,
    optimizer: Any = "lamb",
    *,
    base_batch_size: int = 64,
    global_batch_size: int = 1024,
    steps: int = 150,
    **fields: Any,
) -> Advice:
    """Measure a learning rate, a warmup and a batch size that should still help, in minutes.

    Args:
      problem: Data, model and loss.
      optimizer: As in `run_training`.
      base_batch_size: Batch size at which everything is measured.
      global_batch_size: Batch size to which the numbers are scaled.
      steps: Steps of each of 17 short runs.
      **fields: Other fields of `lbopt.config.TrainConfig` by name, `num_epochs` of the whole run
        for instance.

    Returns:
      The numbers with the measurements behind them; `print` shows both. See
      `lbopt.cli.suggest_for`.

    Raises:
      UserError: Naming the argument; if no learning rate lowers the loss.

    >>> import flax.linen as nn, lbopt, numpy as np
    >>> x = np.random.default_rng(0).normal(size=(1280, 2)).astype(np.float32)
    >>> label = (x[:, 0] > x[:, 1]).astype(np.int32)
    >>> problem = lbopt.Problem({"x": x, "label": label}, nn.Dense(2))
    >>> advice = suggest(  # doctest: +SKIP
    ...     problem, base_batch_size=16, global_batch_size=128, steps=30, num_epochs=5
    ... )
    >>> advice.asked.global_batch_size, advice.asked.total_steps  # doctest: +SKIP
    (128, 40)
    """
    with in_python():
        schedule = ScheduleConfig(base_batch_size=base_batch_size)
        config = train_config(
            problem, optimizer, schedule, global_batch_size=global_batch_size, **fields
        )
        return suggest_for(config, global_batch_size, steps)
