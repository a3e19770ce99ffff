"""The learning rate as a transform that remembers what it applied."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import tree, types
from lbopt.transforms import arguments


class LearningRateState(NamedTuple):
    """The rate that is applied, where it was given as a number.

    Attributes:
      learning_rate: fp32 scalar (fp64 with `jax_enable_x64`). Setting it changes the rate.
    """

    learning_rate: jax.Array


class AppliedRateState(NamedTuple):
    """The rate that was applied, where a schedule or an array says which.

    Attributes:
      applied_rate: fp32 scalar, the rate of the last update (0 before the first): a record, which nothing reads.
      schedule_count: int32 scalar, the number of updates so far: what the schedule is given next.
    """

    applied_rate: jax.Array
    schedule_count: jax.Array


def scale_by_learning_rate(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Multiply updates by minus the learning rate, and keep the rate in the state.

    Read the rate of the last update with `lbopt.optimizer_metrics(opt_state)["learning_rate"]`. To set it, give a number and
    replace it in the state, `optax.tree_utils.tree_set(opt_state, learning_rate=0.01)`, or use `optax.inject_hyperparams`.
    A schedule's rate is its own: the state has no leaf called `learning_rate` then, and `tree_set` raises `KeyError`. The same holds where the
    trust ratio looks at the rate too (decoupled decay, `clip_mode="clip"`). How many updates there were is `schedule_count`
    here; `optax.tree_utils.tree_get(opt_state, "count")` finds that of the moments in `lamb` and `lans`.

    Args:
      learning_rate: a number, a traced scalar, or a schedule: optimizer step (0 at the first update) -> rate.

    Returns:
      A transform whose state is `LearningRateState` for a number, else `AppliedRateState`.

    Raises:
      ValueError: if a plain number is negative or not finite.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_learning_rate(0.5)
    >>> state = optax.tree_utils.tree_set(tx.init(None), learning_rate=0.25)
    >>> float(tx.update({"w": jnp.ones(())}, state)[0]["w"])
    -0.25

    Note:
      Differs from `optax.scale_by_learning_rate` in that the state holds the rate, so that logs show what was applied
      and not what somebody computed beside it.
    """
    settable = arguments.is_number(learning_rate)
    if not callable(learning_rate):
        arguments.require_at_least("learning_rate", learning_rate, 0)

    def init_fn(params: types.Params) -> LearningRateState | AppliedRateState:
        del params
        if settable:
            return LearningRateState(jnp.asarray(learning_rate, float))
        return AppliedRateState(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))

    def update_fn(
        updates: optax.Updates, state: LearningRateState | AppliedRateState, params: types.Params | None = None
    ) -> tuple[optax.Updates, LearningRateState | AppliedRateState]:
        del params
        tree.check_inexact(updates, "the gradient")
        if isinstance(state, LearningRateState):
            return _scaled(updates, state.learning_rate), state
        rate = learning_rate(state.schedule_count) if callable(learning_rate) else learning_rate
        applied = jnp.asarray(rate, jnp.float32)
        return _scaled(updates, rate), AppliedRateState(applied, optax.safe_increment(state.schedule_count))

    return optax.GradientTransformation(init_fn, update_fn)


def as_schedule(learning_rate: optax.ScalarOrSchedule) -> optax.ScalarOrSchedule:
    """Return a number as a constant schedule: where the trust ratio looks at the rate too, it cannot be set in one state alone."""
    if not arguments.is_number(learning_rate):
        return learning_rate
    arguments.require_at_least("learning_rate", learning_rate, 0)
    return optax.constant_schedule(learning_rate)


def _scaled(updates: optax.Updates, rate: float | jax.Array) -> optax.Updates:
    def scale(u: jax.Array) -> jax.Array:
        wide = tree.wide_dtype(u.dtype)
        return (-jnp.asarray(rate, wide) * u.astype(wide)).astype(u.dtype)

    return jax.tree.map(scale, updates)
