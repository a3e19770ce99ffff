"""PowerSGD: gradients as products of two thin matrices, one of which is reduced at each step."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lbopt import _scalars, stacks, types
from lbopt.aggregators import _aggregator, _wire_bytes
from lbopt.aggregators._aggregator import Aggregated, Aggregator, AggregatorState, Extra
from lbopt.aggregators._group import Group
from lbopt.aggregators._wire_bytes import WireBytes, ring_bytes
from lbopt.linalg import orthonormal_basis


class PowerSgdState(NamedTuple):
    """The state that all replicas have in common.

    Attributes:
      count: int32 scalar, steps so far.
      left: P of each compressed leaf, fp32 [layers, m, r]; () for the others.
      right: Q, fp32 [layers, n, r].
    """

    count: jax.Array  # type: ignore[assignment]
    left: list[Any]
    right: list[Any]


class _FactorShape(NamedTuple):
    """The shape of a leaf as matrices [layers, m, n] of `rank` factors; 0 for a leaf sent whole."""

    layers: int
    m: int
    n: int
    rank: int


def powersgd(
    rank: int, start: int = 100, min_rate: float = 2.0, seed: int = 0, stacked: types.Stacked = None
) -> Aggregator:
    r"""Rank-r compression by power iteration, with error feedback and a warm start.

    A leaf is a matrix M [m, n], whose columns are its last dimension; e is the error so far. At
    even steps, counted from `start`,

        P <- orth(P),   q = (M + e)^T P,   Q <- mean(q),   update = P Q^T,   e <- M + e - P q^T

    and at odd steps P and Q change roles. All replicas have the same P and Q; M, q and e are each
    replica's own. One all-reduce a step carries all factors and the leaves that are sent whole:
    vectors, and leaves that would not become `min_rate` times smaller.

    The bytes sent do not depend on the number of replicas, so on a pod prefer it to `topk`.

    Args:
      rank: Number of factors r, >= 1; at most the smaller side of a matrix is used.
      start: Number of steps at the beginning that reduce everything whole, >= 0.
      min_rate: Smallest compression factor > 0 for which a leaf is compressed: a step sends
        r (m + n) / 2 numbers instead of m n.
      seed: Seed of the first factors, >= 0.
      stacked: Leaves that are stacks of layers, each layer a matrix of its own (see
        `lbopt.stacked_paths`).

    Returns:
      An `Aggregator` that keeps e, one fp32 copy of the compressed leaves per replica.

    Raises:
      UserError: For an argument that is out of range.

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.zeros((256, 256)), "bias": jnp.zeros(256)}
    >>> round(powersgd(rank=4).wire_bytes(params, 8).ratio)
    51

    Note:
      The published code first subtracted the mean's reconstruction P Q^T from each e, which leaves
      the mean of e the same. But where replicas differ, each e then grows without end, and in fp32
      the mean gradient is lost beside it. The reconstruction is not a contraction of each replica's
      own gradient, so the theory of EControl does not carry over. Whether a leaf is compressed is
      decided by its matrix; the published code decides by the shape, with the kernel dimensions of
      a convolution apart.

    References:
      Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization,
      arXiv:1905.13727v3.
      epfml/powersgd@f07be924eda568511c0ca00efdfed06b1d7e6332:powersgd/powersgd.py, whose defaults
      and order of steps these are. There the rows of a matrix are the first dimension, as in
      PyTorch.
    """
    rank = _scalars.whole("rank", rank)
    start = _scalars.whole("start", start, 0)
    seed = _scalars.whole("seed", seed, 0)
    _scalars.require_above("min_rate", min_rate, 0)

    def planned(params: types.Params) -> list[_FactorShape]:
        layers = stacks.leading(stacked, params, "powersgd")
        return [
            _plan(jnp.shape(p), axes, rank, min_rate)
            for p, axes in zip(jax.tree.leaves(params), layers, strict=True)
        ]

    def init(params: types.Params, num_replicas: int) -> AggregatorState:
        plans = planned(params)
        keys = jax.random.split(jax.random.key(seed), (len(plans), 2))
        left: list[Any] = [()] * len(plans)
        right = list(left)
        local = list(left)
        for leaf, plan in enumerate(plans):
            if plan.rank:
                left[leaf] = jax.random.normal(
                    keys[leaf, 0], (plan.layers, plan.m, plan.rank), jnp.float32
                )
                right[leaf] = jax.random.normal(
                    keys[leaf, 1], (plan.layers, plan.n, plan.rank), jnp.float32
                )
                local[leaf] = jnp.zeros((num_replicas, plan.layers, plan.m, plan.n), jnp.float32)
        return AggregatorState(local, (), PowerSgdState(jnp.zeros((), jnp.int32), left, right))

    def update(
        rows: types.PyTree, state: AggregatorState, group: Group, extra: Extra
    ) -> Aggregated:
        del extra
        leaves, structure = jax.tree.flatten(_aggregator.widened(rows))
        plans = planned(jax.tree.map(lambda x: x[0], rows))
        chosen = [leaf for leaf, plan in enumerate(plans) if plan.rank]
        count, left, right = state.shared

        def whole(local: list[Any], left: list[Any], right: list[Any]) -> tuple[Any, ...]:
            return group.mean(leaves), local, left, right

        def step(
            transposed: bool, local: list[Any], left: list[Any], right: list[Any]
        ) -> tuple[Any, ...]:
            ours, theirs = (right, left) if transposed else (left, right)
            ours = list(ours)
            theirs = list(theirs)
            local = list(local)
            out = list(leaves)

            def product(own: jax.Array, other: jax.Array) -> jax.Array:
                """Return P Q^T, [layers, m, n], or one of each replica."""
                return _product(*(other, own) if transposed else (own, other))

            # Full precision, because the error is a small difference of large numbers.
            for leaf in chosen:
                matrix = leaves[leaf].reshape(local[leaf].shape) + local[leaf]
                ours[leaf] = orthonormal_basis(ours[leaf])
                equation = "Rlmn,lnr->Rlmr" if transposed else "Rlmn,lmr->Rlnr"
                out[leaf] = jnp.einsum(equation, matrix, ours[leaf], precision="highest")
                local[leaf] = matrix - product(ours[leaf], out[leaf])

            # Only the factors of compressed leaves are sent, and the other leaves whole.
            out = group.mean(out)
            for leaf in chosen:
                theirs[leaf] = out[leaf]
                out[leaf] = product(ours[leaf], theirs[leaf])

            left, right = (theirs, ours) if transposed else (ours, theirs)
            return (
                [x.reshape(row.shape[1:]) for x, row in zip(out, leaves, strict=True)],
                local,
                left,
                right,
            )

        def compressed(*given: Any) -> tuple[Any, ...]:
            odd = (count - start) % 2 == 1
            with jax.named_scope(f"{_aggregator.ONE_IN}2"):
                return jax.lax.cond(
                    odd, functools.partial(step, True), functools.partial(step, False), *given
                )

        given = list(state.local), list(left), list(right)
        if not chosen:
            updates, local, left, right = whole(*given)
        elif start == 0:
            updates, local, left, right = compressed(*given)
        else:
            updates, local, left, right = jax.lax.cond(count < start, whole, compressed, *given)

        updates = _aggregator.cast_like(jax.tree.unflatten(structure, updates), rows)
        return Aggregated(
            updates, AggregatorState(local, (), PowerSgdState(count + 1, left, right)), {}
        )

    def sent(params: types.Params, num_replicas: int) -> WireBytes:
        words = sum(
            p.layers * (p.rank * (p.m + p.n) / 2 if p.rank else p.m * p.n) for p in planned(params)
        )
        return WireBytes(
            _wire_bytes.reduced(_wire_bytes.FP32 * words, num_replicas),
            ring_bytes(params, num_replicas),
        )

    return Aggregator(f"powersgd({rank})", init, update, sent)


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    """Return P Q^T [..., m, n] of [..., m, r] and [..., n, r], in fp32.

    Up to 8 outer products are added up element by element, so that XLA fuses them with a following
    subtraction and writes no product to memory.
    """
    if left.shape[-1] > _FEW:
        return jnp.einsum("...mr,...nr->...mn", left, right, precision="highest")
    rank = max(left.ndim, right.ndim)
    left, right = (jax.lax.broadcast_to_rank(x, rank) for x in (left, right))
    outer = [left[..., :, None, r] * right[..., None, :, r] for r in range(left.shape[-1])]
    return functools.reduce(jnp.add, outer)


_FEW = 8
"""Number of columns up to which outer products cost less than a product of matrices."""


def _plan(shape: tuple[int, ...], layer_axes: int, rank: int, min_rate: float) -> _FactorShape:
    layers, size = _aggregator.vectors(shape, layer_axes)
    one = shape[layer_axes:]
    n = one[-1] if one else 1
    m = size // n if n else 0
    r = min(rank, m, n)
    worth = len(one) >= 2 and m * n > min_rate * r * (m + n) / 2
    return _FactorShape(layers, m, n, r if worth else 0)
