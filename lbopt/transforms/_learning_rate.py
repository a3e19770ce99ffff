"""The learning rate, as a transform that keeps the rate it applied."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, tree, types
from lbopt.transforms import _arguments, _rounding


class LearningRateState(NamedTuple):
    """The step of the schedule and its last rate.

    Attributes:
      schedule_count: int32 scalar, number of updates so far, the next argument of the schedule.
      applied_rate: fp32 scalar, rate of the last update, 0 before the first; it is for logs, and no
        update reads it.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_learning_rate(lambda step: 0.5 / (step + 1))
    >>> _, state = tx.update({"w": jnp.ones(2)}, tx.init(None))
    >>> int(state.schedule_count), float(state.applied_rate)
    (1, 0.5)
    """

    schedule_count: jax.Array
    applied_rate: jax.Array


def scale_by_learning_rate(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Multiply updates by minus the learning rate, and keep the rate in the state.

    `lbopt.optimizer_metrics(opt_state)["learning_rate"]` is the rate of the last update. To set the
    rate, wrap the optimizer in `optax.inject_hyperparams` and change
    `opt_state.hyperparams["learning_rate"]`, or use `optax.tree_utils.tree_set(opt_state,
    learning_rate=...)`. Without the wrapper no leaf has that name: `tree_set` raises `KeyError`.

    Args:
      learning_rate: Number >= 0, traced scalar, or schedule: optimizer step (0 at the first update)
        -> rate.

    Returns:
      A transform whose state is `LearningRateState`. Its step is called `schedule_count`, so that
      `optax.tree_utils.tree_get(opt_state, "count")` finds the one of the moments in `lamb` and
      `lans`.

    Raises:
      UserError: For a plain number that is negative or not finite, or a schedule that does not give
        one number.

    >>> import jax.numpy as jnp
    >>> tx = optax.inject_hyperparams(scale_by_learning_rate)(learning_rate=0.5)
    >>> state = optax.tree_utils.tree_set(tx.init(jnp.ones(())), learning_rate=jnp.float32(0.25))
    >>> float(tx.update({"w": jnp.ones(())}, state)[0]["w"])
    -0.25

    Note:
      `init` warns of bfloat16 and float16 parameters, in which small steps are lost; see
      `lbopt.round_stochastically`.

      Unlike `optax.scale_by_learning_rate` it keeps the rate, so logs show the rate that was
      applied and not one computed beside it.
    """
    if not callable(learning_rate):
        _scalars.require_at_least("learning_rate", learning_rate, 0)

    def init_fn(params: types.Params) -> LearningRateState:
        _rounding.warn_of_lost_steps(params)
        return LearningRateState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))

    def update_fn(
        updates: optax.Updates, state: LearningRateState, params: types.Params | None = None
    ) -> tuple[optax.Updates, LearningRateState]:
        del params
        tree.check_inexact(updates, "updates")
        _arguments.require_state(state, LearningRateState)
        rate = _arguments.rate_at(learning_rate, state.schedule_count)

        def scale(u: jax.Array) -> jax.Array:
            wide = tree.wide_dtype(u.dtype)
            return (-jnp.asarray(rate, wide) * u.astype(wide)).astype(u.dtype)

        count = optax.safe_increment(state.schedule_count)
        new_state = LearningRateState(count, jnp.asarray(rate, jnp.float32))
        return jax.tree.map(scale, updates), new_state

    return optax.GradientTransformation(init_fn, update_fn)
