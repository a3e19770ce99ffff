"""The mean over devices of gradients that lie with their devices, in a precision that was chosen."""

from __future__ import annotations

from typing import Any

import jax

from lbopt import tree, types


def mean(axis_name: str, dtype: Any, grads: types.Params) -> types.Params:
    """Within a mapped function: sum over replicas in `dtype` (None: their own) and divide in fp32 or wider."""
    if dtype is None:
        return jax.lax.pmean(grads, axis_name)
    count = jax.lax.axis_size(axis_name)

    def one(x: jax.Array) -> jax.Array:
        total = jax.lax.psum(x.astype(dtype), axis_name)
        return (total.astype(tree.wide_dtype(x.dtype)) / count).astype(x.dtype)

    return jax.tree.map(one, grads)


def stacked(grads: types.Params) -> types.Params:
    """Within a mapped function: leave gradients where they are, as rows of arrays [devices, ...]."""
    return jax.tree.map(lambda x: x[None], grads)
