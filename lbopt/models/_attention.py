r"""Softmax attention whose forward and backward passes read the scores as few times as possible.

With e = exp(s - max s) and l = sum e, the probabilities of one query are p = e / l. Neither pass
computes p:

    context = (e V) / l,        ds = e * (dcontext V^T - dcontext . context) / l.

The second formula uses sum(p * dp) = dcontext . context, which holds with dropout too. The forward
pass computes e together with l, and the backward pass computes ds together with dcontext V^T. The
division by l applies to vectors of a head's width, not to scores.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# Shape suffixes: B batch, H heads, K width of a head, Q queries, S keys.


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attend(
    query_BHKQ: jax.Array,
    key_BHKS: jax.Array,
    value_BHKS: jax.Array,
    mask_BHQS: jax.Array,
    keep_BHQS: jax.Array | None,
    kept_share: float,
    scale: float,
) -> jax.Array:
    """Return softmax(scale * query . key) value, [B, H, K, Q] in the dtype of the values.

    Scores, exponentials and sums are fp32 or wider. Products are taken in the dtype of the inputs
    and accumulated in fp32. For rematerialisation the scores are named "scores" and the result
    "context".

    Args:
      query_BHKQ: Queries.
      key_BHKS: Keys.
      value_BHKS: Values.
      mask_BHQS: Bool, False for keys that a query ignores; any axis may have length 1. If all keys
        of a query are False, they all get the same probability.
      keep_BHQS: Bool, False for probabilities to drop; None keeps all.
      kept_share: Divisor of the kept probabilities.
      scale: Factor of the scores; the paper's is K^-0.5.

    References:
      Vaswani et al., arXiv 1706.03762v7, equation 1; Dao et al., arXiv 2205.14135v2, for the row
      sums of the backward pass.
    """
    return _forward(query_BHKQ, key_BHKS, value_BHKS, mask_BHQS, keep_BHQS, kept_share, scale)[0]


def _forward(query_BHKQ, key_BHKS, value_BHKS, mask_BHQS, keep_BHQS, kept_share, scale):
    dtype = value_BHKS.dtype
    scores_BHQS = _product("BHKQ,BHKS->BHQS", query_BHKQ, key_BHKS) * scale
    scores_BHQS = checkpoint_name(scores_BHQS, "scores")

    # Not -inf, which gives NaN if all keys of a query are masked. The exponentials are summed
    # before they are cast, so that their roundings do not add up.
    lowest = jnp.finfo(scores_BHQS.dtype).min
    scores_BHQS = jnp.where(mask_BHQS, scores_BHQS, lowest)
    exponentials_BHQS = jnp.exp(scores_BHQS - jnp.max(scores_BHQS, -1, keepdims=True))
    sums_BHQ = jnp.sum(exponentials_BHQS, -1)
    exponentials_BHQS = exponentials_BHQS.astype(dtype)

    context_BHKQ = _product("BHQS,BHKS->BHKQ", _kept(exponentials_BHQS, keep_BHQS), value_BHKS)
    context_BHKQ = (context_BHKQ / (kept_share * sums_BHQ)[:, :, None]).astype(dtype)
    context_BHKQ = checkpoint_name(context_BHKQ, "context")

    inputs = query_BHKQ, key_BHKS, value_BHKS, mask_BHQS, keep_BHQS
    return context_BHKQ, (*inputs, exponentials_BHQS, sums_BHQ, context_BHKQ)


def _backward(kept_share, scale, residuals, gradient_BHKQ):
    (
        query_BHKQ,
        key_BHKS,
        value_BHKS,
        mask_BHQS,
        keep_BHQS,
        exponentials_BHQS,
        sums_BHQ,
        context_BHKQ,
    ) = residuals

    dtype = value_BHKS.dtype
    wide = sums_BHQ.dtype
    gradient_BHKQ = gradient_BHKQ.astype(wide)
    means_BHQ = jnp.sum(gradient_BHKQ * context_BHKQ.astype(wide), 2) / sums_BHQ
    gradient_BHKQ = (gradient_BHKQ / (kept_share * sums_BHQ)[:, :, None]).astype(dtype)
    d_value_BHKS = _product("BHQS,BHKQ->BHKS", _kept(exponentials_BHQS, keep_BHQS), gradient_BHKQ)

    # `means_BHQ` is dcontext . context / l. The other term's division by l is in `gradient_BHKQ`.
    d_scores_BHQS = (
        _kept(_product("BHKQ,BHKS->BHQS", gradient_BHKQ, value_BHKS), keep_BHQS)
        - means_BHQ[..., None]
    )
    d_scores_BHQS = jnp.where(mask_BHQS, exponentials_BHQS.astype(wide) * d_scores_BHQS, 0)
    d_scores_BHQS = (d_scores_BHQS * scale).astype(dtype)

    d_query_BHKQ = _product("BHQS,BHKS->BHKQ", d_scores_BHQS, key_BHKS)
    d_key_BHKS = _product("BHQS,BHKQ->BHKS", d_scores_BHQS, query_BHKQ)
    return (
        d_query_BHKQ.astype(dtype),
        d_key_BHKS.astype(dtype),
        d_value_BHKS.astype(dtype),
        None,
        None,
    )


attend.defvjp(_forward, _backward)

BLOCKS = 4
"""Number of blocks of queries in causal attention, which leaves out the keys behind a block."""
SHORTEST_BLOCK = 64
"""Queries of a block, at least: products of fewer are slow on every device."""


def attend_causally(
    query_BHKQ: jax.Array,
    key_BGKS: jax.Array,
    value_BGKS: jax.Array,
    keep_BHQS: jax.Array | None,
    kept_share: float,
    scale: float,
) -> jax.Array:
    """Return `attend` where each query sees the keys up to its own position, [B, H, K, Q].

    Queries are taken in up to 4 blocks, and keys behind a block are left out, which saves up to
    3/8 of the products and exponentials.

    Args:
      query_BHKQ: Queries.
      key_BGKS: Keys, of as many positions. Where they have fewer heads, G, each serves H / G
        neighbouring heads of queries (grouped-query attention, arXiv 2305.13245v3).
      value_BGKS: Values.
      keep_BHQS: As in `attend`.
      kept_share: As in `attend`.
      scale: As in `attend`.
    """
    length = query_BHKQ.shape[-1]
    size = max(SHORTEST_BLOCK, -(-length // BLOCKS))
    context = []
    for start in range(0, length, size):
        end = min(start + size, length)
        keep = None if keep_BHQS is None else keep_BHQS[:, :, start:end, :end]
        context.append(
            _attend_from(
                start,
                query_BHKQ[..., start:end],
                key_BGKS[..., :end],
                value_BGKS[..., :end],
                keep,
                kept_share,
                scale,
            )
        )
    return context[0] if len(context) == 1 else jnp.concatenate(context, axis=-1)


def _attend_from(start, query_BHKQ, key_BGKS, value_BGKS, keep_BHQS, kept_share, scale):
    """Return the context of a block of queries that begins at a position."""
    batch, heads, width, queries = query_BHKQ.shape
    groups, _, keys = key_BGKS.shape[1:]
    each = heads // groups

    # The queries of all heads that share a key stand side by side, as if they were more queries.
    grouped = query_BHKQ
    if each > 1:
        split = query_BHKQ.reshape(batch, groups, each, width, queries)
        grouped = split.swapaxes(2, 3).reshape(batch, groups, width, each * queries)
        if keep_BHQS is not None:
            keep_BHQS = keep_BHQS.reshape(batch, groups, each * queries, keys)

    position_Q1 = start + jnp.arange(each * queries)[:, None] % queries
    mask_QS = position_Q1 >= jnp.arange(keys)[None, :]
    context = attend(
        grouped, key_BGKS, value_BGKS, mask_QS[None, None], keep_BHQS, kept_share, scale
    )
    if each > 1:
        split = context.reshape(batch, groups, width, each, queries)
        context = split.swapaxes(2, 3).reshape(batch, heads, width, queries)
    return context


def _product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum(equation, x, y, preferred_element_type=wide)


def _kept(x: jax.Array, keep: jax.Array | None) -> jax.Array:
    return x if keep is None else jnp.where(keep, x, jnp.zeros((), x.dtype))
