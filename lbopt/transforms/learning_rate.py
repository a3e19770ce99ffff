"""The learning rate as a transform that remembers what it applied."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import tree, types
from lbopt.transforms import arguments


class LearningRateState(NamedTuple):
    """What the schedule saw and said.

    Attributes:
      count: int32 scalar, the number of updates so far.
      learning_rate: fp32 scalar, the rate of the last update (0 before the first).
    """

    count: jax.Array  # type: ignore[assignment]
    learning_rate: jax.Array


def scale_by_learning_rate(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Multiply updates by minus the learning rate, and keep the rate in the state.

    Args:
      learning_rate: a number, a traced scalar, or a schedule: optimizer step (0 at the first update) -> rate.

    Returns:
      A transform whose state is `LearningRateState`.

    Raises:
      ValueError: if a plain number is negative or not finite.

    Note:
      Differs from `optax.scale_by_learning_rate` in that the state holds the rate, so that logs show what was applied
      and not what somebody computed beside it.
    """
    if not callable(learning_rate):
        arguments.require_at_least("learning_rate", learning_rate, 0)

    def init_fn(params: types.Params) -> LearningRateState:
        del params
        return LearningRateState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))

    def update_fn(
        updates: optax.Updates, state: LearningRateState, params: types.Params | None = None
    ) -> tuple[optax.Updates, LearningRateState]:
        del params
        tree.check_inexact(updates, "the gradient")
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate

        def scale(u: jax.Array) -> jax.Array:
            wide = tree.wide_dtype(u.dtype)
            return (-jnp.asarray(rate, wide) * u.astype(wide)).astype(u.dtype)

        applied = jnp.asarray(rate, jnp.float32)
        return jax.tree.map(scale, updates), LearningRateState(optax.safe_increment(state.count), applied)

    return optax.GradientTransformation(init_fn, update_fn)
