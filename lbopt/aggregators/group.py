"""What replicas tell each other about their gradients, written once for one device and for many.

An aggregator sees rows [r, ...]: the gradients of the replicas that live on this device, in the replicas' order. On one
device these are all; in a mapped function (`shard_map`, `pmap`) they are its part, and what follows are explicit collectives
over the mapped axis. Nothing is left to the partitioner, which gathers dense gradients where a sparse message was meant.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from lbopt import types


@dataclasses.dataclass(frozen=True)
class Group:
    """The replicas whose gradients meet.

    Attributes:
      num_replicas: how many there are, R; a multiple of the number of devices.
      axis_name: the mapped axis over which they are spread; None if all of them are here.
      part_axis: the mapped axis over whose devices the gradient of each replica is split; None if each has all of it.
    """

    num_replicas: int
    axis_name: types.AxisName = None
    part_axis: types.AxisName = None

    @property
    def num_devices(self) -> int:
        """Devices that share the replicas."""
        return 1 if self.axis_name is None else jax.lax.axis_size(self.axis_name)

    @property
    def num_rows(self) -> int:
        """Replicas on each device, r."""
        return self.num_replicas // self.num_devices

    def numbers(self) -> jax.Array:
        """Return the numbers [r] int32 of the replicas that are here."""
        first = 0 if self.axis_name is None else jax.lax.axis_index(self.axis_name) * self.num_rows
        return first + jnp.arange(self.num_rows)

    def sum(self, rows: types.PyTree) -> types.PyTree:
        """Sum arrays [r, ...] over all replicas, in their own dtype."""
        here = jax.tree.map(lambda x: x[0] if len(x) == 1 else x.sum(0), rows)
        return here if self.axis_name is None else jax.lax.psum(here, self.axis_name)

    def sum_with_parts(self, rows: types.PyTree) -> types.PyTree:
        """Sum arrays [r, ...] over all replicas and over the parts of their gradients."""
        total = self.sum(rows)
        return total if self.part_axis is None else jax.lax.psum(total, self.part_axis)

    def mean(self, rows: types.PyTree) -> types.PyTree:
        """Return the mean over all replicas of arrays [r, ...]."""
        return jax.tree.map(lambda x: x / self.num_replicas, self.sum(rows))

    def max(self, rows: types.PyTree) -> types.PyTree:
        """Return the largest elements over all replicas of arrays [r, ...]."""
        here = jax.tree.map(lambda x: x.max(0), rows)
        return here if self.axis_name is None else jax.lax.pmax(here, self.axis_name)

    def gather(self, rows: jax.Array) -> jax.Array:
        """Return the rows [R, ...] of all replicas, in order."""
        return rows if self.axis_name is None else jax.lax.all_gather(rows, self.axis_name, tiled=True)

    def exchange(self, rows: jax.Array) -> jax.Array:
        """Give each device an equal piece of every replica's row: [r, n] -> [R, piece], in the replicas' order.

        Args:
          rows: [r, n]; the devices divide n.
        """
        if self.axis_name is None:
            return rows
        return _as_written(
            lambda x: jax.lax.all_to_all(x, self.axis_name, split_axis=1, concat_axis=0, tiled=True), rows
        )

    def piece(self, row: jax.Array) -> jax.Array:
        """Cut from [..., n], which all devices know, what `exchange` gives to this device."""
        if self.axis_name is None:
            return row
        width = row.shape[-1] // self.num_devices
        return jax.lax.dynamic_slice_in_dim(row, jax.lax.axis_index(self.axis_name) * width, width, -1)

    def join(self, piece: jax.Array) -> jax.Array:
        """Undo the cutting of `exchange`: every device's [piece] -> [n] on all of them."""
        if self.axis_name is None:
            return piece
        return _as_written(lambda x: jax.lax.all_gather(x, self.axis_name, tiled=True), piece)


def _as_written(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Move numbers of few bits as they are: XLA's CPU backend would widen them first, and moves their bits instead."""
    if x.dtype.itemsize >= 4:
        return move(x)
    bits = {1: jnp.uint8, 2: jnp.uint16}[x.dtype.itemsize]

    def as_bits(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(move(jax.lax.bitcast_convert_type(x, bits)), x.dtype)

    return jax.lax.platform_dependent(x, cpu=as_bits, default=move)


class Packing:
    """Many arrays [r, ...] as one row each, so that one collective carries them.

    Args:
      like: a pytree of arrays (or shapes) [r, ...] of one dtype.
      multiple: the length of a row is rounded up to one of this.
    """

    def __init__(self, like: types.PyTree, multiple: int = 1):
        leaves, self._structure = jax.tree.flatten(like)
        self._shapes = [leaf.shape[1:] for leaf in leaves]
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self._padding = -sum(self._sizes) % multiple

    def pack(self, tree: types.PyTree) -> jax.Array:
        """Return [r, n]."""
        leaves = jax.tree.leaves(tree)
        rows = len(leaves[0])
        flat = [leaf.reshape(rows, -1) for leaf in leaves]
        if self._padding:
            flat.append(jnp.zeros((rows, self._padding), leaves[0].dtype))
        return flat[0] if len(flat) == 1 else jnp.concatenate(flat, 1)

    def unpack(self, packed: jax.Array) -> types.PyTree:
        """Turn [..., n] back into a pytree of arrays [..., *shape]."""
        lead, leaves, start = packed.shape[:-1], [], 0
        for shape, size in zip(self._shapes, self._sizes, strict=True):
            leaves.append(packed[..., start : start + size].reshape(*lead, *shape))
            start += size
        return jax.tree.unflatten(self._structure, leaves)


def largest(group: Group, vectors: list[jax.Array]) -> list[jax.Array]:
    """Return the largest magnitudes [layers, 1] fp32 over all replicas of vectors [r, layers, n], by one small all-reduce."""
    own = [jnp.abs(x).max(-1, keepdims=True).astype(jnp.float32) for x in vectors]
    packing = Packing(own)
    return packing.unpack(group.max(packing.pack(own)))
