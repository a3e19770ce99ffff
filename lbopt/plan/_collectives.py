"""The collectives of a compiled program: devices, bytes and purpose of each exchange."""

from __future__ import annotations

import collections
import dataclasses
import re

import numpy as np

from lbopt import replicas
from lbopt.plan._hlo_program import Array, Executed, HloProgram

OPS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED_GROUPS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind in one call of a program.

    Attributes:
      op: The operation, one of `OPS`.
      dtype: The dtype as HLO spells it.
      num_bytes: Total bytes on one device: the reduced arrays, the gathered results, or the
        exchanged arrays.
      count: Number of executed instructions; one may carry several arrays. A fraction of what only
        some steps execute.
      group_size: Number of devices in a group.
      source: The purpose: gradients, batch norm, update, parameters (gathered after the update),
        metrics or other.
      group: The devices of the first group by their numbers in the mesh; for a permutation, its
        first pair.
    """

    op: str
    dtype: str
    num_bytes: int
    count: float
    group_size: int
    source: str
    group: tuple[int, ...]


def collectives(program: HloProgram, num_devices: int) -> list[Collective]:
    """Return the collectives of one call of a program, those with the most bytes first."""
    sums: dict[tuple, list[float]] = collections.defaultdict(lambda: [0, 0])
    for run in program.executed:
        op = run.instruction.op.removesuffix("-start")
        if op not in OPS:
            continue
        group = first_group(run.instruction.attributes, num_devices)
        seen = set()
        for array, path in _parts(program, run, op, num_devices):
            source = source_of(path)
            # Each device updates a shard, and then gathers the whole parameters.
            if source == "update" and op == "all-gather":
                source = "parameters"
            key = (op, array.dtype, len(group), source, group)
            sums[key][0] += run.times * array.num_bytes
            sums[key][1] += 0 if key in seen else run.times
            seen.add(key)

    found = [
        Collective(op, dtype, round(num_bytes), times, size, source, group)
        for (op, dtype, size, source, group), (num_bytes, times) in sums.items()
    ]
    return sorted(found, key=lambda one: -one.num_bytes)


def bytes_between_slices(program: HloProgram, num_slices: int) -> float:
    """Return the bytes that a device sends to other slices in one call of a program.

    The TPU compiler makes an exchange over slices of sends through the hosts, which name its kind
    and carry a whole array. What of that array goes to other slices is that of ring algorithms.

    Args:
      program: A program for several slices of TPUs.
      num_slices: Number of slices.
    """
    others = num_slices - 1
    shares = {
        "ALL_REDUCE": 2 * others / num_slices,
        "ALL_TO_ALL": others / num_slices,
        "REDUCE_SCATTER": others / num_slices,
        "ALL_GATHER": others,
    }
    total = 0.0
    for run in program.executed:
        kind = re.search(r'megascale_transfer_type="(\w+)"', run.instruction.rest)
        if run.instruction.op == "send" and kind is not None:
            total += run.times * shares[kind[1]] * run.instruction.arrays[0].num_bytes
    return total


def source_of(path: str) -> str:
    """Return the purpose of a collective, by the path of the operation that it came from.

    >>> source_of("jit(traced)/transpose(jvp(ResNet))/stem/conv_general_dilated")
    'gradients'
    >>> source_of("jit(traced)/jvp(ResNet)/stem/norm/batch_statistics/reduce_sum")
    'batch norm'
    """
    parts = path.split("/")
    backward = "transpose(" in path
    if replicas.STATISTICS in parts:
        # A product in the backward pass of the statistics is the gradient of a kernel.
        of_kernel = backward and parts[-1] in ("dot_general", "conv_general_dilated")
        return "gradients" if of_kernel else "batch norm"
    for mark, source in _MARKS.items():
        if mark in parts:
            return source
    if backward:
        return "gradients"
    return "metrics" if "jvp(" in path else "other"


_MARKS = {
    replicas.GRADIENTS: "gradients",
    replicas.STATE: "batch norm",
    replicas.METRICS: "metrics",
    replicas.UPDATE: "update",
    replicas.PARAMETERS: "parameters",
}


def _parts(
    program: HloProgram, run: Executed, op: str, num_devices: int
) -> list[tuple[Array, str]]:
    """Return each array of a collective with the path of the operation that it serves.

    An instruction may carry several arrays; the path of each is that of the instruction that uses
    it.
    """
    instruction = run.instruction
    arrays = instruction.arrays
    if instruction.op.endswith("-start") and op != "all-reduce":
        # A start yields its operands, then its results, then scalars for synchronization.
        arrays = [array for array in arrays if array.dims or array.dtype != "u32"]
        arrays = arrays[len(arrays) // 2 :]

    here = program.computations[run.computation]
    taken = [here[name].path if name in here else "" for name in instruction.operands]
    paths = {
        number: instruction.path or "".join(taken[number : number + 1])
        for number in range(len(arrays))
    }
    for user in program.users(run.computation).get(instruction.name, []):
        index = (
            re.search(r"index=(\d+)", user.attributes) if user.op == "get-tuple-element" else None
        )
        if index is not None and user.path:
            paths[int(index[1])] = user.path
    # A reduce-scatter reduces the whole array, of which each device of the group keeps one shard.
    grown = len(first_group(instruction.attributes, num_devices)) if op == "reduce-scatter" else 1
    return [
        (dataclasses.replace(array, dims=(*array.dims, grown)), paths.get(number, ""))
        for number, array in enumerate(arrays)
    ]


def first_group(attributes: str, num_devices: int) -> tuple[int, ...]:
    """Return the devices of a collective's first group; all devices if it names no groups."""
    groups = replica_groups(attributes)
    return tuple(groups[0]) if groups else tuple(range(num_devices))


def replica_groups(attributes: str) -> list[list[int]]:
    """Return the groups of a collective as lists of devices; [] for one group of all devices.

    >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0), use_global_device_ids=true")
    [[0, 2], [1, 3]]
    >>> replica_groups("replica_groups=mesh['a'=2,'b'=2] {'b'}")
    [[0, 1], [2, 3]]
    >>> replica_groups("replica_groups={{0,1},{2,3}}")
    [[0, 1], [2, 3]]
    """
    if found := _MESH_GROUPS.search(attributes):
        axes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return _over_axes(
            list(axes), [int(size) for size in axes.values()], re.findall(r"'(\w+)'", found[2])
        )
    if found := _IOTA_GROUPS.search(attributes):
        shape, dims = ([int(size) for size in text.split(",")] for text in found.group(1, 2))
        numbers = np.arange(np.prod(dims)).reshape(dims)
        if found[3]:
            numbers = numbers.transpose([int(axis) for axis in found[3].split(",")])
        return numbers.reshape(shape[0], -1).tolist()
    found = _LISTED_GROUPS.search(attributes) or _PAIRS.search(attributes)
    lists = re.findall(r"\{([\d,]+)\}", found[1]) if found else []
    return [[int(number) for number in numbers.split(",")] for numbers in lists]


def _over_axes(names: list[str], sizes: list[int], over: list[str]) -> list[list[int]]:
    numbers = np.arange(np.prod(sizes)).reshape(sizes)
    last = [names.index(name) for name in over]
    first = [axis for axis in range(len(names)) if axis not in last]
    width = int(np.prod([sizes[axis] for axis in last]))
    return numbers.transpose([*first, *last]).reshape(-1, width).tolist()
