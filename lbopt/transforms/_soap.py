"""SOAP: Adam in the slowly rotating eigenbasis of Shampoo's preconditioner."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, tree, types
from lbopt.linalg import matmul, of_each
from lbopt.transforms import _arguments, _matrix_view, _moments, _per_path

_KL_START = 0.1
"""Initial eigenvalue of the factors of KL-SOAP."""


class SoapState(NamedTuple):
    """Adam's moments in the eigenbasis, and the statistics that the basis comes from.

    Attributes:
      count: int32 scalar, number of updates so far; the first only starts the statistics.
      mu: First moments of matrices, in their basis, a pytree shaped like the parameters.
      nu: Second moments, likewise.
      factors: Path of each matrix -> [matrices, n, n] of its inputs, under "in", and of its
        outputs, under "out": averages of gradient products.
      basis: Likewise, orthonormal eigenvectors as columns.
      eigenvalues: Likewise, [matrices, n]; empty unless the factors are those of KL-SOAP.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: types.PyTree
    nu: types.PyTree
    factors: dict[str, dict[str, jax.Array]]
    basis: dict[str, dict[str, jax.Array]]
    eigenvalues: dict[str, dict[str, jax.Array]]


def scale_by_soap(
    b1: float | jax.Array = 0.95,
    b2: float | jax.Array = 0.95,
    eps: float | jax.Array = 1e-8,
    shampoo_b2: float | jax.Array | None = None,
    every_steps: int = 10,
    *,
    debias: bool = True,
    kl: bool = False,
    dimension_numbers: _matrix_view.DimensionNumbers = None,
    stacked: types.Stacked = None,
) -> optax.GradientTransformation:
    r"""Replace each matrix among the updates by Adam's direction in an eigenbasis of Shampoo.

        g' = Q_in^T g Q_out ;   m = b1 m + (1 - b1) g' ;   v = b2 v + (1 - b2) g'^2
        out = Q_in (m' / (sqrt(v') + eps)) Q_out^T
        then L = b L + (1 - b) g g^T ,  R = b R + (1 - b) g^T g ,  b = shampoo_b2
        once in `every_steps`: Q_in <- qr(L Q_in), Q_out <- qr(R Q_out), m goes to the new basis

    Each gradient is projected on a basis made of the gradients before it. So the first update has
    none: it starts the statistics and is zero. Leaves that are no matrices pass unchanged.
    Gradients beyond 2^40 (1e12) count as 2^40, so that their products stay finite.

    Args:
      b1: Decay rate of the first moment, in [0, 1).
      b2: Decay rate of the second moment, in [0, 1).
      eps: Constant >= 0 added to the root of the second moment.
      shampoo_b2: Decay rate of L and R; None for `b2`.
      every_steps: Number of updates between two changes of the basis.
      debias: Whether the moments are divided by 1 - b^t.
      kl: Whether L and R are those of KL-Shampoo: each is whitened by the other's eigenvalues
        first, and no columns are sorted.
      dimension_numbers: The axes of each matrix (see `scale_by_newton_schulz`).
      stacked: Leaves that are stacks of layers, each layer a matrix.

    Returns:
      A transform whose state is `SoapState`; its output keeps the dtype of the updates. The
      arithmetic is in fp32 or wider. A side of n takes 2 n^2 numbers of state.

    Raises:
      UserError: For an argument that is out of range, or axes that do not fit the parameters.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_soap()
    >>> grads = {"dense": {"kernel": jnp.diag(jnp.array([3.0, 1.0]))}}
    >>> _, state = tx.update(grads, tx.init(grads))
    >>> updates, _ = tx.update(grads, state)
    >>> [round(float(u), 3) for u in jnp.diag(updates["dense"]["kernel"])]
    [1.0, 1.0]

    References:
      Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, arXiv:2409.11321, Algorithm
      3; nikhilvyas/SOAP@a1e55353:soap.py. Lin et al., KL-Shampoo, arXiv:2509.03378;
      KellerJordan/modded-nanogpt@330d3fbf:records/track_3_optimization/results/
      20260511_klsoap_h_lr_power_decay (`kl`).

    Note:
      SOAP's code also preconditions sides above 10,000 on the other side only, and vectors if
      asked; here give such leaves to another optimizer.
    """
    for argument, number in (("b1", b1), ("b2", b2)):
        _scalars.require_decay_rate(argument, number)
    if shampoo_b2 is not None:
        _scalars.require_decay_rate("shampoo_b2", shampoo_b2)
    _scalars.require_at_least("eps", eps, 0)
    every_steps = _scalars.whole("every_steps", every_steps)
    debias = _scalars.require_flag("debias", debias)
    kl = _scalars.require_flag("kl", kl)
    matrices = _matrix_view.Matrices(dimension_numbers, stacked)

    def init_fn(params: types.Params) -> SoapState:
        zero = jnp.zeros((), jnp.int32)
        if _per_path.is_placeholder(params):
            unknown = _per_path.UNKNOWN_PARAMS
            return SoapState(zero, params, params, unknown, unknown, unknown)
        _arguments.require_real_leaves(params, "scale_by_soap")
        matrices.record(params)

        def collect(make: Callable[[int, int, Any], jax.Array]) -> dict[str, dict[str, jax.Array]]:
            return {
                "in": matrices.collect(params, lambda v, dtype: make(v.count, v.fan_in, dtype)),
                "out": matrices.collect(params, lambda v, dtype: make(v.count, v.fan_out, dtype)),
            }

        def square(count: int, n: int, dtype: Any) -> jax.Array:
            return jnp.zeros((count, n, n), dtype)

        def values(count: int, n: int, dtype: Any) -> jax.Array:
            return jnp.full((count, n), _KL_START, dtype)

        moments = _moments.init_moments(params, None, None)
        eigenvalues = collect(values) if kl else {"in": {}, "out": {}}
        return SoapState(*moments, collect(square), collect(square), eigenvalues)

    def update_fn(
        updates: optax.Updates, state: SoapState, params: types.Params | None = None
    ) -> tuple[optax.Updates, SoapState]:
        del params
        _arguments.require_state(state, SoapState)
        tree.check_updates(updates, state.mu)

        rule = _Rule(b1, b2, eps, b2 if shampoo_b2 is None else shampoo_b2, every_steps, debias, kl)
        kept = [*_sides(state.factors), *_sides(state.basis)]
        kept += _sides(state.eigenvalues) if kl else []
        directions, new = _matrix_view.map_matrices(
            functools.partial(rule.step, state.count),
            matrices,
            updates,
            *kept,
            like=(state.mu, state.nu),
        )

        mu, nu, l_in, l_out, q_in, q_out, *rest = new
        eigenvalues = dict(zip(("in", "out"), rest, strict=True)) if kl else state.eigenvalues
        return directions, SoapState(
            optax.safe_increment(state.count),
            mu,
            nu,
            {"in": l_in, "out": l_out},
            {"in": q_in, "out": q_out},
            eigenvalues,
        )

    return optax.GradientTransformation(init_fn, update_fn)


def _sides(kept: dict[str, dict[str, jax.Array]]) -> list[dict[str, jax.Array]]:
    return [kept["in"], kept["out"]]


class _Rule(NamedTuple):
    """The arithmetic of stacks of matrices [K, in, out], with the arguments of `scale_by_soap`."""

    b1: float | jax.Array
    b2: float | jax.Array
    eps: float | jax.Array
    shampoo_b2: float | jax.Array
    every_steps: int
    debias: bool
    kl: bool

    def step(
        self,
        count: jax.Array,
        g: jax.Array,
        m: jax.Array,
        v: jax.Array,
        l_in: jax.Array,
        l_out: jax.Array,
        q_in: jax.Array,
        q_out: jax.Array,
        *eigenvalues: jax.Array,
    ) -> tuple[jax.Array, ...]:
        """Return the direction and what is kept, in the order of the arguments."""
        wide = _matrix_view.bounded(g.astype(m.dtype))
        m, v, direction = self._adam(count, wide, m, v, q_in, q_out)
        if self.kl:
            kept = self._kl(count, wide, l_in, l_out, q_in, q_out, eigenvalues)
            l_in, l_out, *rest = kept
            eigenvalues = tuple(rest)
        else:
            l_in = _lerp(l_in, matmul(wide, wide.mT), self.shampoo_b2)
            l_out = _lerp(l_out, matmul(wide.mT, wide), self.shampoo_b2)

        def start() -> tuple[jax.Array, ...]:
            return m, v, _eigenbasis(l_in), _eigenbasis(l_out)

        def turn() -> tuple[jax.Array, ...]:
            back = matmul(matmul(q_in, m), q_out.mT)
            new_v = v
            orders = None
            if not self.kl:
                orders = (_order(l_in, q_in), _order(l_out, q_out))
                new_v = jnp.take_along_axis(v, orders[0][:, :, None], 1)
                new_v = jnp.take_along_axis(new_v, orders[1][:, None, :], 2)
            new_in = _iteration(l_in, q_in, orders and orders[0])
            new_out = _iteration(l_out, q_out, orders and orders[1])
            return matmul(matmul(new_in.mT, back), new_out), new_v, new_in, new_out

        # The basis is new in the first update and in each `every_steps`.
        is_due = (count > 0) & (count % self.every_steps == 0)
        case = jnp.where(count == 0, 0, jnp.where(is_due, 1, 2))
        m, v, q_in, q_out = jax.lax.switch(case, [start, turn, lambda: (m, v, q_in, q_out)])
        return direction.astype(g.dtype), m, v, l_in, l_out, q_in, q_out, *eigenvalues

    def _kl(
        self,
        count: jax.Array,
        g: jax.Array,
        l_in: jax.Array,
        l_out: jax.Array,
        q_in: jax.Array,
        q_out: jax.Array,
        eigenvalues: tuple[jax.Array, ...],
    ) -> tuple[jax.Array, ...]:
        """Return the factors of KL-Shampoo and their eigenvalues."""
        rows, columns = g.shape[-2:]

        def first() -> tuple[jax.Array, ...]:
            return matmul(g, g.mT) / columns, matmul(g.mT, g) / rows, *eigenvalues

        def later() -> tuple[jax.Array, ...]:
            root_in, root_out = map(_inverse_root, eigenvalues)
            right = matmul(q_out.mT, g.mT) * root_out[:, :, None]
            left = matmul(q_in.mT, g) * root_in[:, :, None]
            projected = matmul(matmul(q_in.mT, g), q_out)
            means = (
                matmul(right.mT, right) / columns,
                matmul(left.mT, left) / rows,
                jnp.mean((projected * root_out[:, None, :]) ** 2, axis=2),
                jnp.mean((projected * root_in[:, :, None]) ** 2, axis=1),
            )
            old = (l_in, l_out, *eigenvalues)
            return tuple(map(_lerp, old, means, [self.shampoo_b2] * 4))

        return jax.lax.cond(count == 0, first, later)

    def _adam(
        self,
        count: jax.Array,
        g: jax.Array,
        m: jax.Array,
        v: jax.Array,
        q_in: jax.Array,
        q_out: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return both moments and the direction; in the first update the basis is zero."""
        projected = matmul(matmul(q_in.mT, g), q_out)
        m = _lerp(m, projected, self.b1)
        v = _lerp(v, projected**2, self.b2)
        below = jnp.sqrt(v) + self.eps
        direction = m / jnp.where(below > 0, below, 1)
        if self.debias:
            t = count.astype(m.dtype)
            scale = jnp.sqrt(1 - self.b2**t) / (1 - self.b1**t)
            direction = direction * jnp.where(count > 0, scale, 0)
        return m, v, matmul(matmul(q_in, direction), q_out.mT)


def _lerp(old: jax.Array, new: jax.Array, decay: float | jax.Array) -> jax.Array:
    return decay * old + (1 - decay) * new


def _eigenbasis(factor: jax.Array) -> jax.Array:
    """Return eigenvectors, those of the largest eigenvalue first."""
    return of_each(lambda each: jnp.linalg.eigh(each)[1], factor)[:, :, ::-1]


def _order(factor: jax.Array, basis: jax.Array) -> jax.Array:
    """Return the columns of a basis in the order of their eigenvalues, the largest first."""
    return jnp.argsort(-jnp.sum(basis * matmul(factor, basis), axis=1), axis=-1)


def _iteration(factor: jax.Array, basis: jax.Array, order: jax.Array | None) -> jax.Array:
    """Return a basis after one orthogonal iteration, on its columns in this order."""
    if order is not None:
        basis = jnp.take_along_axis(basis, order[:, None, :], 2)
    return of_each(lambda each: jnp.linalg.qr(each).Q, matmul(factor, basis))


def _inverse_root(eigenvalues: jax.Array) -> jax.Array:
    """Return 1 / sqrt of eigenvalues, at most 4000, as the public code bounds it."""
    return jnp.minimum(jax.lax.rsqrt(jnp.maximum(eigenvalues, 1e-30)), 4000.0)
