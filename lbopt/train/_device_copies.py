"""Copies of a state on its devices, so that training continues while the copy is saved."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import Any

import jax

from lbopt.job import Job
from lbopt.parallel import TrainState
from lbopt.train._checksums import copies_of, sum_of, sums_of


class DeviceCopies:
    """Copies arrays and adds up their checksums, by programs that are compiled beforehand.

    Args:
      worker: Thread that compiles.
      job: The job that this process belongs to.
    """

    def __init__(self, worker: concurrent.futures.Executor, job: Job):
        self._worker = worker
        self._job = job
        self._compiled: concurrent.futures.Future[Any] | None = None
        self._shapes: list[jax.ShapeDtypeStruct] = []
        self._fit: bool | None = None  # unknown until a step has shown its memory use

    def prepare(self, state: TrainState) -> None:
        """Start to compile for a state of this shape, and forget whether copies fit."""
        self._fit = None
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for x in jax.tree.leaves(state)
        ]
        if shapes != self._shapes:
            self._shapes = shapes
            self._compiled = self._worker.submit(_compile, shapes)

    def fit(self, leaves: Sequence[jax.Array]) -> bool:
        """Return whether copies fit on the devices of every process.

        The first call after `prepare` decides: the peak of memory includes a copy from then on.
        """
        if self._fit is None:
            ours = has_room(leaves)
            self._fit = all(self._job.together("room for a copy of the state", ours))
        return self._fit

    def copy(self, leaves: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return copies of arrays and their checksums, without waiting for them."""
        if self._compiled is None:
            copies = copies_of(leaves)
            return copies, sums_of(copies)
        copy, sum_by_shape = self._compiled.result()
        copies = copy(leaves)
        sums = [sum_by_shape[shape](x) for shape, x in zip(self._shapes, copies, strict=True)]
        return copies, sums


def _compile(shapes: Sequence[jax.ShapeDtypeStruct]) -> tuple[Any, dict[Any, Any]]:
    """Return the compiled programs that copy a state, and that add up an array of each shape."""
    copy = copies_of.lower(shapes).compile()
    return copy, {shape: sum_of.lower(shape).compile() for shape in dict.fromkeys(shapes)}


def has_room(leaves: Sequence[jax.Array]) -> bool:
    """Return whether this process's devices can hold copies beside the most they have used.

    Devices that do not report their memory, as those of a CPU, have room.
    """
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            continue
        used = max(stats.get("peak_bytes_in_use", 0), stats.get("bytes_in_use", 0))
        needed = sum(
            shard.data.nbytes
            for leaf in leaves
            for shard in leaf.addressable_shards
            if shard.device == device
        )
        if used + needed > stats["bytes_limit"]:
            return False
    return True
