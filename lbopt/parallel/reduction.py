"""Reductions over replicas: gradients in a precision that was chosen, and the model's state leaf by leaf."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from lbopt import tree, types


def mean(axis_name: str, dtype: Any, grads: types.Params) -> types.Params:
    """Within a mapped function: sum over replicas in `dtype` (None: their own; complex numbers part by part) and divide in fp32 or wider."""
    if dtype is None:
        return jax.lax.pmean(grads, axis_name)
    count = jax.lax.axis_size(axis_name)

    def one(x: jax.Array) -> jax.Array:
        total = jax.lax.psum(x.astype(dtype), axis_name)
        return (total.astype(tree.wide_dtype(x.dtype)) / count).astype(x.dtype)

    return jax.tree.map(lambda x: tree.map_parts(one, x), grads)


def stacked(grads: types.Params) -> types.Params:
    """Within a mapped function: leave gradients where they are, as rows of arrays [devices, ...]."""
    return jax.tree.map(lambda x: x[None], grads)


def state(axis_name: str, model_state: types.ModelState) -> types.ModelState:
    """Within a mapped function: the mean over replicas of leaves that have one, the first replica's value of the others."""
    return jax.tree.map(
        lambda x: (_mean_of_state if has_mean(x) else _of_first)(x, axis_name), model_state
    )


def has_mean(x: jax.Array) -> bool:
    """Return whether a leaf of a state is averaged: floating-point ones are; counts, flags and random keys are not."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _mean_of_state(x: jax.Array, axis_name: str) -> jax.Array:
    return jax.lax.pmean(x.astype(tree.wide_dtype(x.dtype)), axis_name).astype(x.dtype)


def _of_first(x: jax.Array, axis_name: str) -> jax.Array:
    """Broadcast the first replica's value: a sum to which the others add nothing."""
    if x.dtype == jax.dtypes.float0:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _of_first(jax.random.key_data(x), axis_name)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    number = (
        x.astype(jnp.int32) if x.dtype.itemsize < 4 else x
    )  # bool, and the narrow ones some backends cannot sum
    mine = jnp.where(jax.lax.axis_index(axis_name) == 0, number, jnp.zeros_like(number))
    return jax.lax.psum(mine, axis_name).astype(x.dtype)
