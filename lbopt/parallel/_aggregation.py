"""An aggregator on the devices of a step: its replicas, the sharding of its state, the exchange.

With `over="replicas"` every replica's message goes to all devices. With `over="slices"` gradients
are first summed inside each slice, where communication is cheap, and each device sums one shard.
Each shard is compressed and sent to the devices with the same shard in the other slices; the
results are gathered inside the slice. So no byte crosses the data centre's network twice, and a
device keeps only its shard of the aggregator's state. Aggregators that need whole leaves
(`powersgd`, `agvm`, those for stacked layers) get the slice's whole mean instead, and all devices
of a slice send the same message.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lbopt import errors, tree, types
from lbopt.aggregators import (
    Aggregated,
    Aggregator,
    AggregatorState,
    Extra,
    Group,
    WireBytes,
    cast_like,
    second_moment_of,
    warn_of_wire_bytes,
    widened,
)
from lbopt.errors import UserError, require
from lbopt.parallel import _parts
from lbopt.parallel._mesh import DATA_AXIS, num_slices
from lbopt.parallel._state import TrainState

REPLICA_AXIS = "replica"
WITHIN_AXIS = "within"
_NOTHING = Extra()


class Aggregation:
    """An aggregator, the devices of a step, and the placement of replicas on them.

    Args:
      aggregator: The aggregator that replaces the mean.
      mesh: A one-axis mesh; None for a step on a single device.
      replicas_per_device: Number of replicas that each device runs sequentially.
      over: "replicas", "slices", or the number of neighbouring devices whose gradients are summed
        first.
      pmapped: Whether `jax.pmap` over the mesh runs the step; its results then lie on that mesh.

    Attributes:
      num_replicas: Number of replicas that the aggregator combines.
      within: Number of neighbouring devices that are summed first.
      mesh: The devices as an axis of replicas and one of the devices that are summed first; None
        for a single device.

    Raises:
      UserError: If an argument, or the number of replicas, does not fit; the error names it.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        mesh: Mesh | None,
        replicas_per_device: int = 1,
        over: str | int = "replicas",
        pmapped: bool = False,
    ):
        self.aggregator = aggregator
        self.replicas_per_device = replicas_per_device
        self.within = devices_summed_first(mesh, over)
        field = "reduction.replicas_per_device"
        fix = "devices that are summed first have one replica each; give 1"
        alone = self.within == 1 or replicas_per_device == 1
        require(alone, field, replicas_per_device, fix, code="conflict")
        devices = 1 if mesh is None else mesh.size
        self.num_replicas = devices * self.replicas_per_device // self.within
        with errors.about(field, replicas_per_device, code="mismatch"):
            aggregator.check_replicas(self.num_replicas)
        self.mesh = None if mesh is None else _two_axes(mesh, self.within)
        self._in_shards = self.within > 1 and aggregator.takes_parts
        self._pmapped_on = mesh if pmapped else None

    def first_state(self, state: TrainState) -> AggregatorState:
        """Return the aggregator's first state for a training state, as `init` does."""
        return self.init(state.params)

    def init(self, params: types.Params) -> AggregatorState:
        """Return the aggregator's first state; a pure function.

        Raises:
          UserError: If the aggregator does not fit the parameters.
        """
        return self.aggregator.first_state(self._parts_of(params), self.num_replicas)

    def check(self, state: TrainState) -> None:
        """Raise `UserError` unless the state and the optimizer fit this aggregator."""
        about = errors.about("aggregator", self.aggregator, code="conflict")
        with about, errors.under("", opt_state="aggregator", tx="aggregator"):
            self.aggregator.check_chain(state.opt_state, state.params)
            if self.aggregator.needs_second_moment:
                second_moment_of(state.opt_state)
        wanted = jax.eval_shape(self.init, state.params)
        fix = "the training state has none of its state; use state = step.place(state)"
        own = state.aggregator_state
        rebuild = "lbopt.aggregators.rebuilt_state"
        check_same_shapes(self.aggregator, self.num_replicas, wanted, own, fix, rebuild)

    def warn(self, params: types.Params) -> None:
        """Warn if more is sent than a plain mean would send."""
        if self.mesh is not None and self.replicas_per_device == 1:
            warn_of_wire_bytes(self.aggregator, self.wire_bytes(params), self.num_replicas)

    def wire_bytes(self, params: types.Params) -> WireBytes:
        """Return the bytes that a device with one replica sends in a step, and a ring all-reduce's.

        Communication inside a slice is not counted.
        """
        found = self.aggregator.wire_bytes(
            self._shard_shapes(params), self.num_replicas // self.replicas_per_device
        )
        return found if self._in_shards else found._replace(ring=found.ring / self.within)

    def sharding(self, state: AggregatorState) -> AggregatorState:
        """Return the sharding of each array of the aggregator's state, or of its shapes."""
        mesh = self.mesh
        specs = self.specs()
        if self._pmapped_on is not None:
            mesh = self._pmapped_on
            specs = AggregatorState(
                PartitionSpec(mesh.axis_names[0]), PartitionSpec(), PartitionSpec()
            )
        assert mesh is not None
        lie = [
            jax.tree.map(lambda _, spec=spec: NamedSharding(mesh, spec), part)
            for spec, part in zip(specs, state, strict=True)
        ]
        return AggregatorState(*lie)

    def __call__(self, rows: types.PyTree, state: TrainState) -> Aggregated:
        """Aggregate gradients [replicas, ...], sharded over their replicas, under "jit"."""
        extra = self._extra(state)
        if self.mesh is None:
            return self.aggregator.update(
                rows, state.aggregator_state, Group(self.num_replicas), extra
            )
        whole = PartitionSpec()
        every = PartitionSpec((REPLICA_AXIS, WITHIN_AXIS))
        specs = self.specs()
        mapped = jax.shard_map(
            lambda *given: tuple(self.on_device(*given)),
            mesh=self.mesh,
            in_specs=(every, specs, whole),
            out_specs=(whole, specs, whole),
            check_vma=False,
        )
        return Aggregated(*mapped(rows, state.aggregator_state, extra))

    def mapped(self, rows: types.PyTree, state: TrainState) -> Aggregated:
        """Aggregate in a function mapped by "pmap": each replica has its own row of `local`."""
        own = state.aggregator_state
        own = own._replace(local=jax.tree.map(lambda x: x[None], own.local))
        found = self.aggregator.update(
            rows, own, Group(self.num_replicas, DATA_AXIS), self._extra(state)
        )
        new = found.state._replace(local=jax.tree.map(lambda x: x[0], found.state.local))
        return found._replace(state=new)

    def _extra(self, state: TrainState) -> Extra:
        nu = second_moment_of(state.opt_state) if self.aggregator.needs_second_moment else None
        return Extra(nu)

    def on_device(
        self,
        rows: types.PyTree,
        state: AggregatorState,
        extra: Extra = _NOTHING,
        alike: bool = False,
    ) -> Aggregated:
        """Aggregate in a function mapped over `mesh`, each device with its own rows and state.

        Args:
          rows: The trees of this device's replicas, [r, ...].
          state: This device's part of the aggregator's state.
          extra: Optional inputs of the aggregator.
          alike: Whether devices that are summed first have the same rows already.
        """
        group = Group(self.num_replicas, REPLICA_AXIS, WITHIN_AXIS if self._in_shards else None)
        if self.within == 1:
            return self.aggregator.update(rows, state, group, extra)

        # All devices of a group send the same message if the aggregator needs whole leaves.
        wide = widened(rows)
        if not self._in_shards:
            summed = jax.tree.map(lambda x: x if alike else jax.lax.pmean(x, WITHIN_AXIS), wide)
            found = self.aggregator.update(summed, state, group, extra)
            return found._replace(updates=cast_like(found.updates, rows))

        def shard(x: jax.Array) -> jax.Array:
            rows = _parts.leaf_as_rows(x[0], self.within)
            if alike:
                height = len(rows) // self.within
                start = jax.lax.axis_index(WITHIN_AXIS) * height
                return jax.lax.dynamic_slice_in_dim(rows, start, height)[None]
            return jax.lax.psum_scatter(rows, WITHIN_AXIS, tiled=True)[None] / self.within

        found = self.aggregator.update(jax.tree.map(shard, wide), state, group, extra)

        def whole(x: jax.Array, row: jax.Array) -> jax.Array:
            rows = jax.lax.all_gather(x, WITHIN_AXIS, tiled=True)
            return _parts.leaf_from_rows(rows, row.shape[1:]).astype(row.dtype)

        return found._replace(updates=jax.tree.map(whole, found.updates, rows))

    def specs(self) -> AggregatorState:
        """Return how the arrays of the state lie over the axes of `mesh`."""
        # Without shards the state may have scalars, which have no axis to name.
        split = (WITHIN_AXIS,) if self._in_shards else ()
        return AggregatorState(
            PartitionSpec(REPLICA_AXIS, *split), PartitionSpec(*split), PartitionSpec()
        )

    def _parts_of(self, params: types.Params) -> types.Params:
        """Return the parameters in the aggregator's form: leaves, or rows for devices' shards."""
        return (
            jax.tree.map(lambda x: _parts.leaf_as_rows(x, self.within), params)
            if self._in_shards
            else params
        )

    def _shard_shapes(self, params: types.Params) -> types.Params:
        """Return the shapes of the arrays that one device sends."""
        if not self._in_shards:
            return params

        def shape(p: jax.Array) -> jax.ShapeDtypeStruct:
            height, *width = _parts.shape_of_rows(jnp.shape(p), self.within)
            return jax.ShapeDtypeStruct((height // self.within, *width), p.dtype)

        return jax.tree.map(shape, params)


def check_same_shapes(
    what: Any, num_replicas: int, wanted: Any, got: Any, fix: str, rebuild: str
) -> None:
    """Raise `UserError` unless what a training state has of an aggregator fits the replicas.

    Args:
      what: The aggregator.
      num_replicas: Number of replicas.
      wanted: Shapes of its state.
      got: The `aggregator_state` of the training state.
      fix: What to do if that is of another kind.
      rebuild: Name of the function that changes the number of replicas.
    """
    ours: Any = jax.tree.structure(wanted)
    if ours != jax.tree.structure(got):
        raise UserError("aggregator", what, fix, code="missing")
    for name, needed, there in zip(
        tree.leaf_names(wanted), jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True
    ):
        if needed.shape != jnp.shape(there):
            reason = f"it has shape {jnp.shape(there)}, {num_replicas} replicas need "
            reason += f"{needed.shape}; use {rebuild} for another number"
            raise UserError(f"aggregator_state/{name}", reason=reason, code="mismatch")


def devices_summed_first(mesh: Mesh | None, over: Any) -> int:
    """Return how many neighbouring devices are summed before the aggregator sees them."""
    if over == "replicas":
        return 1
    field = "reduction.over"
    devices = 1 if mesh is None else mesh.size
    if over == "slices":
        slices = 1 if mesh is None else num_slices(mesh)
        fix = "these devices are one slice; use 'replicas', or a number of devices"
        require(slices > 1, field, over, fix, code="mismatch")
        return devices // slices
    counts = isinstance(over, int) and not isinstance(over, bool) and over >= 1
    fix = "use 'replicas', 'slices', or the number of neighbouring devices to sum first"
    require(counts, field, over, fix, code="choice")
    fix = f"it does not divide the {devices} devices; use a divisor"
    require(devices % over == 0, field, over, fix, code="mismatch")
    return over


def _two_axes(mesh: Mesh, within: int) -> Mesh:
    """Return the same devices in the same order; those summed first are on the second axis."""
    names = (REPLICA_AXIS, WITHIN_AXIS)
    return Mesh(mesh.devices.reshape(-1, within), names, axis_types=(AxisType.Auto,) * 2)
