"""State of aggregators, and of local steps, restored for another number of replicas or slices."""

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
    LocalState,
    TrainState,
    leaf_as_rows,
    leaf_from_rows,
    rebuilt_workers,
    shape_of_rows,
    split_sharding,
    take_fragment,
)
from lbopt.train._seal import BEFORE_AGGREGATORS


def count(state: TrainState) -> int | None:
    """Return the number of replicas whose memory a state (or its shapes) holds; None for none."""
    workers = state.aggregator_state
    if isinstance(workers, LocalState):
        return workers.present.shape[0]
    leaves = jax.tree.leaves(_locals(state))
    return leaves[0].shape[0] if leaves else None


def slices_of(state: TrainState) -> int:
    """Return the number of slices of each replica's memory of a leaf, by the leaf's sharding."""
    for leaf in jax.tree.leaves(_locals(state)):
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding) and WITHIN_AXIS in sharding.spec:
            return sharding.mesh.shape[WITHIN_AXIS]
    return 1


class _StateWithoutAggregator(flax.struct.PyTreeNode):
    """A `TrainState` as an earlier version saved it."""

    step: jax.Array
    params: types.Params
    model_state: types.ModelState
    opt_state: Any
    rng: jax.Array


def shapes_for(like: TrainState, replicas: int | None, slices: int | None) -> Any:
    """Return the shapes of a saved state, laid out over the devices of the state that is wanted.

    Args:
      like: Shapes, dtypes and shardings of the wanted state.
      replicas: Number of replicas in the checkpoint's seal.
      slices: Number of slices in the checkpoint's seal.
    """
    if replicas == BEFORE_AGGREGATORS:
        return _StateWithoutAggregator(
            like.step, like.params, like.model_state, like.opt_state, like.rng
        )
    now = count(like)
    slices_saved = slices_of(like) if slices is None else slices
    same_slices = slices_saved == slices_of(like)
    if replicas is None or now is None or (replicas == now and same_slices):
        return like

    # Their numbers need not fit the mesh, so the arrays are split over all devices in a row.
    devices = _mesh_of(like).devices.reshape(-1)
    mesh = jax.sharding.Mesh(devices, (DATA_AXIS,))

    def split(shape: tuple[int, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=split_sharding(mesh, shape))

    def rows(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return split((replicas, *x.shape[1:]), x)

    def saved(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if slices_saved == 1 else shape_of_rows(shape, slices_saved)

    def saved_local(x: jax.ShapeDtypeStruct, param: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return split((replicas, *saved(param.shape)), x)

    def saved_mirror(x: jax.ShapeDtypeStruct, param: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return split(saved(param.shape), x)

    def of_memory(memory: AggregatorState, params: types.Params) -> AggregatorState:
        if same_slices:
            return memory._replace(local=jax.tree.map(rows, memory.local))
        return memory._replace(
            local=_by_parameter(saved_local, memory.local, params),
            mirrored=_by_parameter(saved_mirror, memory.mirrored, params),
        )

    found = _each_memory(like.aggregator_state, like.params, of_memory)
    if isinstance(found, LocalState):
        of_workers = ("params", "model_state", "opt_state", "present")
        found = found._replace(
            **{name: jax.tree.map(rows, getattr(found, name)) for name in of_workers}
        )
    return like.replace(aggregator_state=found)


def as_now(state: Any) -> TrainState:
    """Return a state that was read for `shapes_for` as one of this version."""
    if isinstance(state, _StateWithoutAggregator):
        return TrainState(state.step, state.params, state.model_state, state.opt_state, state.rng)
    return state


def fitted(
    state: TrainState, like: TrainState, slices: int | None, say: Callable[[str], None]
) -> TrainState:
    """Return a state whose aggregator remembers as many replicas, in as many slices, as `like`.

    Args:
      state: A state that was read for `shapes_for`.
      like: Shapes, dtypes and shardings of the wanted state.
      slices: Number of slices in the checkpoint's seal.
      say: Function that gets a line if the number of replicas has changed.
    """
    before = count(state)
    now = count(like)
    if before is None or now is None:
        return state
    slices_now = slices_of(like)
    slices_before = slices_now if slices is None else slices
    if before != now:
        rebuilt = "the aggregator's memory of each was rebuilt, every replica has the mean"
        if isinstance(like.aggregator_state, LocalState):
            rebuilt = "every worker starts at the mean of those before, with the optimizer's state "
            rebuilt += "of the first one"
        say(f"warning: {before} replicas saved this state and there are {now} now: {rebuilt}")
    elif slices_before == slices_now:
        return state

    # Whole leaves come between the two divisions into slices, whose paddings may differ.
    def cut_again(x: jax.Array, param: jax.Array) -> jax.Array:
        whole = x if slices_before == 1 else leaf_from_rows(x, param.shape)
        return whole if slices_now == 1 else leaf_as_rows(whole, slices_now)

    def cut_each_again(x: jax.Array, param: jax.Array) -> jax.Array:
        return jax.vmap(lambda of_replica: cut_again(of_replica, param))(x)

    def of_memory(memory: AggregatorState, params: types.Params) -> AggregatorState:
        if slices_before == slices_now:
            return memory
        return memory._replace(
            local=_by_parameter(cut_each_again, memory.local, params),
            mirrored=_by_parameter(cut_again, memory.mirrored, params),
        )

    def rebuild(state: TrainState) -> Any:
        found = _each_memory(state.aggregator_state, like.params, of_memory)
        if before == now:
            return found
        if isinstance(found, LocalState):
            return rebuilt_workers(state.replace(aggregator_state=found), now).aggregator_state
        return rebuilt_state(found, now)

    shardings = jax.tree.map(lambda x: x.sharding, like.aggregator_state)
    rebuilt = jax.jit(rebuild, out_shardings=shardings)(state)
    return state.replace(aggregator_state=rebuilt)


def _by_parameter(change: Callable[[Any, Any], Any], memory: Any, params: types.Params) -> Any:
    """Map a function of (leaf, parameter) over the memory of an aggregator that takes slices.

    Such a memory is one or more trees like the parameters, one after another.
    """
    leaves, structure = jax.tree.flatten(memory)
    parameters = itertools.cycle(jax.tree.leaves(params))
    return jax.tree.unflatten(structure, list(map(change, leaves, parameters)))


def _each_memory(
    memory: Any,
    params: types.Params,
    change: Callable[[AggregatorState, types.Params], AggregatorState],
) -> Any:
    """Map a function over the memory of an aggregator, or of each fragment of local steps."""
    if not isinstance(memory, LocalState):
        return change(memory, params)
    count = len(memory.exchange)
    return memory._replace(
        exchange=tuple(
            change(part, take_fragment(params, fragment, count))
            for fragment, part in enumerate(memory.exchange)
        )
    )


def _locals(state: TrainState) -> Any:
    """Return the memories that aggregators keep of each replica; () without any."""
    memory = state.aggregator_state
    if isinstance(memory, LocalState):
        return [part.local for part in memory.exchange]
    return memory.local if isinstance(memory, AggregatorState) else ()


def _mesh_of(like: TrainState) -> jax.sharding.Mesh:
    """Return the mesh on which replicas keep arrays of their own."""
    rows = like.aggregator_state
    found: Any = rows.params if isinstance(rows, LocalState) else _locals(like)
    return jax.tree.leaves(found)[0].sharding.mesh
