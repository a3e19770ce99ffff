"""The learning rate as a transform that remembers what it applied."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import tree, types
from lbopt.transforms import _arguments


class LearningRateState(NamedTuple):
    """What the schedule saw and said.

    Attributes:
      schedule_count: int32 scalar, the number of updates so far: what the schedule is given next.
      applied_rate: fp32 scalar, the rate of the last update (0 before the first): a record, which nothing reads.
    """

    schedule_count: jax.Array
    applied_rate: jax.Array


def scale_by_learning_rate(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Multiply updates by minus the learning rate, and keep the rate in the state.

    Read the rate of the last update with `lbopt.optimizer_metrics(opt_state)["learning_rate"]`. To set it, wrap the optimizer in
    `optax.inject_hyperparams` and change `opt_state.hyperparams["learning_rate"]`, or `optax.tree_utils.tree_set(opt_state,
    learning_rate=...)`; without it no leaf has that name, and `tree_set` raises `KeyError`. How many updates there were is `schedule_count`
    here; `optax.tree_utils.tree_get(opt_state, "count")` finds that of the moments in `lamb` and `lans`.

    Args:
      learning_rate: a number, a traced scalar, or a schedule: optimizer step (0 at the first update) -> rate.

    Returns:
      A transform whose state is `LearningRateState`.

    Raises:
      ValueError: if a plain number is negative or not finite, or if a schedule does not give one number.

    >>> import jax.numpy as jnp
    >>> tx = optax.inject_hyperparams(scale_by_learning_rate)(learning_rate=0.5)
    >>> state = optax.tree_utils.tree_set(tx.init(jnp.ones(())), learning_rate=jnp.float32(0.25))
    >>> float(tx.update({"w": jnp.ones(())}, state)[0]["w"])
    -0.25

    Note:
      Differs from `optax.scale_by_learning_rate` in that the state holds the rate, so that logs show what was applied
      and not what somebody computed beside it.
    """
    if not callable(learning_rate):
        _arguments.require_at_least("learning_rate", learning_rate, 0)

    def init_fn(params: types.Params) -> LearningRateState:
        del params
        return LearningRateState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))

    def update_fn(
        updates: optax.Updates, state: LearningRateState, params: types.Params | None = None
    ) -> tuple[optax.Updates, LearningRateState]:
        del params
        tree.check_inexact(updates, "the gradient")
        _arguments.require_state(state, LearningRateState, "scale_by_learning_rate")
        rate = _arguments.rate_at(learning_rate, state.schedule_count)

        def scale(u: jax.Array) -> jax.Array:
            wide = tree.wide_dtype(u.dtype)
            return (-jnp.asarray(rate, wide) * u.astype(wide)).astype(u.dtype)

        applied = jnp.asarray(rate, jnp.float32)
        return jax.tree.map(scale, updates), LearningRateState(
            optax.safe_increment(state.schedule_count), applied
        )

    return optax.GradientTransformation(init_fn, update_fn)
