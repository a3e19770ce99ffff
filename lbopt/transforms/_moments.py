"""The moment estimates under LAMB and LARS: arithmetic in fp32 (or wider) whatever the dtype of the parameters."""

from __future__ import annotations

import math
import numbers
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from lbopt import tree, types
from lbopt.transforms import _arguments

Debias = bool | Literal["in_state"]


class LambMomentsState(NamedTuple):
    """Adam's moments.

    Attributes:
      count: int32 scalar, the number of updates so far.
      mu: first moments, shaped like the parameters.
      nu: second moments, shaped like the parameters; real.
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
    r"""Replace each gradient by LAMB's elementwise direction, Adam's before any norm.

        m = b1 m + (1 - b1) g ;   v = b2 v + (1 - b2) g^2
        out = m' / (sqrt(v' + eps_root) + eps),   m' = m / (1 - b1^t), v' = v / (1 - b2^t) if debias else m, v

    Args:
      b1: decay rate of the first moment, in [0, 1).
      b2: decay rate of the second moment, in [0, 1).
      eps: outside the root, >= 0; 1e-6 in ALBERT's and TFA's LAMB.
      eps_root: inside the root, >= 0.
      debias: divide by 1 - b^t as in Algorithm 2 of the paper; ALBERT's and You's code do not. "in_state" divides the
        kept moments themselves, every step, as NUS's PyTorch LAMB does with its flag on: a bug, for reproductions only.
      grad_averaging: False leaves the factor 1 - b1 away: m = b1 m + g (an option of apex).
      mu_dtype: of the kept first moment; None for fp32 (or wider, for wider leaves). bf16 saves 2 bytes per parameter
        and the traffic for them; what is kept is what is used.
      nu_dtype: of the kept second moment. bf16 has 8 bits: with b2 above about 0.996 a step changes v by less than
        half of its last bit and v stops following a gradient that changes slowly.

    Returns:
      A transform whose state is `LambMomentsState`; its output keeps the dtype of the gradients. Of complex ones v is the mean of |g|^2.

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
      Finite gradients beyond 2^62 (4.6e18) count as 2^62. In Optax their squares are infinite in fp32 from 1.8e19 on, and the weights
      stand still for ever. Squares below 1e-38 are 0 in both, which an eps above 1e-12 covers.
    """
    check_moments(b1, b2, eps, eps_root, mu_dtype, nu_dtype)
    if not isinstance(debias, str) or debias != "in_state":
        debias = _arguments.require_flag("debias", debias)
    grad_averaging = _arguments.require_flag("grad_averaging", grad_averaging)

    def init_fn(params: types.Params) -> LambMomentsState:
        return init_moments(params, "scale_by_lamb_moments", mu_dtype, nu_dtype)

    def update_fn(
        updates: optax.Updates, state: LambMomentsState, params: types.Params | None = None
    ) -> tuple[optax.Updates, LambMomentsState]:
        del params
        _arguments.require_state(state, LambMomentsState, "scale_by_lamb_moments")
        tree.check_updates(updates, state.mu)
        count = optax.safe_increment(state.count)
        mu, nu = next_moments(updates, state, b1, b2, count, grad_averaging, debias == "in_state")

        def direction(g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            m, v = debiased(m, v, b1, b2, count, debias is True)
            return divided(m, jnp.sqrt(v + eps_root) + eps).astype(g.dtype)

        return jax.tree.map(direction, updates, mu, nu), LambMomentsState(count, mu, nu)

    return optax.GradientTransformation(init_fn, update_fn)


def check_moments(b1, b2, eps, eps_root, mu_dtype, nu_dtype) -> None:
    """Raise ValueError, naming the argument, unless all are in range."""
    _arguments.require_decay_rate("b1", b1)
    _arguments.require_decay_rate("b2", b2)
    _arguments.require_at_least("eps", eps, 0)
    _arguments.require_at_least("eps_root", eps_root, 0)
    _arguments.require_float_dtype("mu_dtype", mu_dtype)
    _arguments.require_float_dtype("nu_dtype", nu_dtype)


def init_moments(
    params: types.Params, transform: str, mu_dtype: Any, nu_dtype: Any
) -> LambMomentsState:
    """Return moments of zero."""
    _arguments.require_float_leaves(params, transform, mu_dtype=mu_dtype)
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
    """Return both moments after this update, in the dtypes they are kept in."""
    updates = jax.tree.map(squarable, updates)

    def first(g: jax.Array, m: jax.Array) -> jax.Array:
        wide = tree.wide_dtype(m.dtype)
        new = tree.scaled(m.astype(wide), b1) + tree.scaled(
            g.astype(wide), 1 - b1 if grad_averaging else 1
        )
        return (_undone(new, b1, count) if divide_state else new).astype(m.dtype)

    def second(g: jax.Array, v: jax.Array) -> jax.Array:
        wide = tree.wide_dtype(v.dtype)
        square = tree.square(g if jnp.iscomplexobj(g) else g.astype(wide)).astype(wide)
        new = b2 * v.astype(wide) + (1 - b2) * square
        return (_undone(new, b2, count) if divide_state else new).astype(v.dtype)

    return jax.tree.map(first, updates, state.mu), jax.tree.map(second, updates, state.nu)


def squarable(g: jax.Array) -> jax.Array:
    """Return a gradient in fp32 or wider, with finite numbers beyond 2^62 (4.6e18) as 2^62.

    The square of 1e20 is infinite in fp32, and a second moment that was infinite once stays so: its weight would never move again.
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
    m, v = (x.astype(tree.wide_dtype(x.dtype)) for x in (m, v))
    if debias:
        m, v = _undone(m, b1, count), _undone(v, b2, count)
    return m, v


def divided(x: jax.Array, below: jax.Array) -> jax.Array:
    """Return x / below, and x where below is 0: with eps = 0 a gradient that was always 0 gives 0 and not NaN."""
    return tree.map_parts(lambda part: part / jnp.where(below > 0, below, 1), x)


class LarsMomentumState(NamedTuple):
    """Heavy-ball momentum.

    Attributes:
      momentum: the velocity, shaped like the parameters.
      count: updates so far, kept only where the first one is another.
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

        vel = momentum * vel + (1 - dampening) u ;   out = vel,   with nesterov: out = u + momentum * vel

    In LARS as its authors and TensorFlow run it, u already carries the learning rate and the trust ratio ("inside the
    momentum"), so put this transform last.

    Args:
      momentum: decay rate of the velocity, in [0, 1).
      nesterov: return u + momentum * vel.
      dampening: in [0, 1); equal to `momentum` it makes the velocity an average.
      undamped_start: the first velocity is u itself, as in PyTorch.
      momentum_dtype: of the kept velocity; None for fp32 (or wider, for wider leaves).

    Returns:
      A transform whose state is `LarsMomentumState`; its output keeps the dtype of the updates.

    Raises:
      ValueError: if an argument is out of range.

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
      `optax.trace` with the velocity in fp32, the output in the dtype of the updates, and dampening.
    """
    _arguments.require_decay_rate("momentum", momentum)
    _arguments.require_decay_rate("dampening", dampening)
    _arguments.require_float_dtype("momentum_dtype", momentum_dtype)
    nesterov = _arguments.require_flag("nesterov", nesterov)
    undamped_start = _arguments.require_flag("undamped_start", undamped_start)
    damped = not (_arguments.is_number(dampening) and dampening == 0)

    def init_fn(params: types.Params) -> LarsMomentumState:
        _arguments.require_float_leaves(
            params, "scale_by_lars_momentum", momentum_dtype=momentum_dtype
        )
        count = jnp.zeros((), jnp.int32) if damped and undamped_start else None
        return LarsMomentumState(_zeros(params, momentum_dtype), count)

    def update_fn(
        updates: optax.Updates, state: LarsMomentumState, params: types.Params | None = None
    ) -> tuple[optax.Updates, LarsMomentumState]:
        del params
        _arguments.require_state(state, LarsMomentumState, "scale_by_lars_momentum")
        tree.check_updates(updates, state.momentum)
        weight = 1 - dampening if damped else 1
        count = state.count
        if count is not None:
            weight, count = jnp.where(count == 0, 1, weight), optax.safe_increment(count)

        def accumulate(u: jax.Array, vel: jax.Array) -> jax.Array:
            wide = tree.wide_dtype(vel.dtype)
            return (
                tree.scaled(vel.astype(wide), momentum) + tree.scaled(u.astype(wide), weight)
            ).astype(vel.dtype)

        def output(u: jax.Array, vel: jax.Array) -> jax.Array:
            wide = tree.wide_dtype(vel.dtype)
            return (
                u.astype(wide) + tree.scaled(vel.astype(wide), momentum) if nesterov else vel
            ).astype(u.dtype)

        velocity = jax.tree.map(accumulate, updates, state.momentum)
        return jax.tree.map(output, updates, velocity), LarsMomentumState(velocity, count)

    return optax.GradientTransformation(init_fn, update_fn)


def _zeros(params: types.Params, dtype: Any = None) -> types.PyTree:
    return jax.tree.map(lambda p: jnp.zeros_like(p, dtype or tree.wide_dtype(p.dtype)), params)


def _undone(x: jax.Array, decay: float | jax.Array, count: jax.Array) -> jax.Array:
    """Return x / (1 - decay^count)."""
    return tree.map_parts(lambda part: part / _one_minus_power(decay, count, part.dtype), x)


def _one_minus_power(decay: float | jax.Array, count: jax.Array, dtype) -> jax.Array:
    """Return 1 - decay^count to full precision; the logarithm of a plain number is taken in float64."""
    if isinstance(decay, numbers.Real):
        log_decay = jnp.asarray(math.log(float(decay)) if float(decay) > 0 else -math.inf, dtype)
    else:
        log_decay = jnp.log(decay).astype(dtype)
    return -jnp.expm1(count.astype(dtype) * log_decay)
