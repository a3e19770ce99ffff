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


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def attend(
    query_BHKQ: jax.Array,
    key_BHKS: jax.Array,
    value_BHKS: jax.Array,
    mask_BS: jax.Array,
    keep_BHQS: jax.Array | None,
    kept_share: float,
) -> jax.Array:
    """Return softmax(query . key / sqrt(K)) value, [B, H, K, Q] in the dtype of the values.

    Scores, exponentials and sums are fp32 or wider. Products are taken in the dtype of the inputs
    and accumulated in fp32. For rematerialisation the scores are named "scores" and the result
    "context".

    Args:
      query_BHKQ: Queries.
      key_BHKS: Keys.
      value_BHKS: Values.
      mask_BS: Bool, False for keys to ignore. If all keys of an example are False, they all get the
        same probability.
      keep_BHQS: Bool, False for probabilities to drop; None keeps all.
      kept_share: Divisor of the kept probabilities.

    References:
      Vaswani et al., arXiv 1706.03762v7, equation 1; Dao et al., arXiv 2205.14135v2, for the row
      sums of the backward pass.
    """
    return _forward(query_BHKQ, key_BHKS, value_BHKS, mask_BS, keep_BHQS, kept_share)[0]


def _forward(query_BHKQ, key_BHKS, value_BHKS, mask_BS, keep_BHQS, kept_share):
    dtype = value_BHKS.dtype
    scores_BHQS = _product("BHKQ,BHKS->BHQS", query_BHKQ, key_BHKS) * query_BHKQ.shape[2] ** -0.5
    scores_BHQS = checkpoint_name(scores_BHQS, "scores")

    # Not -inf, which gives NaN if all keys of an example are masked. The exponentials are summed
    # before they are cast, so that their roundings do not add up.
    lowest = jnp.finfo(scores_BHQS.dtype).min
    scores_BHQS = jnp.where(mask_BS[:, None, None, :], scores_BHQS, lowest)
    exponentials_BHQS = jnp.exp(scores_BHQS - jnp.max(scores_BHQS, -1, keepdims=True))
    sums_BHQ = jnp.sum(exponentials_BHQS, -1)
    exponentials_BHQS = exponentials_BHQS.astype(dtype)

    context_BHKQ = _product("BHQS,BHKS->BHKQ", _kept(exponentials_BHQS, keep_BHQS), value_BHKS)
    context_BHKQ = (context_BHKQ / (kept_share * sums_BHQ)[:, :, None]).astype(dtype)
    context_BHKQ = checkpoint_name(context_BHKQ, "context")

    inputs = query_BHKQ, key_BHKS, value_BHKS, mask_BS, keep_BHQS
    return context_BHKQ, (*inputs, exponentials_BHQS, sums_BHQ, context_BHKQ)


def _backward(kept_share, residuals, gradient_BHKQ):
    (
        query_BHKQ,
        key_BHKS,
        value_BHKS,
        mask_BS,
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
    d_scores_BHQS = jnp.where(
        mask_BS[:, None, None, :], exponentials_BHQS.astype(wide) * d_scores_BHQS, 0
    )
    d_scores_BHQS = (d_scores_BHQS * query_BHKQ.shape[2] ** -0.5).astype(dtype)

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


def _product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum(equation, x, y, preferred_element_type=wide)


def _kept(x: jax.Array, keep: jax.Array | None) -> jax.Array:
    return x if keep is None else jnp.where(keep, x, jnp.zeros((), x.dtype))
