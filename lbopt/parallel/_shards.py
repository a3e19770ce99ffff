"""Weight-update sharding: each device updates one shard of every large parameter.

Plain data parallelism repeats the optimizer's work on every device. Here the gradient, the
optimizer's state and a view of the parameters are sharded over the mesh, as far as their dimensions
divide: a device reads, computes and writes its shard, and the updated parameters are gathered.
Arrays keep their global shapes, so a checkpoint depends neither on sharding nor on the number of
devices. The compiler sums across shards what an optimizer computes over whole arrays (norms, for
trust ratios). Each of several slices holds all shards: parameters are gathered inside a slice, and
only gradients go between slices.

References:
  Xu et al., Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training,
  arXiv 2004.13336v1.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lbopt import tree, types
from lbopt.errors import UserError
from lbopt.parallel._mesh import is_on_torus, num_slices, replicated_sharding
from lbopt.parallel._state import TrainState

MIN_SPLIT_ELEMENTS = 1 << 14
"""Smaller arrays stay whole on every device: scalars and small vectors (logs, biases)."""
SLICE_AXIS = "slice"
SUM_KINDS = ("TPU v2", "TPU v3")
"""Devices on which parameters are gathered by a sum: the v3 compiler turns gathers of small shards
into sums anyway, and an explicit sum saves a copy; v2 is assumed to behave alike."""


def shard_shape(num_devices: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a device's shard of an array.

    The number of devices is factored into primes. Each prime splits a dimension that it divides:
    the largest one except the last dimension, which stays long for vector units and is split only
    when no other can be. Primes that divide no dimension leave the array replicated over their
    devices.

    >>> shard_shape(8, (3, 3, 64, 128)), shard_shape(2048, (1024, 1024)), shard_shape(8, (1024,))
    ((3, 3, 8, 128), (1, 512), (1024,))
    """
    taken = _taken(_primes(num_devices), shape)
    return tuple(
        size // math.prod(prime for _, prime in dim) for size, dim in zip(shape, taken, strict=True)
    )


def split_sharding(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Return the sharding of an array of this shape over a one-axis mesh, equal in all its slices.

    `shard_shape` gives the shard's shape. The sharding's own mesh has the same devices in the same
    order, one axis for the slices if there are several, and one for each prime.
    """
    primes = _primes(mesh.size // num_slices(mesh))
    lines = _torus_lines(mesh)
    # The axes of one torus line stand together, so that a sum or gather runs along the whole line.
    taken = [
        sorted((axis for axis, _ in dim), key=lambda axis: (lines[axis], axis))
        for dim in _taken(primes, shape)
    ]
    if not any(taken):
        return replicated_sharding(mesh)
    spec = [tuple(f"part{axis}" for axis in dim) or None for dim in taken]
    return NamedSharding(_prime_mesh(mesh), PartitionSpec(*spec))


def _prime_mesh(mesh: Mesh) -> Mesh:
    """Return the same devices in the same order, with an axis per prime factor of a slice's size.

    If there are several slices, their axis comes first.
    """
    slices = num_slices(mesh)
    primes = _primes(mesh.size // slices)
    names = [f"part{axis}" for axis in range(len(primes))]
    shape = primes
    if slices > 1:
        names = [SLICE_AXIS, *names]
        shape = [slices, *primes]
    return Mesh(mesh.devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def _torus_lines(mesh: Mesh) -> list[int]:
    """Return the torus axis along which each prime's mesh axis steps.

    It is 0 for all if one of them steps along two, or if the devices have no coordinates. The cores
    of a chip count as neighbours along x.
    """
    primes = _primes(mesh.size // num_slices(mesh))
    devices = list(mesh.devices.flat)[: math.prod(primes)]  # slices are alike
    if not all(map(is_on_torus, devices)):
        return [0] * len(primes)
    places = np.array([(*device.coords, device.core_on_chip) for device in devices]).reshape(
        *primes, -1
    )
    lines = []
    for axis in range(len(primes)):
        moved = np.flatnonzero(
            np.any(np.diff(places, axis=axis) != 0, axis=tuple(range(len(primes))))
        )
        if len(moved) != 1:
            return [0] * len(primes)
        lines.append(int(moved[0]) % (places.shape[-1] - 1))
    return lines


def _taken(primes: list[int], shape: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    """Return the primes that split each dimension, as (index among the primes, prime)."""
    taken: list[list[tuple[int, int]]] = [[] for _ in shape]
    left = list(shape)
    for axis, prime in enumerate(primes if math.prod(shape) >= MIN_SPLIT_ELEMENTS else ()):
        able = [dim for dim, size in enumerate(left) if size % prime == 0]
        if able:
            best = max(able, key=lambda dim: (dim < len(left) - 1, left[dim]))
            left[best] //= prime
            taken[best].append((axis, prime))
    return taken


@dataclasses.dataclass(frozen=True)
class UpdateShards:
    """The shard of the parameters that each device of a step updates.

    Attributes:
      mesh: Devices that update one shard each; None if every device updates everything.
      along_axes: Whether to gather along one axis of the torus at a time.
    """

    mesh: Mesh | None = None
    along_axes: bool = False

    def split(self, arrays: types.PyTree) -> types.PyTree:
        """In a traced function, give each device its shard of every array."""
        return arrays if self.mesh is None else split(self.mesh, arrays)

    def gather(self, arrays: types.PyTree) -> types.PyTree:
        """In a traced function, give each device every array whole."""
        return arrays if self.mesh is None else gather(self.mesh, arrays, self.along_axes)


WHOLE = UpdateShards()
"""Every device updates everything."""


def split(mesh: Mesh, arrays: types.PyTree) -> types.PyTree:
    """In a traced function, give each device its shard of every array."""
    return jax.tree.map(
        lambda x: jax.lax.with_sharding_constraint(x, split_sharding(mesh, x.shape)), arrays
    )


def gather(mesh: Mesh, arrays: types.PyTree, along_axes: bool = False) -> types.PyTree:
    """In a traced function, give each device every array whole.

    With `along_axes`, arrays are gathered along one axis of the torus after the other.
    """
    kind = mesh.devices.flat[0].device_kind
    one = (
        gather_along_axes
        if along_axes
        else gather_by_sum
        if kind in SUM_KINDS
        else gather_by_dimension
    )
    return jax.tree.map(lambda x: one(mesh, x), arrays)


def gather_by_dimension(mesh: Mesh, x: jax.Array) -> jax.Array:
    """Gather one dimension at a time, the last first; a single gather would change the layout."""
    where = split_sharding(mesh, x.shape)
    spec = list(where.spec)
    for dim in reversed(range(len(spec))):
        if spec[dim] is not None:
            spec[dim] = None
            x = jax.lax.with_sharding_constraint(x, NamedSharding(where.mesh, PartitionSpec(*spec)))
    return jax.lax.with_sharding_constraint(x, replicated_sharding(mesh))


def gather_by_sum(mesh: Mesh, x: jax.Array) -> jax.Array:
    """Sum arrays that are zero outside each device's shard. It is exact, but -0 becomes 0."""
    where = split_sharding(mesh, x.shape)
    if where.is_fully_replicated:
        return jax.lax.with_sharding_constraint(x, where)
    axes = [(names,) if isinstance(names, str) else names for names in where.spec]

    def whole(shard: jax.Array) -> jax.Array:
        starts = [
            jax.lax.axis_index(names) * size if names else 0
            for names, size in zip(axes, shard.shape, strict=True)
        ]
        mine = jax.lax.dynamic_update_slice(jnp.zeros(x.shape, x.dtype), shard, starts)
        return jax.lax.psum(mine, [name for names in axes if names for name in names])

    gathered = jax.shard_map(
        whole, mesh=where.mesh, in_specs=where.spec, out_specs=PartitionSpec(), check_vma=False
    )
    return gathered(x)


def scatter_mean(mesh: Mesh, stacked: types.PyTree, dtype: Any) -> types.PyTree:
    """In a traced function, give each device its shard of the mean of the devices' arrays.

    Sums run along one torus axis after the other, so that only shards travel along the second. The
    TPU compiler turns such sums into reduce-scatters; a sum over all devices of a larger slice it
    computes everywhere and then slices. Ying et al., arXiv 1811.06992v2, also sum in two
    dimensions.

    Args:
      mesh: A one-axis mesh.
      stacked: Arrays [devices, ...], each row on its device.
      dtype: Dtype of the sum; complex numbers are summed as real and imaginary parts. None for the
        arrays' own.
    """
    return jax.tree.map(
        lambda x: tree.map_parts(lambda real: _scatter_one(mesh, real, dtype), x), stacked
    )


def _scatter_one(mesh: Mesh, stacked: jax.Array, dtype: Any) -> jax.Array:
    where = split_sharding(mesh, stacked.shape[1:])
    prime_mesh = _prime_mesh(mesh)
    spec = where.spec if not where.is_fully_replicated else PartitionSpec()

    def summed(row: jax.Array) -> jax.Array:
        x = row[0].astype(dtype or row.dtype)
        left = set(prime_mesh.axis_names)
        for dim, names in _along_lines(mesh, spec):
            x = jax.lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True)
            left -= set(names)
        # The other axes split nothing: those between slices, and primes that divide no dimension.
        if left:
            x = jax.lax.psum(x, tuple(name for name in prime_mesh.axis_names if name in left))
        return (x.astype(tree.wide_dtype(row.dtype)) / mesh.size).astype(row.dtype)

    rows = PartitionSpec(prime_mesh.axis_names)
    return jax.shard_map(summed, mesh=prime_mesh, in_specs=rows, out_specs=spec, check_vma=False)(
        stacked
    )


def gather_along_axes(mesh: Mesh, x: jax.Array) -> jax.Array:
    """Gather along the lines of the torus, in the order opposite to that of `scatter_mean`."""
    where = split_sharding(mesh, x.shape)
    if where.is_fully_replicated:
        return jax.lax.with_sharding_constraint(x, where)

    def whole(shard: jax.Array) -> jax.Array:
        for dim, names in reversed(_along_lines(mesh, where.spec)):
            shard = jax.lax.all_gather(shard, names, axis=dim, tiled=True)
        return shard

    gathered = jax.shard_map(
        whole, mesh=where.mesh, in_specs=where.spec, out_specs=PartitionSpec(), check_vma=False
    )
    return gathered(x)


def _along_lines(mesh: Mesh, spec: PartitionSpec) -> list[tuple[int, tuple[str, ...]]]:
    """Return (dimension, mesh axes) in the order of the torus axes, one line of the torus each."""
    lines = _torus_lines(mesh)
    steps = []
    for line in sorted(set(lines)):
        for dim, names in enumerate(spec):
            names = (names,) if isinstance(names, str) else names or ()
            here = tuple(name for name in names if lines[int(name.removeprefix("part"))] == line)
            if here:
                steps.append((dim, here))
    return steps


def state_sharding(mesh: Mesh, state: TrainState, shard_update: bool) -> TrainState:
    """Return the sharding of each array of a state: replicated, or the optimizer's sharded."""
    whole = jax.tree.map(lambda _: replicated_sharding(mesh), state)
    if not shard_update:
        return whole
    return whole.replace(
        opt_state=jax.tree.map(lambda x: split_sharding(mesh, jnp.shape(x)), state.opt_state)
    )


def check_placed(state: TrainState, sharding: TrainState) -> None:
    """Raise `UserError` for the first array that was placed with another sharding."""
    for name, leaf, where in zip(
        tree.leaf_names(state), jax.tree.leaves(state), jax.tree.leaves(sharding), strict=True
    ):
        if getattr(leaf, "committed", False) and not leaf.sharding.is_equivalent_to(
            where, leaf.ndim
        ):
            fix = "the step needs another sharding; use "
            fix += "jax.device_put(state, step.state_sharding(state))"
            raise UserError(name, leaf.sharding, fix, code="mismatch")


def with_shardings(shapes: types.PyTree, shardings: types.PyTree) -> types.PyTree:
    """Return the shapes with shardings attached."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, shardings
    )


def _primes(number: int) -> list[int]:
    """Return the prime factors, smallest first.

    >>> _primes(12)
    [2, 2, 3]
    """
    primes = []
    candidate = 2
    while number > 1:
        while number % candidate == 0:
            primes.append(candidate)
            number //= candidate
        candidate += 1
    return primes
