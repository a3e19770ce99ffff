"""The device mesh, and the placement of batches and replicated arrays on it."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lbopt import _scalars, tree, types
from lbopt.errors import EnvironmentProblem, UserError, require, require_choice

DATA_AXIS = "data"
ORDERS = ("given", "torus")
_SMALL_BATCH_BYTES = 256 * 1024
"""Size up to which one CPU takes a batch through a program."""


def make_mesh(
    num_devices: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    order: str = "given",
) -> Mesh:
    """Build a one-axis mesh named `data` over the devices.

    With several slices (TPUs whose interconnect ends at the slice; the data centre's network
    connects slices) the devices are ordered slice by slice. The compiler then sums gradients inside
    each slice, exchanges each device's shard between slices, and gathers inside; groups of batch
    norm and shards of a sharded update stay inside a slice too.

    Args:
      num_devices: Number of devices to use, from the first; None for all.
      devices: Devices to choose from; None for `jax.devices()`.
      order: "given" (on TPU host by host, so that neighbours in the mesh are neighbours on the
        torus: on v2 and v3 contiguous groups of 8 are the 2 x 2 chips of a host) or "torus": row by
        row, which batch norm over "tiles:RxC" needs.

    Raises:
      UserError: If there are fewer than `num_devices` devices, if "torus" is asked for and the
        devices have no coordinates, or if the slices have unequal numbers of devices.

    >>> dict(make_mesh(1).shape)
    {'data': 1}
    """
    available = list(available_devices() if devices is None else devices)
    wanted = len(available) if num_devices is None else _scalars.known(num_devices)
    check_mesh_request(wanted, order, len(available))
    if order == "torus":
        if not all(map(is_on_torus, available)):
            fix = "these devices have no coordinates; use order='given'"
            raise UserError("order", order, fix, code="conflict")
        available = sorted(available, key=_position)
    available = sorted(available, key=slice_of)  # stable: within a slice the order stays

    chosen = available[:wanted]
    counts = collections.Counter(map(slice_of, chosen))
    if len(set(counts.values())) > 1:
        each = len(available) // len(set(map(slice_of, available)))
        fix = f"slices of {each} devices share the batch; give a multiple of {each}"
        raise UserError("num_devices", wanted, fix, code="mismatch")

    # Auto: shardings are propagated by the compiler; jax.make_mesh would default to explicit axes.
    return Mesh(np.asarray(chosen), (DATA_AXIS,), axis_types=(AxisType.Auto,))


def check_mesh_request(num_devices: int | None, order: str, available: int | None = None) -> None:
    """Raise `UserError` unless `make_mesh` takes these arguments.

    Args:
      num_devices: Argument of `make_mesh`.
      order: Argument of `make_mesh`.
      available: Number of devices to choose from; None if it is not known yet.
    """
    fix = "give a whole number >= 1, or None for all devices"
    if available is not None:
        fix = f"give a whole number from 1 to {available}, there are {available} devices here"
    fits = num_devices is None or (
        isinstance(num_devices, int)
        and num_devices >= 1
        and (available is None or num_devices <= available)
    )
    require(fits, "num_devices", num_devices, fix)
    require_choice("order", order, ORDERS)


def slice_of(device: jax.Device) -> int:
    """Return the number of the slice that a device is in; 0 where there are no slices."""
    return getattr(device, "slice_index", None) or 0


def num_slices(mesh: Mesh) -> int:
    """Return the number of slices in a mesh from `make_mesh`."""
    return len({slice_of(device) for device in mesh.devices.flat})


def is_on_torus(device: jax.Device) -> bool:
    """Return whether a device has a place in the torus of a TPU's chips.

    JAX gives `coords` to GPUs too, from 0.11 on, but no `core_on_chip`.
    """
    return hasattr(device, "coords") and hasattr(device, "core_on_chip")


def _position(device: jax.Device) -> tuple[int, int, int, int]:
    x, y, z = device.coords
    return z, y, x, device.core_on_chip


def torus_grid(mesh: Mesh) -> tuple[int, int] | None:
    """Return (rows, columns) of a mesh in torus order; a row is a line of chips along x."""
    devices = list(mesh.devices.flat)
    if not all(map(is_on_torus, devices)):
        return None
    positions = [_position(device) for device in devices]
    rows = len({position[:2] for position in positions})
    if positions != sorted(positions) or len(positions) % rows:
        return None
    return rows, len(positions) // rows


def available_devices() -> list[jax.Device]:
    """Return `jax.devices()`; raise `EnvironmentProblem` if the requested platform is missing."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        wanted = os.environ.get("JAX_PLATFORMS")
        cause = f" ({error})" if str(error) else ""
        fix = f"no devices{cause}; install the platform's extra, or unset the variable"
        raise EnvironmentProblem("JAX_PLATFORMS", wanted, fix, code="installation") from error


def check_mesh(mesh: Mesh, mapped: bool, by_compiler: bool = True) -> None:
    """Raise `UserError` unless a mesh goes with a step.

    Args:
      mesh: Mesh with an axis `data`.
      mapped: Whether the step maps replicas or shards its update, so that every device is a
        replica.
      by_compiler: Whether the backend is "jit", whose mapped functions need Auto axes.
    """
    require(isinstance(mesh, Mesh), "mesh", mesh, "use lbopt.make_mesh()")
    names = mesh.axis_names
    types_of_axes = mesh.axis_types
    fix = f"use lbopt.make_mesh(), or Mesh(mesh.devices.ravel(), ({DATA_AXIS!r},))"
    require(
        DATA_AXIS in names,
        "mesh.axis_names",
        names,
        f"the batch is split along an axis {DATA_AXIS!r}; {fix}",
    )

    # The compiler can also split the model, along further axes. A mapped replica is one device.
    alone = mesh.shape[DATA_AXIS] == mesh.size
    require(alone or not mapped, "mesh.axis_names", names, f"here each device is a replica; {fix}")

    refused = {AxisType.Manual} | ({AxisType.Explicit} if mapped and by_compiler else set())
    require(
        not refused & set(types_of_axes),
        "mesh.axis_types",
        types_of_axes,
        f"the step needs Auto axes; {fix}",
    )


def replicated_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays that every device holds whole.

    Args:
      mesh: Any mesh.

    >>> tuple(replicated_sharding(make_mesh(1)).spec)
    ()
    """
    return NamedSharding(mesh, PartitionSpec())


@functools.lru_cache(maxsize=16)
def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a global batch: leading axis over `data`.

    Args:
      mesh: A mesh with an axis `data`.

    >>> tuple(batch_sharding(make_mesh(1)).spec)
    ('data',)
    """
    return NamedSharding(mesh, PartitionSpec(DATA_AXIS))


def put_replicated(mesh: Mesh, tree: types.PyTree) -> types.PyTree:
    """Copy a tree whole to every device.

    Args:
      mesh: A mesh from `make_mesh`.
      tree: Any pytree of arrays.

    >>> import numpy as np
    >>> put_replicated(make_mesh(1), {"w": np.zeros(3)})["w"].is_fully_replicated
    True
    """
    return jax.device_put(tree, replicated_sharding(mesh))


def local_parts(mesh: Mesh) -> list[int]:
    """Return the mesh positions of this process's devices.

    They are the indices of the process's shards among the `mesh.size` equal shards of a global
    batch. On a pod they need not be contiguous: the order of a torus passes through many hosts.
    """
    me = jax.process_index()
    return [place for place, device in enumerate(mesh.devices.flat) if device.process_index == me]


def put_batch(mesh: Mesh, batch: types.Batch) -> types.Batch:
    """Place a host batch on the mesh without waiting for the transfer.

    Args:
      mesh: A mesh from `make_mesh`.
      batch: This process's `local_parts` of the global batch, concatenated (the whole batch if
        there is one process).

    Returns:
      Global arrays, leading axis over `data`.

    >>> import numpy as np
    >>> batch = put_batch(make_mesh(1), {"x": np.zeros((8, 3), np.float32)})
    >>> batch["x"].shape, tuple(batch["x"].sharding.spec)
    ((8, 3), ('data',))
    """
    check_batch(batch)
    if jax.process_count() == 1:
        return place_batch(mesh, batch)
    layout = batch_sharding(mesh)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(layout, x), batch)


def place_batch(mesh: Mesh, batch: types.Batch) -> types.Batch:
    """Lay a global batch of this process out over the mesh; arrays that lie there stay.

    Most of `jax.device_put` of small arrays is Python, which takes a visible part of the step of a
    small network on one CPU; a program that copies them takes less (see `scripts/bench step`).
    """
    arrays = jax.tree.leaves(batch)
    layout = batch_sharding(mesh)
    on_host = all(isinstance(x, np.ndarray) for x in arrays)
    small = on_host and sum(x.nbytes for x in arrays) <= _SMALL_BATCH_BYTES
    if small and mesh.size == 1 and mesh.devices.flat[0].platform == "cpu":
        return _copying_program(layout)(batch)
    return jax.device_put(batch, layout)


@functools.cache
def _copying_program(layout: NamedSharding) -> Any:
    def copy_batch(batch: types.Batch) -> types.Batch:
        return batch

    return jax.jit(copy_batch, out_shardings=layout)


def check_batch(batch: types.Batch) -> int:
    """Return a batch's size; raise `UserError` unless its leaves are arrays of one length."""
    first: str | None = None
    size = 0
    for name, leaf in zip(tree.leaf_names(batch), jax.tree.leaves(batch), strict=True):
        _check_leaf(f"batch/{name}", leaf)
        if first is None:
            first = name
            size = leaf.shape[0]
        number = leaf.shape[0]
        fix = (
            f"it has {number} examples, batch/{first} has {size}; give every array the same "
            "leading axis"
        )
        require(number == size, f"batch/{name}", leaf, fix, code="mismatch")
    require(first is not None, "batch", batch, "it has no arrays; give {name: array [batch, ...]}")
    return size


def _check_leaf(field: str, leaf: Any) -> None:
    """Raise `UserError` unless a leaf of a batch is an array of examples that JAX takes."""
    shape = getattr(leaf, "shape", None)
    dtype = getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        fix = "not an array; give np.asarray of one value per example"
        raise UserError(field, leaf, fix, code="type")
    if isinstance(dtype, np.dtype) and dtype.kind in "OSUMm":
        fix = f"dtype {dtype}; encode it as numbers of one shape, or leave it out of the batch"
        raise UserError(field, leaf, fix, code="type")

    if not isinstance(leaf, jax.ShapeDtypeStruct):
        try:
            jax.typeof(leaf)
        except (TypeError, ValueError) as error:
            fix = f"{type(leaf).__name__} of dtype {dtype}, which JAX does not take; give a plain "
            fix += "np.asarray of a native dtype of at most 64 bits"
            raise UserError(field, leaf, fix, code="type") from error
    if not shape:
        fix = "a scalar; give one value per example, np.full(batch_size, value)"
        raise UserError(field, leaf, fix, code="type")


def splits_evenly(batch_size: int, num_replicas: int, num_microsteps: int) -> bool:
    """Return whether every microstep of every replica has equally many examples of a batch."""
    return batch_size >= 1 and batch_size % (num_replicas * num_microsteps) == 0


def check_divisible(batch_size: int, num_replicas: int, num_microsteps: int = 1) -> None:
    """Raise `UserError` unless a batch splits evenly over replicas and their microsteps.

    Args:
      batch_size: Number of examples in the global batch.
      num_replicas: Number of replicas: the devices, times the replicas that each runs sequentially.
      num_microsteps: Number of microsteps of each replica.
    """
    if not splits_evenly(batch_size, num_replicas, num_microsteps):
        microbatches = num_replicas * num_microsteps
        fix = (
            f"it is split into {num_replicas} x {num_microsteps} slices (replicas x microsteps); "
            f"give a multiple of {microbatches}, the nearest is "
            f"{max(microbatches, round(batch_size / microbatches) * microbatches)}"
        )
        raise UserError("global_batch_size", batch_size, fix)
