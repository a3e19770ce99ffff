"""The exchange of gradients between replicas, written once for one device and for many.

An aggregator gets rows [r, ...], the gradients of the replicas on this device, in the order of the
replicas. On one device these are all replicas. In a mapped function (`shard_map`, `pmap`) they are
its shard, and the methods here are explicit collectives over the mapped axis. None is left to the
partitioner, which gathers dense gradients where a sparse message is meant.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lbopt import types


@dataclasses.dataclass(frozen=True)
class Group:
    """The replicas whose gradients are aggregated.

    Attributes:
      num_replicas: Number of replicas R, a multiple of the number of devices.
      axis_name: Mapped axis over which the replicas are spread; None if all are on this device.
      part_axis: Mapped axis over which the gradient of each replica is split; None if it is whole.

    >>> import jax.numpy as jnp
    >>> rows = jnp.array([[1.0, 2.0], [3.0, 4.0]])  # the gradients of two replicas
    >>> print(Group(num_replicas=2).mean(rows))
    [2. 3.]
    """

    num_replicas: int
    axis_name: types.AxisName = None
    part_axis: types.AxisName = None

    @property
    def num_devices(self) -> int:
        """Number of devices that share the replicas."""
        return 1 if self.axis_name is None else jax.lax.axis_size(self.axis_name)

    @property
    def num_rows(self) -> int:
        """Number of replicas on each device, r."""
        return self.num_replicas // self.num_devices

    def numbers(self) -> jax.Array:
        """Return the numbers [r] int32 of the replicas on this device."""
        first = 0 if self.axis_name is None else jax.lax.axis_index(self.axis_name) * self.num_rows
        return first + jnp.arange(self.num_rows)

    def key(self, seed: int, count: jax.Array) -> jax.Array:
        """Return the key of a step, equal on all replicas and different for each gradient shard."""
        key = jax.random.fold_in(jax.random.key(seed), count)
        return (
            key
            if self.part_axis is None
            else jax.random.fold_in(key, jax.lax.axis_index(self.part_axis))
        )

    def sum(self, rows: types.PyTree) -> types.PyTree:
        """Sum arrays [r, ...] over all replicas, in their own dtype."""
        here = jax.tree.map(lambda x: x[0] if len(x) == 1 else x.sum(0), rows)
        return here if self.axis_name is None else jax.lax.psum(here, self.axis_name)

    def sum_with_parts(self, rows: types.PyTree) -> types.PyTree:
        """Sum arrays [r, ...] over all replicas and over the shards of their gradients."""
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
        return (
            rows if self.axis_name is None else jax.lax.all_gather(rows, self.axis_name, tiled=True)
        )

    def exchange(self, rows: jax.Array) -> jax.Array:
        """Give each device an equal slice of every replica's array.

        Args:
          rows: [r, m, ...]; the number of devices divides m.

        Returns:
          [R, m / devices, ...], in the order of the replicas.
        """
        if self.axis_name is None:
            return rows
        # On a TPU a leading axis of one would change the layout, and move all numbers.
        if len(rows) == 1:
            shards = _as_written(
                lambda x: jax.lax.all_to_all(x, self.axis_name, 0, 0, tiled=True), rows[0]
            )
            return shards.reshape(self.num_replicas, -1, *rows.shape[2:])
        return _as_written(lambda x: jax.lax.all_to_all(x, self.axis_name, 1, 0, tiled=True), rows)

    def shard(self, array: jax.Array) -> jax.Array:
        """Return this device's slice, as by `exchange`, of an array [m, ...] on all devices."""
        if self.axis_name is None:
            return array
        height = len(array) // self.num_devices
        return jax.lax.dynamic_slice_in_dim(
            array, jax.lax.axis_index(self.axis_name) * height, height
        )

    def join(self, shard: jax.Array) -> jax.Array:
        """Join the devices' slices [m / devices, ...] of `exchange` to [m, ...] on all devices."""
        if self.axis_name is None:
            return shard
        return _as_written(lambda x: jax.lax.all_gather(x, self.axis_name, tiled=True), shard)


def _as_written(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Move numbers of few bits without widening them, which XLA's CPU backend would do first."""
    if x.dtype.itemsize >= 4:
        return move(x)
    bits = {1: jnp.uint8, 2: jnp.uint16}[x.dtype.itemsize]

    def as_bits(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(move(jax.lax.bitcast_convert_type(x, bits)), x.dtype)

    return jax.lax.platform_dependent(x, cpu=as_bits, default=move)


class Shares:
    """Arrays [r, *shape] packed into few arrays [r, m, n] or [r, m], which few collectives carry.

    The devices can take equal shares of m. Arrays of one width (their last dimension) are stacked
    as matrices and so keep their layout on a TPU, where a new layout takes many times longer than
    the transfer. Narrow arrays, and widths with too few rows, become one row.

    Args:
      like: Pytree of arrays (or shapes) [r, *shape] of one dtype.
      num_devices: Number of devices that share m, which is padded with zeros to a multiple of it.
    """

    def __init__(self, like: types.PyTree, num_devices: int):
        leaves, self._structure = jax.tree.flatten(like)
        self._shapes = [leaf.shape[1:] for leaf in leaves]

        widths: dict[int, list[int]] = {}
        for number, shape in enumerate(self._shapes):
            widths.setdefault(matrix_width(shape), []).append(number)

        flat = widths.pop(0, [])
        self._stacks: list[tuple[int, list[int], int]] = []
        for width, numbers in widths.items():
            heights = {number: self._height(number, width) for number in numbers}
            padding = row_padding(sum(heights.values()), num_devices)
            if padding is None:
                flat += numbers
                continue
            # Leaves whose rows do not fill the tiles of a TPU come last, so that the others stay
            # aligned with the tiles.
            ragged = [number for number in numbers if heights[number] % _TILE_ROWS]
            self._stacks.append(
                (width, [*(n for n in numbers if n not in ragged), *ragged], padding)
            )
        if flat:
            self._stacks.append(
                (0, flat, -sum(self._height(number, 0) for number in flat) % num_devices)
            )

    def _height(self, number: int, width: int) -> int:
        return math.prod(self._shapes[number]) // (width or 1)

    def pack(self, tree: types.PyTree) -> list[jax.Array]:
        """Return the arrays [r, m, n], and [r, m] for narrow leaves."""
        leaves = jax.tree.leaves(tree)
        packed = []
        for width, numbers, padding in self._stacks:
            tail = (width,) if width else ()
            rows = [
                leaves[i].reshape(len(leaves[i]), self._height(i, width), *tail) for i in numbers
            ]
            if padding:
                rows.append(jnp.zeros((len(rows[0]), padding, *tail), rows[0].dtype))
            packed.append(_joined(rows))
        return packed

    def unpack(self, packed: list[jax.Array]) -> types.PyTree:
        """Turn arrays [..., m, n] and [..., m] back into a pytree of arrays [..., *shape]."""
        leaves: list[Any] = [None] * len(self._shapes)
        for (width, numbers, _), rows in zip(self._stacks, packed, strict=True):
            axis = rows.ndim - (2 if width else 1)
            start = 0
            for number in numbers:
                stop = start + self._height(number, width)
                own = jax.lax.slice_in_dim(rows, start, stop, axis=axis)
                leaves[number] = own.reshape(*rows.shape[:axis], *self._shapes[number])
                start = stop
        return jax.tree.unflatten(self._structure, leaves)


_LANES = 128
"""Columns of a tile of a TPU."""
_TILE_ROWS = 32
"""Rows of 8-bit numbers in a tile of a TPU."""


def matrix_width(shape: tuple[int, ...]) -> int:
    """Return the last dimension of an array packed as a matrix, 0 for one packed as a row."""
    return shape[-1] if shape and shape[-1] >= _LANES and 0 not in shape else 0


def row_padding(height: int, num_devices: int) -> int | None:
    """Return the rows of padding for equal shares of the devices, of whole tiles if that is cheap.

    None if the padding would be more than a twentieth, or if a tile has more rows than the array.
    """
    if height < _TILE_ROWS:
        return None
    for unit in (_TILE_ROWS * num_devices, num_devices):
        if 20 * (-height % unit) <= height:
            return -height % unit
    return None


def _joined(arrays: list[jax.Array]) -> jax.Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, 1)


def largest(group: Group, layers: list[jax.Array]) -> list[jax.Array]:
    """Return the largest magnitudes over all replicas, by one small all-reduce.

    Args:
      group: The replicas.
      layers: Arrays [r, layers, ...].

    Returns:
      An fp32 array [layers, 1, ...] for each array of `layers`.
    """
    return group.max(
        [
            jnp.abs(x).max(tuple(range(2, x.ndim)), keepdims=True, initial=0).astype(jnp.float32)
            for x in layers
        ]
    )
