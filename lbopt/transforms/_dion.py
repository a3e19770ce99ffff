"""Dion: orthonormalized updates of low rank, with what they leave out kept in the momentum."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, tree, types
from lbopt.errors import UserError
from lbopt.transforms import _arguments, _matrix_view, _newton_schulz, _per_path

_HIGHEST = jax.lax.Precision.HIGHEST


class DionState(NamedTuple):
    """The momentum and the basis of the last update.

    Attributes:
      momentum: The momentum, with what updates left out, a pytree shaped like the parameters.
      basis: Path of each matrix -> [matrices, in, rank].
    """

    momentum: types.PyTree
    basis: dict[str, jax.Array]


def scale_by_dion(
    momentum: float | jax.Array = 0.95,
    rank: int | None = None,
    rank_fraction: float = 1.0,
    eps: float | jax.Array = 1e-8,
    *,
    seed: int = 0,
    dimension_numbers: _matrix_view.DimensionNumbers = None,
    stacked: types.Stacked = None,
) -> optax.GradientTransformation:
    r"""Replace each matrix among the updates by an orthonormal one of low rank.

        B = M + G ;   P = orth(B Q) ;   R = B^T P
        M = B - (1 - b) P R^T ;   Q = R with columns of norm 1 ;   out = P Q^T

    One step of a power iteration from the last basis finds the leading directions of the momentum;
    the rest of it stays there (error feedback). Matrices are [out, in] in these equations. Leaves
    that are no matrices pass unchanged. A zero momentum gives a zero update.

    Args:
      momentum: Decay rate b of what an update has used, in [0, 1).
      rank: Rank of the updates, at most the smaller side of every matrix; None for
        `rank_fraction`.
      rank_fraction: Share of the smaller side, in (0, 1], rounded up.
      eps: Constant >= 0 added to the norms of columns.
      seed: Seed of the first basis.
      dimension_numbers: The axes of each matrix (see `scale_by_newton_schulz`).
      stacked: Leaves that are stacks of layers, each layer a matrix.

    Returns:
      A transform whose state is `DionState`; its output keeps the dtype of the updates.

    Raises:
      UserError: For an argument that is out of range, a rank above the smaller side of a matrix, or
        axes that do not fit the parameters.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_dion(rank=1)
    >>> grads = {"dense": {"kernel": jnp.outer(jnp.array([3.0, 4.0]), jnp.array([0.0, 2.0]))}}
    >>> updates, _ = tx.update(grads, tx.init(grads))
    >>> [round(float(u), 3) for u in updates["dense"]["kernel"][:, 1]]
    [0.6, 0.8]

    References:
      Ahn et al., Dion: Distributed Orthonormalized Updates, arXiv:2504.05295, Algorithm 1;
      microsoft/dion@0a059a45:dion/dion_simple.py, and dion_reference.py for a zero momentum.
    """
    _scalars.require_decay_rate("momentum", momentum)
    _scalars.require_at_least("eps", eps, 0)
    if rank is not None:
        rank = _scalars.whole("rank", rank)
    fraction = _scalars.checked(
        "rank_fraction", rank_fraction, "a number in (0, 1]", lambda n: 0 < n <= 1
    )
    seed = _scalars.whole("seed", seed, low=0)
    matrices = _matrix_view.Matrices(dimension_numbers, stacked)

    def width(name: str, view: _matrix_view.MatrixView) -> int:
        smaller = min(view.fan_in, view.fan_out)
        if rank is None:
            return max(1, -(-int(fraction * smaller * 2**20) // 2**20))
        if rank > smaller:
            fix = f"the smaller side of {name!r} is {smaller}; give at most that, or rank_fraction"
            raise UserError("rank", rank, fix)
        return rank

    def init_fn(params: types.Params) -> DionState:
        if _per_path.is_placeholder(params):
            return DionState(params, _per_path.UNKNOWN_PARAMS)
        _arguments.require_real_leaves(params, "scale_by_dion")
        matrices.record(params)
        place = iter(range(len(jax.tree.leaves(params))))

        def basis(name: str, p: jax.Array, view: _matrix_view.MatrixView | None):
            key = jax.random.fold_in(jax.random.key(seed), next(place))
            if view is None:
                return None
            shape = (view.count, view.fan_in, width(name, view))
            return jax.random.normal(key, shape, tree.wide_dtype(p.dtype))

        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, tree.wide_dtype(p.dtype)), params)
        start = tree.map_with_name(basis, params, matrices.views(params))
        return DionState(zeros, _per_path.collect(params, start))

    def step(g: jax.Array, m: jax.Array, q: jax.Array) -> tuple[jax.Array, ...]:
        # Stacks are [in, out]: the transpose of the equations.
        total = m + g.astype(m.dtype)
        p = jnp.linalg.qr(jnp.matmul(_t(total), q, precision=_HIGHEST)).Q
        r = jnp.matmul(total, p, precision=_HIGHEST)
        new_m = total - (1 - momentum) * jnp.matmul(r, _t(p), precision=_HIGHEST)
        norm = jnp.linalg.norm(r, axis=-2, keepdims=True)
        new_q = r / jnp.where(norm + eps > 0, norm + eps, 1)

        is_zero = jnp.all(total == 0, axis=(-1, -2), keepdims=True)
        out = jnp.where(is_zero, 0, jnp.matmul(new_q, _t(p), precision=_HIGHEST))
        return out.astype(g.dtype), new_m, jnp.where(is_zero, q, new_q)

    def update_fn(
        updates: optax.Updates, state: DionState, params: types.Params | None = None
    ) -> tuple[optax.Updates, DionState]:
        del params
        _arguments.require_state(state, DionState)
        tree.check_updates(updates, state.momentum)
        directions, (kept, basis) = _newton_schulz.map_with_state(
            step, matrices, updates, state.basis, like=(state.momentum,)
        )
        return directions, DionState(kept, basis)

    return optax.GradientTransformation(init_fn, update_fn)


def _t(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)
