"""The moments of LAMB and LARS, in fp32 (or wider) whatever the dtype of the parameters.

LAMB is layerwise adaptive moments for batch training, LARS layerwise adaptive rate scaling.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from lbopt import _scalars, tree, types
from lbopt.transforms import _arguments

Debias = bool | Literal["in_state"]


class LambMomentsState(NamedTuple):
    """Adam's moments.

    Attributes:
      count: int32 scalar, number of updates so far.
      mu: First moments, a pytree shaped like the parameters.
      nu: Second moments, a pytree of real arrays shaped like the parameters.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: types.PyTree
    nu: types.PyTree


def scale_by_lamb_moments(
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.999,
    eps: float | jax.Array = 1e-6,
    eps_root: float | jax.Array = 0.0,
    debias: Debias = True,
    *,
    grad_averaging: bool = True,
    mu_dtype: DTypeLike | None = None,
    nu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""Replace each gradient by LAMB's elementwise direction, that of Adam, before any norm.

        m = b1 m + (1 - b1) g ;   v = b2 v + (1 - b2) g^2
        out = m' / (sqrt(v' + eps_root) + eps)
        m' = m / (1 - b1^t), v' = v / (1 - b2^t) with debias, else m, v

    Args:
      b1: Decay rate of the first moment, in [0, 1).
      b2: Decay rate of the second moment, in [0, 1).
      eps: Constant >= 0 added to the root; 1e-6 in the LAMB of ALBERT and TensorFlow Addons.
      eps_root: Constant >= 0 added inside the root.
      debias: Whether moments are divided by 1 - b^t, as in Algorithm 2 of the paper; the codes of
        ALBERT and You do not. "in_state" divides the kept moments themselves at every step, a bug
        that NUS's PyTorch LAMB has with its flag on, for reproductions only.
      grad_averaging: Whether the gradient enters the first moment with 1 - b1. False, an option of
        apex, makes it m = b1 m + g.
      mu_dtype: Dtype in which the first moment is kept and used; None for fp32, or the leaf's dtype
        if that is wider. bf16 saves 2 bytes per parameter and their traffic.
      nu_dtype: Dtype in which the second moment is kept and used. bf16 has 8 bits: with b2 above
        about 0.996 a step changes v by less than half of its last bit, so v stops following a
        gradient that changes slowly.

    Returns:
      A transform whose state is `LambMomentsState`; its output keeps the dtype of the gradients.
      For complex gradients v is the mean of |g|^2.

    Raises:
      UserError: For an argument that is out of range.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_lamb_moments(eps=0.0)
    >>> updates, _ = tx.update({"w": jnp.array([2.0, -3.0])}, tx.init({"w": jnp.zeros(2)}))
    >>> [round(float(u), 6) for u in updates["w"]]
    [1.0, -1.0]

    References:
      You et al., arXiv:1904.00962v5, Algorithm 2, lines up to r_t.

    Note:
      Differs from `optax.scale_by_adam` in the `debias` switch, in keeping both moments in fp32 for
      bf16 parameters, and in taking 1 - b^t as -expm1(t log b); in fp32 the plain form is wrong by
      1e-5 at b2 = 0.999, t = 1. Finite gradients beyond 2^62 (4.6e18) count as 2^62. In Optax their
      squares are infinite in fp32 from 1.8e19 on, and the weights never move again. Squares below
      1e-38 are 0 in both, which an eps above 1e-12 covers.
    """
    check_moments(b1, b2, eps, eps_root, mu_dtype, nu_dtype)
    if not isinstance(debias, str) or debias != "in_state":
        debias = _scalars.require_flag("debias", debias)
    grad_averaging = _scalars.require_flag("grad_averaging", grad_averaging)

    def init_fn(params: types.Params) -> LambMomentsState:
        return init_moments(params, mu_dtype, nu_dtype)

    def update_fn(
        updates: optax.Updates, state: LambMomentsState, params: types.Params | None = None
    ) -> tuple[optax.Updates, LambMomentsState]:
        del params
        _arguments.require_state(state, LambMomentsState)
        tree.check_updates(updates, state.mu)
        count = optax.safe_increment(state.count)
        mu, nu = next_moments(updates, state, b1, b2, count, grad_averaging, debias == "in_state")

        def direction(g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            m, v = debiased(m, v, b1, b2, count, debias is True)
            return divided(m, jnp.sqrt(v + eps_root) + eps).astype(g.dtype)

        return jax.tree.map(direction, updates, mu, nu), LambMomentsState(count, mu, nu)

    return optax.GradientTransformation(init_fn, update_fn)


def check_moments(
    b1: float | jax.Array,
    b2: float | jax.Array,
    eps: float | jax.Array,
    eps_root: float | jax.Array,
    mu_dtype: DTypeLike | None,
    nu_dtype: DTypeLike | None,
) -> None:
    """Raise `UserError` unless all arguments are in range."""
    _scalars.require_decay_rate("b1", b1)
    _scalars.require_decay_rate("b2", b2)
    _scalars.require_at_least("eps", eps, 0)
    _scalars.require_at_least("eps_root", eps_root, 0)
    _arguments.require_float_dtype("mu_dtype", mu_dtype)
    _arguments.require_float_dtype("nu_dtype", nu_dtype)


def init_moments(
    params: types.Params, mu_dtype: DTypeLike | None, nu_dtype: DTypeLike | None
) -> LambMomentsState:
    """Return moments of zero."""
    _arguments.require_float_leaves(params, mu_dtype=mu_dtype)
    nu = jax.tree.map(lambda p: jnp.zeros_like(p, nu_dtype or tree.real_dtype(p.dtype)), params)
    return LambMomentsState(jnp.zeros((), jnp.int32), _zeros(params, mu_dtype), nu)


def next_moments(
    updates: optax.Updates,
    state: LambMomentsState,
    b1: float | jax.Array,
    b2: float | jax.Array,
    count: jax.Array,
    grad_averaging: bool = True,
    divide_state: bool = False,
) -> tuple[types.PyTree, types.PyTree]:
    """Return both moments after this update, in the dtypes they are kept in.

    Args:
      updates: The gradients.
      state: The moments before.
      b1: Decay rate of the first moment.
      b2: Decay rate of the second moment.
      count: int32 scalar, number of this update, 1 for the first.
      grad_averaging: Whether the first moment takes (1 - b1) g rather than g.
      divide_state: Whether the moments themselves are divided by 1 - b^t.
    """
    updates = jax.tree.map(squarable, updates)
    weight = 1 - b1 if grad_averaging else 1

    def first(g: jax.Array, m: jax.Array) -> jax.Array:
        wide = tree.wide_dtype(m.dtype)
        new = tree.scaled(m.astype(wide), b1) + tree.scaled(g.astype(wide), weight)
        return (_debiased(new, b1, count) if divide_state else new).astype(m.dtype)

    def second(g: jax.Array, v: jax.Array) -> jax.Array:
        wide = tree.wide_dtype(v.dtype)
        square = tree.square(g if jnp.iscomplexobj(g) else g.astype(wide)).astype(wide)
        new = b2 * v.astype(wide) + (1 - b2) * square
        return (_debiased(new, b2, count) if divide_state else new).astype(v.dtype)

    return jax.tree.map(first, updates, state.mu), jax.tree.map(second, updates, state.nu)


def squarable(g: jax.Array) -> jax.Array:
    """Return a gradient in fp32 or wider, with finite numbers beyond 2^62 (4.6e18) as 2^62.

    The square of 1e20 is infinite in fp32. A second moment that was infinite once stays infinite,
    and its weight would never move again. For wider dtypes the limit is higher.
    """
    wide = g.astype(tree.wide_dtype(g.dtype))
    limit = 2.0 ** (jnp.finfo(wide.dtype).maxexp // 2 - 2)
    return tree.map_parts(lambda x: jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x), wide)


def debiased(
    m: jax.Array,
    v: jax.Array,
    b1: float | jax.Array,
    b2: float | jax.Array,
    count: jax.Array,
    debias: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return both moments in fp32 or wider, divided by 1 - b^t if asked."""
    m = m.astype(tree.wide_dtype(m.dtype))
    v = v.astype(tree.wide_dtype(v.dtype))
    if debias:
        return _debiased(m, b1, count), _debiased(v, b2, count)
    return m, v


def divided(x: jax.Array, below: jax.Array) -> jax.Array:
    """Return x / below, and x where below is 0.

    So with eps = 0, a gradient that was always 0 gives 0 and not NaN.
    """
    return tree.map_parts(lambda part: part / jnp.where(below > 0, below, 1), x)


class LarsMomentumState(NamedTuple):
    """Heavy-ball momentum.

    Attributes:
      momentum: The velocity, a pytree shaped like the parameters.
      count: int32 scalar, number of updates so far; None unless the first update is undamped and
        the others are damped.
    """

    momentum: types.PyTree
    count: jax.Array | None = None  # type: ignore[assignment]


def scale_by_lars_momentum(
    momentum: float | jax.Array = 0.9,
    nesterov: bool = False,
    *,
    dampening: float | jax.Array = 0.0,
    undamped_start: bool = False,
    momentum_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""Accumulate updates into a velocity.

        vel = momentum * vel + (1 - dampening) u
        out = vel,   with nesterov: out = u + momentum * vel

    In LARS as its authors and TensorFlow run it, u already carries the learning rate and the trust
    ratio ("inside the momentum"), so put this transform last.

    Args:
      momentum: Decay rate of the velocity, in [0, 1).
      nesterov: Whether the output is u + momentum * vel.
      dampening: Share of u that is left out of the velocity, in [0, 1). Equal to `momentum`, it
        makes the velocity an average.
      undamped_start: Whether the first velocity is u itself, as in PyTorch.
      momentum_dtype: Dtype in which the velocity is kept; None for fp32, or the leaf's dtype if
        that is wider.

    Returns:
      A transform whose state is `LarsMomentumState`; its output keeps the dtype of the updates.

    Raises:
      UserError: For an argument that is out of range.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_lars_momentum(0.5)
    >>> state = tx.init({"w": jnp.zeros(1)})
    >>> for _ in range(2):
    ...     updates, state = tx.update({"w": jnp.ones(1)}, state)
    >>> float(updates["w"][0])
    1.5

    References:
      You et al., arXiv:1708.03888v3, Algorithm 1.

    Note:
      `optax.trace`, with the velocity in fp32, the output in the dtype of the updates, and
      dampening.
    """
    _scalars.require_decay_rate("momentum", momentum)
    _scalars.require_decay_rate("dampening", dampening)
    _arguments.require_float_dtype("momentum_dtype", momentum_dtype)
    nesterov = _scalars.require_flag("nesterov", nesterov)
    undamped_start = _scalars.require_flag("undamped_start", undamped_start)
    damped = not (_scalars.is_number(dampening) and dampening == 0)

    def init_fn(params: types.Params) -> LarsMomentumState:
        _arguments.require_float_leaves(params, momentum_dtype=momentum_dtype)
        count = jnp.zeros((), jnp.int32) if damped and undamped_start else None
        return LarsMomentumState(_zeros(params, momentum_dtype), count)

    def update_fn(
        updates: optax.Updates, state: LarsMomentumState, params: types.Params | None = None
    ) -> tuple[optax.Updates, LarsMomentumState]:
        del params
        _arguments.require_state(state, LarsMomentumState)
        tree.check_updates(updates, state.momentum)

        # PyTorch takes the first update whole as the first velocity, and dampens only later ones.
        weight = 1 - dampening if damped else 1
        count = state.count
        if count is not None:
            weight = jnp.where(count == 0, 1, weight)
            count = optax.safe_increment(count)

        def accumulate(u: jax.Array, vel: jax.Array) -> jax.Array:
            wide = tree.wide_dtype(vel.dtype)
            kept = tree.scaled(vel.astype(wide), momentum)
            return (kept + tree.scaled(u.astype(wide), weight)).astype(vel.dtype)

        def output(u: jax.Array, vel: jax.Array) -> jax.Array:
            if not nesterov:
                return vel.astype(u.dtype)
            wide = tree.wide_dtype(vel.dtype)
            return (u.astype(wide) + tree.scaled(vel.astype(wide), momentum)).astype(u.dtype)

        velocity = jax.tree.map(accumulate, updates, state.momentum)
        return jax.tree.map(output, updates, velocity), LarsMomentumState(velocity, count)

    return optax.GradientTransformation(init_fn, update_fn)


def _zeros(params: types.Params, dtype: Any = None) -> types.PyTree:
    return jax.tree.map(lambda p: jnp.zeros_like(p, dtype or tree.wide_dtype(p.dtype)), params)


def _debiased(x: jax.Array, decay: float | jax.Array, count: jax.Array) -> jax.Array:
    """Return x / (1 - decay^count)."""
    return tree.map_parts(lambda part: part / one_minus_power(decay, count, part.dtype), x)


def one_minus_power(decay: float | jax.Array, count: jax.Array, dtype) -> jax.Array:
    """Return 1 - decay^count to full precision; a plain number's logarithm is taken in float64."""
    if isinstance(decay, numbers.Real):
        log_decay = jnp.asarray(math.log(float(decay)) if float(decay) > 0 else -math.inf, dtype)
    else:
        log_decay = jnp.log(decay).astype(dtype)
    return -jnp.expm1(count.astype(dtype) * log_decay)
