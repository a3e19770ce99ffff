"""Shampoo: gradients between inverse roots of their own second moments, one for each side."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, tree, types
from lbopt.errors import require_choice
from lbopt.linalg import inverse_root, matmul
from lbopt.transforms import _arguments, _matrix_view, _moments, _per_path

Sides = Literal["both", "in", "out", "shorter"]
SIDES: tuple[Sides, ...] = ("both", "in", "out", "shorter")
Graft = Literal["adam", "rmsprop", "sgd"]
GRAFTS: tuple[Graft, ...] = ("adam", "rmsprop", "sgd")


class ShampooState(NamedTuple):
    """The averages of the gradients, their products, and the inverse roots of these.

    Attributes:
      count: int32 scalar, number of updates so far.
      mu: First moments, a pytree shaped like the parameters.
      nu: Second moments for the grafted size, likewise; not used by "sgd" and None.
      factors: Path of each matrix -> [matrices, n, n] of its inputs, under "in", and of its
        outputs, under "out": averages of gradient products. One-sided Shampoo has one of them,
        under the name of the argument `side`.
      roots: Likewise, the inverse roots in use.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: types.PyTree
    nu: types.PyTree
    factors: dict[str, dict[str, jax.Array]]
    roots: dict[str, dict[str, jax.Array]]


def scale_by_shampoo(
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.999,
    eps: float | jax.Array = 1e-12,
    every_steps: int = 10,
    *,
    side: Sides = "both",
    root: float | None = None,
    method: Literal["eigh", "newton"] = "eigh",
    debias: bool = True,
    graft: Graft | None = "adam",
    graft_b2: float | jax.Array = 0.999,
    graft_eps: float | jax.Array = 1e-8,
    dimension_numbers: _matrix_view.DimensionNumbers = None,
    stacked: types.Stacked = None,
) -> optax.GradientTransformation:
    r"""Replace each matrix among the updates by Shampoo's direction.

        L = b2 L + (1 - b2) g g^T ,  R = b2 R + (1 - b2) g^T g     (b2 = 1: sums)
        m = b1 m + (1 - b1) g ;   out = (L' + eps I)^(-1/p) m' (R' + eps I)^(-1/p) ,  p = 4
        one side alone: (L' + eps I)^(-1/p) m' or m' (R' + eps I)^(-1/p) ,  p = 2
        with a graft: out times ||graft's direction|| / ||out||, for each matrix
        x' = x / (1 - b^t) with debias

    Roots are computed anew once in `every_steps`. Before the first, the direction is that of the
    graft, or m'. Leaves that are no matrices pass unchanged. Gradients beyond 2^40 (1e12) count as
    2^40, so that their products stay finite.

    Args:
      b1: Decay rate of the first moment, in [0, 1).
      b2: Decay rate of the factors, in [0, 1]; 1 for their sums, as in the paper.
      eps: Constant >= 0 added to the eigenvalues of the factors.
      every_steps: Number of updates between two computations of the roots.
      side: "both"; "in" or "out" for one-sided Shampoo; or "shorter", the shorter side of each
        matrix, which takes least memory and time.
      root: The root p; None for 4, or 2 for one side.
      method: How roots are computed (see `lbopt.linalg.inverse_root`): "eigh", or "newton", by
        products alone, with `eps` relative to the largest eigenvalue.
      debias: Whether moments and factors are divided by 1 - b^t.
      graft: Where the size of an update comes from: "adam", "rmsprop", "sgd" (the size of m'), or
        None for Shampoo's own.
      graft_b2: Decay rate of the graft's second moment, in [0, 1).
      graft_eps: Constant >= 0 added to the root of the graft's second moment.
      dimension_numbers: The axes of each matrix (see `scale_by_newton_schulz`).
      stacked: Leaves that are stacks of layers, each layer a matrix.

    Returns:
      A transform whose state is `ShampooState`; its output keeps the dtype of the updates. The
      arithmetic is in fp32 or wider. A side of n takes 2 n^2 numbers of state.

    Raises:
      UserError: For an argument that is out of range, or axes that do not fit the parameters.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_shampoo(every_steps=1, graft=None)
    >>> grads = {"dense": {"kernel": jnp.diag(jnp.array([3.0, 1.0]))}}
    >>> updates, _ = tx.update(grads, tx.init(grads))
    >>> [round(float(u), 3) for u in jnp.diag(updates["dense"]["kernel"])]
    [1.0, 1.0]

    References:
      Gupta, Koren, Singer, Shampoo, arXiv:1802.09568v2, Algorithm 1. Shi et al., A Distributed
      Data-Parallel PyTorch Implementation of the Distributed Shampoo Optimizer, arXiv:2309.06497;
      facebookresearch/optimizers@f6066066:distributed_shampoo.

    Note:
      Meta's code splits long sides into blocks and merges short ones; here a matrix is whole. In
      fp32 the factor of a longer side, whose rank is that of a few gradients, has roots that
      rounding decides: take `side="shorter"` for very oblong matrices.
    """
    _scalars.require_decay_rate("b1", b1)
    _scalars.require_decay_rate("graft_b2", graft_b2)
    _scalars.checked("b2", b2, "a number in [0, 1]", lambda n: 0 <= n <= 1, traced=True)
    _scalars.require_at_least("eps", eps, 0)
    _scalars.require_at_least("graft_eps", graft_eps, 0)
    every_steps = _scalars.whole("every_steps", every_steps)
    require_choice("side", side, SIDES)
    if graft is not None:
        require_choice("graft", graft, GRAFTS)
    if root is None:
        root = 4 if side == "both" else 2
    _scalars.require_above("root", root, 0)
    require_choice("method", method, ("eigh", "newton"))
    if method == "newton":
        root = _scalars.whole("root", root)
    debias = _scalars.require_flag("debias", debias)
    matrices = _matrix_view.Matrices(dimension_numbers, stacked)
    has_nu = graft in ("adam", "rmsprop")
    sides: tuple[str, ...] = ("in", "out") if side == "both" else (side,)

    def init_fn(params: types.Params) -> ShampooState:
        zero = jnp.zeros((), jnp.int32)
        if _per_path.is_placeholder(params):
            unknown = _per_path.UNKNOWN_PARAMS
            return ShampooState(zero, params, params if has_nu else None, unknown, unknown)
        _arguments.require_real_leaves(params, "scale_by_shampoo")
        matrices.record(params)

        def collect(make: Callable[[int, int, Any], jax.Array]) -> dict[str, dict[str, jax.Array]]:
            def one(side: str, view: _matrix_view.MatrixView, dtype: Any) -> jax.Array:
                is_in = _is_in(side, view.fan_in, view.fan_out)
                return make(view.count, view.fan_in if is_in else view.fan_out, dtype)

            return {side: matrices.collect(params, functools.partial(one, side)) for side in sides}

        def zeros() -> types.PyTree:
            return jax.tree.map(lambda p: jnp.zeros_like(p, tree.wide_dtype(p.dtype)), params)

        def square(count: int, n: int, dtype: Any) -> jax.Array:
            return jnp.zeros((count, n, n), dtype)

        def eye(count: int, n: int, dtype: Any) -> jax.Array:
            return jnp.tile(jnp.eye(n, dtype=dtype), (count, 1, 1))

        nu = zeros() if has_nu else None
        return ShampooState(zero, zeros(), nu, collect(square), collect(eye))

    def step(t: jax.Array, g: jax.Array, m: jax.Array, *kept: jax.Array) -> tuple[jax.Array, ...]:
        v, kept = (kept[0], kept[1:]) if has_nu else (None, kept)
        factors = kept[: len(sides)]
        roots = kept[len(sides) :]
        are_in = [_is_in(where, *g.shape[-2:]) for where in sides]
        wide = _matrix_view.bounded(g.astype(m.dtype))
        products = [matmul(wide, wide.mT) if is_in else matmul(wide.mT, wide) for is_in in are_in]
        weight = 1.0 if _scalars.is_number(b2) and b2 == 1 else 1 - b2
        factors = tuple(b2 * old + weight * new for old, new in zip(factors, products, strict=True))

        # The first roots are due after `every_steps` updates.
        is_due = t % every_steps == 0
        scale = _moments.one_minus_power(b2, t, m.dtype) if debias else jnp.ones((), m.dtype)
        scale = jnp.where(scale > 0, scale, 1)  # a sum

        def new_roots() -> tuple[jax.Array, ...]:
            return tuple(inverse_root(old / scale, root, eps=eps, method=method) for old in factors)

        roots = jax.lax.cond(is_due, new_roots, lambda: roots)
        m = b1 * m + (1 - b1) * wide
        mean = m / _moments.one_minus_power(b1, t, m.dtype) if debias else m
        out = mean
        for is_in, of_side in zip(are_in, roots, strict=True):
            out = matmul(of_side, out) if is_in else matmul(out, of_side)
        if graft is None:
            return out.astype(g.dtype), m, *factors, *roots

        sized = mean
        if v is not None:
            v = graft_b2 * v + (1 - graft_b2) * wide**2
            v_mean = v
            if graft == "adam":
                v_mean = v / _moments.one_minus_power(graft_b2, t, m.dtype)
            below = jnp.sqrt(v_mean) + graft_eps
            sized = mean / jnp.where(below > 0, below, 1)
        norm = tree.l2_norm(out, (0,))
        factor = tree.l2_norm(sized, (0,)) / jnp.where(norm > 0, norm, 1)
        out = jnp.where(t < every_steps, sized, tree.scaled(out, factor))
        seconds = () if v is None else (v,)
        return out.astype(g.dtype), m, *seconds, *factors, *roots

    def update_fn(
        updates: optax.Updates, state: ShampooState, params: types.Params | None = None
    ) -> tuple[optax.Updates, ShampooState]:
        del params
        _arguments.require_state(state, ShampooState)
        tree.check_updates(updates, state.mu)
        count = optax.safe_increment(state.count)
        like = (state.mu, state.nu) if has_nu else (state.mu,)
        kept = [part[where] for part in (state.factors, state.roots) for where in sides]
        directions, new = _matrix_view.map_matrices(
            functools.partial(step, count), matrices, updates, *kept, like=like
        )
        moments = new[: len(like)]
        nu = moments[1] if has_nu else None
        factors, roots = (
            dict(zip(sides, new[start : start + len(sides)], strict=True))
            for start in (len(like), len(like) + len(sides))
        )
        return directions, ShampooState(count, moments[0], nu, factors, roots)

    return optax.GradientTransformation(init_fn, update_fn)


def _is_in(side: str, fan_in: int, fan_out: int) -> bool:
    """Return whether a factor is that of the inputs."""
    return side == "in" or (side == "shorter" and fan_in < fan_out)
