"""The moment estimates under LAMB and LARS, kept in fp32 (or wider) whatever the parameter dtype."""

from __future__ import annotations

import math
import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import tree, types
from lbopt.transforms import arguments


class LambMomentsState(NamedTuple):
    """Adam's moments.

    Attributes:
      count: int32 scalar, the number of updates so far.
      mu: first moments, fp32 or wider, shaped like the parameters.
      nu: second moments, likewise.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: types.PyTree
    nu: types.PyTree


def scale_by_lamb_moments(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-6, eps_root: float = 0.0, debias: bool = True
) -> optax.GradientTransformation:
    r"""Replace each gradient by LAMB's elementwise direction, Adam's before any norm.

        m = b1 m + (1 - b1) g ;   v = b2 v + (1 - b2) g^2
        out = m' / (sqrt(v' + eps_root) + eps),   m' = m / (1 - b1^t), v' = v / (1 - b2^t) if debias else m, v

    Args:
      b1: decay rate of the first moment, in [0, 1).
      b2: decay rate of the second moment, in [0, 1).
      eps: outside the root, >= 0; 1e-6 in ALBERT's and TFA's LAMB.
      eps_root: inside the root, >= 0.
      debias: divide by 1 - b^t as in Algorithm 2 of the paper; ALBERT's and You's code do not.

    Returns:
      A transform whose state is `LambMomentsState`; its output keeps the dtype of the gradients.

    Raises:
      ValueError: naming the argument that is out of range.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_lamb_moments(eps=0.0)
    >>> updates, _ = tx.update({"w": jnp.array([2.0, -3.0])}, tx.init({"w": jnp.zeros(2)}))
    >>> [round(float(u), 6) for u in updates["w"]]
    [1.0, -1.0]

    References:
      You et al., arXiv 1904.00962, Algorithm 2, lines up to r_t.

    Note:
      Differs from `optax.scale_by_adam` in keeping both moments in fp32 for bf16 parameters, in the `debias` switch,
      and in computing 1 - b^t as -expm1(t log b): in fp32 the plain form is wrong by 1e-5 at b2 = 0.999, t = 1.
    """
    arguments.require_decay_rate("b1", b1)
    arguments.require_decay_rate("b2", b2)
    arguments.require_at_least("eps", eps, 0)
    arguments.require_at_least("eps_root", eps_root, 0)

    def init_fn(params: types.Params) -> LambMomentsState:
        return LambMomentsState(jnp.zeros((), jnp.int32), _zeros(params), _zeros(params))

    def update_fn(
        updates: optax.Updates, state: LambMomentsState, params: types.Params | None = None
    ) -> tuple[optax.Updates, LambMomentsState]:
        del params
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda g, m: b1 * m + (1 - b1) * g.astype(m.dtype), updates, state.mu)
        nu = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * jnp.square(g.astype(v.dtype)), updates, state.nu)

        def direction(g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            if debias:
                m, v = m / _one_minus_power(b1, count, m.dtype), v / _one_minus_power(b2, count, v.dtype)
            return (m / (jnp.sqrt(v + eps_root) + eps)).astype(g.dtype)

        return jax.tree.map(direction, updates, mu, nu), LambMomentsState(count, mu, nu)

    return optax.GradientTransformation(init_fn, update_fn)


class LarsMomentumState(NamedTuple):
    """Heavy-ball momentum.

    Attributes:
      momentum: the velocity, fp32 or wider, shaped like the parameters.
    """

    momentum: types.PyTree


def scale_by_lars_momentum(momentum: float = 0.9, nesterov: bool = False) -> optax.GradientTransformation:
    r"""Accumulate updates into a velocity.

        vel = momentum * vel + u ;   out = vel,   with nesterov: out = u + momentum * vel

    In LARS as its authors and TensorFlow run it, u already carries the learning rate and the trust ratio ("inside the
    momentum"), so put this transform last.

    Args:
      momentum: decay rate of the velocity, in [0, 1).
      nesterov: return u + momentum * vel.

    Returns:
      A transform whose state is `LarsMomentumState`; its output keeps the dtype of the updates.

    Raises:
      ValueError: if `momentum` is out of range.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_lars_momentum(0.5)
    >>> state = tx.init({"w": jnp.zeros(1)})
    >>> for _ in range(2):
    ...     updates, state = tx.update({"w": jnp.ones(1)}, state)
    >>> float(updates["w"][0])
    1.5

    References:
      You et al., arXiv 1708.03888, Algorithm 1.

    Note:
      `optax.trace` with the velocity in fp32 and the output in the dtype of the updates.
    """
    arguments.require_decay_rate("momentum", momentum)

    def init_fn(params: types.Params) -> LarsMomentumState:
        return LarsMomentumState(_zeros(params))

    def update_fn(
        updates: optax.Updates, state: LarsMomentumState, params: types.Params | None = None
    ) -> tuple[optax.Updates, LarsMomentumState]:
        del params
        velocity = jax.tree.map(lambda u, vel: momentum * vel + u.astype(vel.dtype), updates, state.momentum)

        def output(u: jax.Array, vel: jax.Array) -> jax.Array:
            return (u.astype(vel.dtype) + momentum * vel if nesterov else vel).astype(u.dtype)

        return jax.tree.map(output, updates, velocity), LarsMomentumState(velocity)

    return optax.GradientTransformation(init_fn, update_fn)


def _zeros(params: types.Params) -> types.PyTree:
    return jax.tree.map(lambda p: jnp.zeros_like(p, tree.wide_dtype(p.dtype)), params)


def _one_minus_power(decay: float | jax.Array, count: jax.Array, dtype) -> jax.Array:
    """Return 1 - decay^count to full precision; the logarithm of a plain number is taken in float64."""
    if isinstance(decay, numbers.Real):
        log_decay = jnp.asarray(math.log(float(decay)) if float(decay) > 0 else -math.inf, dtype)
    else:
        log_decay = jnp.log(decay).astype(dtype)
    return -jnp.expm1(count.astype(dtype) * log_decay)
