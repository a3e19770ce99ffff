"""Dion: orthonormalized updates of low rank, with what they leave out kept in the momentum."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, tree, types
from lbopt.errors import UserError, require_choice
from lbopt.linalg import matmul, orthonormal_basis
from lbopt.transforms import (
    _arguments,
    _matrix_optimizer,
    _matrix_variants,
    _matrix_view,
    _newton_schulz,
    _per_path,
)


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
    seed: int | jax.Array = 0,
    dimension_numbers: _matrix_view.DimensionNumbers = None,
    stacked: types.Stacked = None,
) -> optax.GradientTransformation:
    r"""Replace each matrix among the updates by an orthonormal one of low rank.

        B = M + G ;   P = orth(B Q) ;   R = B^T P
        M = B - (1 - b) P R^T ;   Q = R with columns of norm 1 ;   out = P Q^T

    One step of a power iteration from the last basis finds the leading directions of the momentum;
    the rest of it stays there (error feedback). Matrices are [out, in] in these equations. Leaves
    that are no matrices pass unchanged. A zero momentum gives a zero update. Gradients beyond 2^40
    (1e12) count as 2^40, so that their squares stay finite.

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
    if rank is not None and fraction != 1:
        fix = f"rank = {rank} is given too; leave one of them out"
        raise UserError("rank_fraction", rank_fraction, fix, code="conflict")
    seed = _scalars.seed("seed", seed)
    matrices = _matrix_view.Matrices(dimension_numbers, stacked)

    def width(name: str, view: _matrix_view.MatrixView) -> int:
        smaller = min(view.fan_in, view.fan_out)
        if rank is None:
            # Rounded first: 0.07 * 100 is 7.000000000000001, and means 7.
            return max(1, math.ceil(round(fraction * smaller, 6)))
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
        total = m + _matrix_view.bounded(g.astype(m.dtype))
        p = orthonormal_basis(matmul(total.mT, q))
        r = matmul(total, p)
        new_m = total - (1 - momentum) * matmul(r, p.mT)
        norm = jnp.linalg.norm(r, axis=-2, keepdims=True)
        new_q = r / jnp.where(norm + eps > 0, norm + eps, 1)

        is_zero = jnp.all(total == 0, axis=(-1, -2), keepdims=True)
        out = jnp.where(is_zero, 0, matmul(new_q, p.mT))
        return out.astype(g.dtype), new_m, jnp.where(is_zero, q, new_q)

    def update_fn(
        updates: optax.Updates, state: DionState, params: types.Params | None = None
    ) -> tuple[optax.Updates, DionState]:
        del params
        _arguments.require_state(state, DionState)
        tree.check_updates(updates, state.momentum)
        directions, (kept, basis) = _matrix_view.map_matrices(
            step, matrices, updates, state.basis, like=(state.momentum,)
        )
        return directions, DionState(kept, basis)

    return optax.GradientTransformation(init_fn, update_fn)


def dion(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | jax.Array = types.default(0.95),
    weight_decay: float | jax.Array = types.default(0.01),
    rank: int | None = types.default(None),
    rank_fraction: float = types.default(1.0),
    variant: Literal["microsoft"] = "microsoft",
    *,
    eps: float | jax.Array = types.default(1e-8),
    seed: int | jax.Array = 0,
    shape_rule: _newton_schulz.ShapeRule = types.default("spectral"),
    weight_decay_mask: types.Mask = types.default(None),
    rest: Any = types.default("adamw"),
    rest_learning_rate_ratio: float | jax.Array = types.default(1.0),
    rest_b1: float | jax.Array = types.default(0.9),
    rest_b2: float | jax.Array = types.default(0.95),
    rest_eps: float | jax.Array = types.default(1e-8),
    rest_weight_decay: float | jax.Array | None = types.default(None),
    dimension_numbers: _matrix_view.DimensionNumbers = None,
    stacked: types.Stacked = None,
) -> optax.GradientTransformation:
    r"""Build Dion: orthonormalized updates of low rank with error feedback; the rest by AdamW.

        w <- w - lr (sqrt(out / in) P Q^T + wd w) ,   P Q^T of `scale_by_dion`

    Args:
      learning_rate: Number or schedule, the rate of the matrices.
      momentum: Decay rate of the momentum, in [0, 1).
      weight_decay: Decoupled weight decay wd >= 0.
      rank: Rank of the updates; None for `rank_fraction`.
      rank_fraction: Share of the smaller side, in (0, 1].
      variant: Public code to follow; in full by `lbopt.describe("microsoft", "dion")`.
      eps: Constant >= 0 added to the norms of columns.
      seed: Seed of the first basis.
      shape_rule: Factor of the shape: "width", "rms", "spectral" or "none".
      weight_decay_mask: The leaves that are decayed (see `lbopt.types.Mask`).
      rest: Optimizer of the other leaves (see `lbopt.muon`).
      rest_learning_rate_ratio: Learning rate of the rest, as a multiple of `learning_rate`.
      rest_b1: Decay rate of the rest's first moment.
      rest_b2: Decay rate of the rest's second moment.
      rest_eps: Constant added to the root of the rest's second moment.
      rest_weight_decay: Weight decay of the rest; None for `weight_decay`.
      dimension_numbers: The axes of each matrix (see `scale_by_newton_schulz`).
      stacked: Leaves that are stacks of layers, each layer a matrix.

    Returns:
      An `optax.GradientTransformation` whose `update` needs `params`.

    Raises:
      UserError: As `lbopt.muon`, and for a rank above the smaller side of a matrix.

    >>> import jax.numpy as jnp
    >>> params = {"dense": {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}}
    >>> tx = dion(0.1, weight_decay=0.0)
    >>> updates, _ = tx.update(params, tx.init(params), params)
    >>> round(float(jnp.linalg.norm(updates["dense"]["kernel"])), 4)
    0.2

    References:
      Ahn et al., Dion: Distributed Orthonormalized Updates, arXiv:2504.05295.
    """
    given = locals()

    def directions(
        options: _matrix_variants.DionOptions, numbers: Any
    ) -> list[optax.GradientTransformation]:
        require_choice("shape_rule", options.shape_rule, _newton_schulz.SHAPE_RULES)
        where = {"dimension_numbers": numbers}
        low_rank = scale_by_dion(
            options.momentum, options.rank, options.rank_fraction, options.eps, seed=seed, **where
        )
        return [low_rank, _newton_schulz.scale_by_matrix_shape(options.shape_rule, **where)]

    return _matrix_optimizer.build("dion", _matrix_variants.DION, directions, given)
