"""What a state holds for each replica, where a checkpoint was saved with more or fewer of them, or cut into other parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
from jax.sharding import NamedSharding

from lbopt import types
from lbopt.aggregators import AggregatorState, rebuilt_state
from lbopt.parallel import (
    DATA_AXIS,
    WITHIN_AXIS,
    TrainState,
    leaf_as_rows,
    leaf_from_rows,
    shape_of_rows,
    split_sharding,
)
from lbopt.train._seal import BEFORE_AGGREGATORS


def count(state: TrainState) -> int | None:
    """Return of how many replicas a state (or its shapes) holds the memory; None if of none."""
    leaves = jax.tree.leaves(_local(state))
    return leaves[0].shape[0] if leaves else None


def parts_of(state: TrainState) -> int:
    """Return into how many parts each replica's memory of a leaf is cut, by where it (or what is to be one) lies."""
    for leaf in jax.tree.leaves(_local(state)):
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding) and WITHIN_AXIS in sharding.spec:
            return sharding.mesh.shape[WITHIN_AXIS]
    return 1


class _Earlier(flax.struct.PyTreeNode):
    """A state as it was before there were aggregators; see `TrainState`."""

    step: jax.Array
    params: types.Params
    model_state: types.ModelState
    opt_state: Any
    rng: jax.Array


def shapes_for(like: TrainState, replicas: int | None, parts: int | None) -> Any:
    """Return the shapes of a state that so many replicas have saved, split over the devices of the state that is wanted.

    Args:
      like: shapes, dtypes and shardings.
      replicas: what the checkpoint's seal says.
      parts: likewise.
    """
    if replicas == BEFORE_AGGREGATORS:
        return _Earlier(like.step, like.params, like.model_state, like.opt_state, like.rng)
    now = count(like)
    if replicas is None or now is None or (replicas == now and parts in (None, parts_of(like))):
        return like
    mesh = jax.sharding.Mesh(
        jax.tree.leaves(_local(like))[0].sharding.mesh.devices.reshape(-1), (DATA_AXIS,)
    )

    def lying(shape: tuple[int, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=split_sharding(mesh, shape))

    if parts in (None, parts_of(like)):
        return _with_local(
            like, jax.tree.map(lambda x: lying((replicas, *x.shape[1:]), x), _local(like))
        )

    def cut(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if parts == 1 else shape_of_rows(shape, parts)

    own = like.aggregator_state
    return like.replace(
        aggregator_state=own._replace(
            local=_by_parameter(
                lambda x, p: lying((replicas, *cut(p.shape)), x), own.local, like.params
            ),
            mirrored=_by_parameter(lambda x, p: lying(cut(p.shape), x), own.mirrored, like.params),
        )
    )


def as_now(state: Any) -> TrainState:
    """Return what was read for `shapes_for` as a state of today."""
    if isinstance(state, _Earlier):
        return TrainState(state.step, state.params, state.model_state, state.opt_state, state.rng)
    return state


def fitted(
    state: TrainState, like: TrainState, parts: int | None, say: Callable[[str], None]
) -> TrainState:
    """Return a state whose aggregator remembers something of as many replicas as `like` has, in as many parts.

    Args:
      state: what was read for `shapes_for`.
      like: shapes, dtypes and shardings.
      parts: what the checkpoint's seal says.
      say: is given a line if there are more or fewer replicas.
    """
    was, now = count(state), count(like)
    if was is None or now is None:
        return state
    here = parts_of(like)
    if was != now:
        say(
            f"warning: {was} replicas saved this state and there are {now} now: what the aggregator remembers of each was rebuilt, "
            "every replica has the mean"
        )
    elif parts in (None, here):
        return state
    before = here if parts is None else parts

    def cut_anew(x: jax.Array, like: jax.Array) -> jax.Array:
        whole = x if before == 1 else leaf_from_rows(x, like.shape)
        return whole if here == 1 else leaf_as_rows(whole, here)

    def rows_anew(x: jax.Array, like: jax.Array) -> jax.Array:
        return jax.vmap(lambda row: cut_anew(row, like))(x)

    def rebuild(own: AggregatorState) -> AggregatorState:
        if before != here:
            local = _by_parameter(rows_anew, own.local, like.params)
            own = own._replace(
                local=local, mirrored=_by_parameter(cut_anew, own.mirrored, like.params)
            )
        return own if was == now else rebuilt_state(own, now)

    shardings = jax.tree.map(lambda x: x.sharding, like.aggregator_state)
    return state.replace(
        aggregator_state=jax.jit(rebuild, out_shardings=shardings)(state.aggregator_state)
    )


def _by_parameter(change: Callable[[Any, Any], Any], memory: Any, params: types.Params) -> Any:
    """Change what an aggregator that takes parts remembers: trees like the parameters, one after another."""
    leaves, structure = jax.tree.flatten(memory)
    return jax.tree.unflatten(
        structure, list(map(change, leaves, itertools.cycle(jax.tree.leaves(params))))
    )


def _local(state: TrainState) -> Any:
    return (
        state.aggregator_state.local if isinstance(state.aggregator_state, AggregatorState) else ()
    )


def _with_local(state: TrainState, local: Any) -> TrainState:
    return state.replace(aggregator_state=state.aggregator_state._replace(local=local))
