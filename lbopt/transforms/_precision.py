"""Precision: fp32 updates between the links of a chain, parameters rounded to their dtype."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from lbopt import tree, types


def chain_in_wide_precision(*links: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `optax.chain(*links)`, run on updates in fp32 (or wider) and cast back at the end.

    A chain of transforms that each keep the dtype of their updates rounds a bf16 direction between
    every two links; this rounds once.
    """
    inner = optax.chain(*links)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: types.Params | None = None,
        **extra_args,
    ):
        tree.check_inexact(updates, "updates")
        wide = jax.tree.map(lambda u: u.astype(tree.wide_dtype(u.dtype)), updates)
        directions, state = inner.update(wide, state, params, **extra_args)
        return jax.tree.map(lambda u, d: d.astype(u.dtype), updates, directions), state

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def applied(params: jax.Array, updates: jax.Array) -> jax.Array:
    """Return a leaf after an update, rounded to its dtype.

    Without the explicit rounding XLA may keep more bits of a narrow number that is used at once.
    """
    return rounded_to(optax.apply_updates(params, updates), params.dtype)


def rounded_to(x: jax.Array, dtype: Any) -> jax.Array:
    """Return numbers rounded to the nearest of a narrower dtype, in the dtype they have."""
    info = jnp.finfo(dtype)
    return tree.map_parts(lambda part: jax.lax.reduce_precision(part, info.nexp, info.nmant), x)
