"""What a state holds for each replica, where a checkpoint was saved with more or fewer of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax

from lbopt import types
from lbopt.aggregators import protocol
from lbopt.parallel import shards
from lbopt.parallel.mesh import DATA_AXIS
from lbopt.parallel.state import TrainState
from lbopt.train.seal import BEFORE_AGGREGATORS


def count(state: TrainState) -> int | None:
    """Return of how many replicas a state (or its shapes) holds the memory; None if of none."""
    leaves = jax.tree.leaves(_local(state))
    return leaves[0].shape[0] if leaves else None


class _Earlier(flax.struct.PyTreeNode):
    """A state as it was before there were aggregators; see `TrainState`."""

    step: jax.Array
    params: types.Params
    model_state: types.ModelState
    opt_state: Any
    rng: jax.Array


def shapes_for(like: TrainState, replicas: int | None) -> Any:
    """Return the shapes of a state that so many replicas have saved, split over the devices of the state that is wanted.

    Args:
      like: shapes, dtypes and shardings.
      replicas: what the checkpoint's seal says.
    """
    if replicas == BEFORE_AGGREGATORS:
        return _Earlier(like.step, like.params, like.model_state, like.opt_state, like.rng)
    if replicas is None or count(like) in (None, replicas):
        return like

    def one(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (replicas, *x.shape[1:])
        mesh = jax.sharding.Mesh(x.sharding.mesh.devices.reshape(-1), (DATA_AXIS,))
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=shards.split_sharding(mesh, shape))

    return _with_local(like, jax.tree.map(one, _local(like)))


def as_now(state: Any) -> TrainState:
    """Return what was read for `shapes_for` as a state of today."""
    if isinstance(state, _Earlier):
        return TrainState(state.step, state.params, state.model_state, state.opt_state, state.rng)
    return state


def fitted(state: TrainState, like: TrainState, say: Callable[[str], None]) -> TrainState:
    """Return a state whose aggregator remembers something of as many replicas as `like` has, and say so if that is new."""
    was, now = count(state), count(like)
    if was == now or was is None or now is None:
        return state
    say(
        f"warning: {was} replicas saved this state and there are {now} now: what the aggregator remembers of each was rebuilt, "
        "every replica has the mean"
    )
    shardings = jax.tree.map(lambda x: x.sharding, _local(like))
    rebuild = jax.jit(lambda own: protocol.rebuilt(own, now).local, out_shardings=shardings)
    return _with_local(state, rebuild(state.aggregator_state))


def _local(state: TrainState) -> Any:
    return state.aggregator_state.local if isinstance(state.aggregator_state, protocol.AggregatorState) else ()


def _with_local(state: TrainState, local: Any) -> TrainState:
    return state.replace(aggregator_state=state.aggregator_state._replace(local=local))
