"""PSGD-Kron: gradients whitened by a Kronecker product that follows them by small steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, tree, types
from lbopt.errors import require_choice
from lbopt.linalg import matmul, of_each
from lbopt.transforms import _arguments, _matrix_view, _moments, _per_path

Diagonal = Literal["long", "one", "both"]
_BALANCE_PROBABILITY = 0.01
_DAMPING = 3.4526698e-4  # the root of the distance from 1 to the next fp32 number
_LARGEST_RMS = 1.1


class KronState(NamedTuple):
    """The momentum and the factors of the preconditioner.

    Attributes:
      count: int32 scalar, number of updates so far; noise is made of it and the seed.
      since: int32 scalar, number of updates since the preconditioner's last one.
      mu: First moments, a pytree shaped like the parameters.
      factors: Path of each matrix -> [matrices, n, n], upper triangular, or [matrices, n], the
        diagonal, of its inputs, under "in", and of its outputs, under "out".
    """

    count: jax.Array  # type: ignore[assignment]
    since: jax.Array
    mu: types.PyTree
    factors: dict[str, dict[str, jax.Array]]


def update_probability(count: jax.Array) -> jax.Array:
    """Return how often the preconditioner follows: always for 500 steps, then down to 3 %.

    >>> import jax.numpy as jnp
    >>> [round(float(update_probability(jnp.int32(n))), 2) for n in (1, 500, 1500, 10_000)]
    [1.0, 1.0, 0.37, 0.03]
    """
    return jnp.clip(jnp.exp(-0.001 * (count.astype(jnp.float32) - 500)), 0.03, 1.0)


def scale_by_kron(
    b1: float | jax.Array = 0.9,
    preconditioner_rate: float | jax.Array = 0.1,
    *,
    probability: Callable[[jax.Array], jax.Array] | float | None = None,
    diagonal: Diagonal = "long",
    max_side: int = 8192,
    initial_scale: float | jax.Array = 1.0,
    seed: int | jax.Array = 0,
    dimension_numbers: _matrix_view.DimensionNumbers = None,
    stacked: types.Stacked = None,
) -> optax.GradientTransformation:
    r"""Replace each matrix among the updates by its whitened momentum, PSGD with a Kronecker form.

        m = b1 m + (1 - b1) g ;   x = m' + d mean|m'| v ,  v normal noise
        A = Q_in x Q_out^T ;   B = Q_in^-T v Q_out^-1
        Q_in <- Q_in - rate triu(A A^T - B B^T) Q_in / ||A A^T + B B^T||, Q_out likewise
        out = Q_in^T Q_in m' Q_out^T Q_out, with an RMS of at most 1.1

    The norm is a lower bound of the spectral one. Leaves that are no matrices pass unchanged.
    Gradients beyond 2^40 (1e12) count as 2^40, so that their squares stay finite.

    Args:
      b1: Decay rate of the first moment, in [0, 1).
      preconditioner_rate: Size of the steps of the factors, > 0.
      probability: Function of the number of updates so far -> share of the updates in which the
        factors follow, or that share; None for one that falls from 1 to 0.03.
      diagonal: Which sides have a diagonal factor: "long" (those above `max_side`), "one" (the
        longer side too) or "both".
      max_side: Longest side with a triangular factor.
      initial_scale: Scale > 0 of the first preconditioner.
      seed: Seed of the noise.
      dimension_numbers: The axes of each matrix (see `scale_by_newton_schulz`).
      stacked: Leaves that are stacks of layers, each layer a matrix.

    Returns:
      A transform whose state is `KronState`; its output keeps the dtype of the updates. The
      arithmetic is in fp32 or wider.

    Raises:
      UserError: For an argument that is out of range, or axes that do not fit the parameters.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_kron()
    >>> grads = {"dense": {"kernel": jnp.diag(jnp.array([3.0, 1.0]))}}
    >>> state = tx.init(grads)
    >>> update = jax.jit(tx.update)
    >>> for _ in range(100):
    ...     updates, state = update(grads, state)
    >>> [bool(0.5 < u < 2) for u in jnp.diag(updates["dense"]["kernel"])]
    [True, True]

    References:
      Li, Preconditioned Stochastic Gradient Descent, arXiv:1512.04202; Curvature-Informed SGD via
      General Purpose Lie-Group Preconditioners, arXiv:2402.04553.
      evanatyourservice/psgd_jax@be955244:psgd_jax/kron.py.

    Note:
      The public code damps and clips a scanned stack of layers as a whole; here each matrix. While
      gradients are zero the factors grow, as in the public code.
    """
    _scalars.require_decay_rate("b1", b1)
    _scalars.require_above("preconditioner_rate", preconditioner_rate, 0)
    _scalars.require_above("initial_scale", initial_scale, 0)
    require_choice("diagonal", diagonal, ("long", "one", "both"))
    max_side = _scalars.whole("max_side", max_side)
    seed = _scalars.seed("seed", seed)
    if probability is None:
        probability = update_probability
    if not callable(probability):
        _scalars.checked("probability", probability, "a number in (0, 1]", lambda n: 0 < n <= 1)
    matrices = _matrix_view.Matrices(dimension_numbers, stacked)

    def init_fn(params: types.Params) -> KronState:
        count, since = (jnp.zeros((), jnp.int32) for _ in range(2))
        if _per_path.is_placeholder(params):
            return KronState(count, since, params, _per_path.UNKNOWN_PARAMS)
        _arguments.require_real_leaves(params, "scale_by_kron")
        matrices.record(params)

        def start(side: str, view: _matrix_view.MatrixView, dtype: Any) -> jax.Array:
            sides = (view.fan_in, view.fan_out)
            n = sides[side == "out"]
            is_longer = n == max(sides) and not (side == "in" and sides[0] == sides[1])
            flat = n == 1 or n > max_side or diagonal == "both" or (diagonal == "one" and is_longer)
            shape = (view.count, n) if flat else (view.count, n, n)
            one = jnp.ones(n, dtype)
            return jnp.broadcast_to((one if flat else jnp.diag(one)) * initial_scale**0.5, shape)

        factors = {
            side: matrices.collect(params, functools.partial(start, side)) for side in ("in", "out")
        }
        mu = jax.tree.map(lambda p: jnp.zeros_like(p, tree.wide_dtype(p.dtype)), params)
        return KronState(count, since, mu, factors)

    def step(
        t: jax.Array,
        follows: jax.Array,
        balances: jax.Array,
        g: jax.Array,
        m: jax.Array,
        noise: jax.Array,
        q_in: jax.Array,
        q_out: jax.Array,
    ) -> tuple[jax.Array, ...]:
        wide = _matrix_view.bounded(g.astype(m.dtype))
        m = b1 * m + (1 - b1) * wide
        mean = m / _moments.one_minus_power(b1, t, m.dtype)

        def follow() -> tuple[jax.Array, jax.Array]:
            of_in, of_out = jax.lax.cond(
                balances, lambda: _balanced(q_in, q_out), lambda: (q_in, q_out)
            )
            damping = _DAMPING * jnp.mean(jnp.abs(mean), (-1, -2), keepdims=True)
            return _followed(of_in, of_out, mean + damping * noise, noise, preconditioner_rate)

        q_in, q_out = jax.lax.cond(follows, follow, lambda: (q_in, q_out))
        out = _times(q_in, _times(q_in, mean), transposed=True)
        out = _times(q_out, _times(q_out, out.mT), transposed=True).mT
        rms = jnp.sqrt(jnp.mean(out**2, (-1, -2), keepdims=True))
        out = out / jnp.maximum(rms / _LARGEST_RMS, 1)
        return out.astype(g.dtype), m, noise, q_in, q_out

    def update_fn(
        updates: optax.Updates, state: KronState, params: types.Params | None = None
    ) -> tuple[optax.Updates, KronState]:
        del params
        _arguments.require_state(state, KronState)
        tree.check_updates(updates, state.mu)
        count = optax.safe_increment(state.count)
        share = probability(count) if callable(probability) else probability
        since = state.since + 1
        follows = since.astype(jnp.float32) >= 1 / share
        key = jax.random.fold_in(jax.random.key(seed), state.count)
        balances = jax.random.bernoulli(jax.random.fold_in(key, 0), _BALANCE_PROBABILITY)
        place = iter(range(1, 1 + len(jax.tree.leaves(updates))))

        def noise(m: jax.Array) -> jax.Array:
            own = jax.random.fold_in(key, next(place))
            spec = _per_path.typed_spec(m)
            where = {"out_sharding": jax.typeof(m).sharding} if any(spec) else {}
            return jax.random.normal(own, m.shape, m.dtype, **where)

        directions, new = _matrix_view.map_matrices(
            functools.partial(step, count, follows, balances),
            matrices,
            updates,
            state.factors["in"],
            state.factors["out"],
            like=(state.mu, jax.tree.map(noise, state.mu)),
        )
        mu, _, q_in, q_out = new
        factors = {"in": q_in, "out": q_out}
        return directions, KronState(count, jnp.where(follows, 0, since), mu, factors)

    return optax.GradientTransformation(init_fn, update_fn)


def _is_diagonal(q: jax.Array) -> bool:
    return q.ndim == 2


def _times(q: jax.Array, x: jax.Array, transposed: bool = False) -> jax.Array:
    """Return Q x, or Q^T x."""
    if _is_diagonal(q):
        return q[:, :, None] * x
    return matmul(q.mT if transposed else q, x)


def _solved(q: jax.Array, x: jax.Array) -> jax.Array:
    """Return Q^-T x."""
    if _is_diagonal(q):
        return x / q[:, :, None]
    solve = functools.partial(
        jax.lax.linalg.triangular_solve, left_side=True, lower=False, transpose_a=True
    )
    return of_each(solve, q, x)


def _balanced(q_in: jax.Array, q_out: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return both factors with equal largest entries."""
    sizes = [jnp.max(jnp.abs(q), tuple(range(1, q.ndim)), keepdims=True) for q in (q_in, q_out)]
    flat = [size.reshape(-1) for size in sizes]
    mean = jnp.sqrt(flat[0] * flat[1])
    return tuple(
        q * (mean.reshape(size.shape) / size) for q, size in zip((q_in, q_out), sizes, strict=True)
    )  # type: ignore[return-value]


def _followed(
    q_in: jax.Array,
    q_out: jax.Array,
    x: jax.Array,
    noise: jax.Array,
    rate: float | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return both factors after a step towards whitening x."""
    a = _times(q_out, _times(q_in, x).mT).mT
    b = _solved(q_out, _solved(q_in, noise).mT).mT
    return _one_followed(q_in, a, b, rate), _one_followed(q_out, a.mT, b.mT, rate)


def _one_followed(q: jax.Array, a: jax.Array, b: jax.Array, rate: float | jax.Array) -> jax.Array:
    tiny = jnp.finfo(q.dtype).tiny
    if _is_diagonal(q):
        of_a, of_b = (jnp.sum(x**2, -1) for x in (a, b))
        size = jnp.max(jnp.abs(of_a + of_b), -1, keepdims=True)
        return q - rate * (of_a - of_b) * q / (size + tiny)
    of_a, of_b = (matmul(x, x.mT) for x in (a, b))
    size = jax.vmap(_norm_lower_bound)(of_a + of_b)[:, None, None]
    return q - matmul(jnp.triu(rate * (of_a - of_b)) / (size + tiny), q)


def _norm_lower_bound(s: jax.Array) -> jax.Array:
    """Return a lower bound of the spectral norm of a symmetric matrix."""
    largest = jnp.max(jnp.abs(s))
    scaled = s / jnp.where(largest > 0, largest, 1)
    squares = jnp.sum(scaled**2, 0)
    column = scaled[:, jnp.argmax(squares)]
    once = matmul(scaled, column[:, None])[:, 0]
    size = jnp.linalg.norm(once)
    once = once / jnp.where(size > 0, size, 1)
    return largest * jnp.linalg.norm(matmul(scaled, once[:, None]))
