"""Leaves of a model's state: which have a mean, and how slices of a batch agree on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lbopt import tree, types
from lbopt.errors import UserError


def has_mean(x: Any) -> bool:
    """Return whether a leaf is averaged: floats are; counts, flags and random keys are not."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def by_mean(state: types.PyTree) -> tuple[types.PyTree, types.PyTree]:
    """Split a state into leaves with a mean and the others, each with None in place of the rest."""
    averaged = jax.tree.map(lambda x: x if has_mean(x) else None, state)
    return averaged, jax.tree.map(lambda x: None if has_mean(x) else x, state)


def joined(averaged: types.PyTree, others: types.PyTree) -> types.PyTree:
    """Undo `by_mean`."""
    pick = lambda a, b: b if a is None else a  # noqa: E731
    return jax.tree.map(pick, averaged, others, is_leaf=lambda x: x is None)


def mean_of_rows(x: jax.Array) -> jax.Array:
    """Return the mean over the leading axis; the first row of a leaf without a mean."""
    if not has_mean(x):
        return x[0]
    return x.astype(tree.wide_dtype(x.dtype)).mean(0).astype(x.dtype)


def over_replicas(axis_name: str, state: types.PyTree) -> types.PyTree:
    """In a mapped function, average leaves that have a mean; take the others from replica 0."""

    def one(x: jax.Array) -> jax.Array:
        if not has_mean(x):
            return _of_first(x, axis_name)
        return jax.lax.pmean(x.astype(tree.wide_dtype(x.dtype)), axis_name).astype(x.dtype)

    return jax.tree.map(one, state)


def _of_first(x: jax.Array, axis_name: str) -> jax.Array:
    """Broadcast the first replica's value."""
    if x.dtype == jax.dtypes.float0:
        return x
    is_first = jax.lax.axis_index(axis_name) == 0
    return chosen_row(x[None], is_first[None], lambda rows: jax.lax.psum(rows[0], axis_name))


def chosen_row(x: jax.Array, chosen: jax.Array, add: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return the one row of x [r, ...] where `chosen`, bool [r], holds: a sum, others are zeros.

    Args:
      x: Rows in any dtype, random keys too.
      chosen: True for one row of all that are added; zeros come back if there is none.
      add: Function that adds rows [r, ...], for instance those of all devices.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = chosen_row(jax.random.key_data(x), chosen, add)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))

    # Some backends sum neither bools nor numbers of less than 32 bits.
    number = x
    if x.dtype.itemsize < 4:
        number = x.astype(tree.wide_dtype(x.dtype) if has_mean(x) else jnp.int32)
    return add(where_rows(chosen, number, jnp.zeros_like(number))).astype(x.dtype)


def where_rows(chosen: jax.Array, one: jax.Array, other: jax.Array) -> jax.Array:
    """Return rows of one array where a flag of `chosen`, bool [r], holds, else of the other."""
    return jnp.where(chosen.reshape(-1, *(1,) * (one.ndim - 1)), one, other)


def with_dtypes_of(old: types.PyTree, new: types.PyTree) -> types.PyTree:
    """Return the new state in the old state's containers and dtypes.

    A step can then take its own result without a second compilation. Dtypes are restored only
    within one kind: an integer that the loss turned into a float stays a float. New leaves are
    allowed.

    Raises:
      UserError: If the new state lacks a leaf of the old one, or has it in another shape.
    """
    before = tree.by_name(old)
    after = tree.by_name(new)
    for name, was in before.items():
        if name not in after:
            reason = "not in the state that the loss returns; return every leaf, changed or not"
            raise UserError(f"model_state/{name}", reason=reason, code="missing")
        if jnp.shape(after[name]) != was.shape:
            reason = f"shape {was.shape}, but {jnp.shape(after[name])} in the state that the loss"
            reason += " returns; keep the shape"
            raise UserError(f"model_state/{name}", reason=reason, code="type")
    kept = [_like(before.get(name), jnp.asarray(now)) for name, now in after.items()]
    containers = old if before.keys() == after.keys() else new
    return jax.tree.unflatten(jax.tree.structure(containers), kept)


def _like(was: Any, now: jax.Array) -> jax.Array:
    return now.astype(was.dtype) if was is not None and _alike(was, now) else now


def _alike(one: Any, other: jax.Array) -> bool:
    kinds = jnp.floating, jnp.complexfloating, jnp.signedinteger, jnp.unsignedinteger
    both = lambda kind: all(jnp.issubdtype(x.dtype, kind) for x in (one, other))  # noqa: E731
    return any(map(both, kinds))
