"""What a compiled program costs: cycles, operations, bytes to and from HBM, loops multiplied out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lbopt.plan._program import Array, Executed, HloProgram, Instruction

_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "custom-call",
    "while",
    "call",
    "conditional",
}
_JOINED = {
    "copy-done",
    "slice-done",
    "async-done",
    "all-reduce-done",
    "all-gather-done",
    "collective-permute-done",
}
"""Ends of what began elsewhere, where it is counted."""
_PARTIAL_READS = {"dynamic-slice", "gather", "slice"}
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")


def estimated_cycles(program: HloProgram) -> int:
    """Add up the compiler's cycle estimates; what it gives none for (collectives, some gradients of pools) counts nothing."""
    return sum(run.times * run.instruction.cycles for run in program.executed if not run.fused)


def hbm_bytes(
    program: HloProgram, counts: Callable[[Instruction], bool] = lambda instruction: True
) -> int:
    """Add up what is read from HBM and written to it.

    Args:
      program: which.
      counts: instruction -> whether it is meant; by default all are.

    `cost_analysis()["bytes accessed"]` counts every operand and result wherever it lies. From v4 on the compiler prefetches
    into on-chip memory and keeps values there between two fusions (layouts marked S(1) or S(3)); this leaves those out.
    A fusion reads each operand once: the slices that it takes of it, or the whole. An update in place writes its update.
    Custom calls here join prefetched slices and move nothing. Elements count, not the tiles that pad short rows.
    """
    return sum(
        run.times * _moved(program, run)
        for run in program.executed
        if not run.fused and counts(run.instruction)
    )


def matrix_flops(program: HloProgram, multiplied: bool = True) -> int:
    """Count the operations (multiplications and additions) of matrix products and convolutions, in fusions too.

    Args:
      program: which.
      multiplied: by how often loops run; False for each once.
    """
    products = (run for run in program.executed if run.instruction.op in ("convolution", "dot"))
    return sum((run.times if multiplied else 1) * _product_flops(program, run) for run in products)


def _moved(program: HloProgram, run: Executed) -> int:
    here, instruction = program.computations[run.computation], run.instruction
    op = instruction.op
    if op in _FREE or op in _JOINED:
        return 0
    operands = [here[name] for name in instruction.operands if name in here]
    if op in ("copy-start", "slice-start"):
        written = instruction.arrays[0 if op == "copy-start" else -2]
        in_hbm = any(array.in_hbm for array in operands[0].arrays)
        return written.hbm_bytes + (written.num_bytes if in_hbm else 0)
    if op == "fusion":
        return _moved_by_fusion(program, instruction, operands)
    if op in _PARTIAL_READS:
        return sum(_once_or_twice(array, operands[0]) for array in instruction.arrays)
    if op == "dynamic-update-slice":
        update = operands[1].arrays[0]
        return update.hbm_bytes + (update.num_bytes if instruction.arrays[0].in_hbm else 0)
    return _hbm(instruction) + sum(map(_hbm, operands))


def _moved_by_fusion(
    program: HloProgram, fusion: Instruction, operands: Sequence[Instruction]
) -> int:
    inside = fusion.called["calls"]
    total = 0
    for number, operand in enumerate(operands):
        if any(array.in_hbm for array in operand.arrays):
            total += int(min(_hbm(operand), _read(program, inside, number)))
    root = next(part for part in program.computations[inside].values() if part.is_root)
    return total + _written(program.computations[inside], root, fusion.arrays)


def _read(program: HloProgram, computation: str, number: int) -> float:
    """Return the bytes that a fused computation reads of a parameter if it only takes slices of it; else all there are."""
    return _read_of(program, computation, program.parameters(computation)[number].name)


def _read_of(program: HloProgram, computation: str, name: str) -> float:
    total = 0.0
    for user in program.users(computation).get(name, []):
        places = [place for place, operand in enumerate(user.operands) if operand == name]
        if user.op == "fusion":
            total += sum(_read(program, user.called["calls"], place) for place in places)
        elif user.op == "bitcast" and not user.is_root:
            total += _read_of(program, computation, user.name)
        elif places == [0] and user.op in _PARTIAL_READS:
            total += user.arrays[0].num_bytes
        elif (
            places != [0] or user.op != "dynamic-update-slice"
        ):  # which reads nothing of what it updates
            return math.inf
    return total


def _written(inside: Mapping[str, Instruction], root: Instruction, results: Sequence[Array]) -> int:
    """Return what a fusion writes to HBM: its results, or of a result that is updated in place the update."""
    parts = [inside[name] for name in root.operands] if root.op == "tuple" else [root]
    if len(parts) != len(results):  # one instruction with several results
        return sum(result.hbm_bytes for result in results)
    total = 0
    for part, result in zip(parts, results, strict=True):
        part = _behind_bitcasts(inside, part)
        in_place = (
            part.op == "dynamic-update-slice"
            and _behind_bitcasts(inside, inside[part.operands[0]]).op == "parameter"
        )
        update = inside[part.operands[1]].arrays[0].num_bytes if in_place else result.hbm_bytes
        total += min(result.hbm_bytes, update)
    return total


def _behind_bitcasts(inside: Mapping[str, Instruction], part: Instruction) -> Instruction:
    while part.op == "bitcast" and part.operands[0] in inside:
        part = inside[part.operands[0]]
    return part


def _once_or_twice(array: Array, source: Instruction) -> int:
    """Return the bytes of a slice: written, and read where it comes from HBM."""
    return array.hbm_bytes + (array.num_bytes if any(part.in_hbm for part in source.arrays) else 0)


def _hbm(instruction: Instruction) -> int:
    return sum(array.hbm_bytes for array in instruction.arrays)


def _product_flops(program: HloProgram, run: Executed) -> int:
    here, instruction = program.computations[run.computation], run.instruction
    left, right = (here[name].arrays[0].dims for name in instruction.operands[:2])
    result = instruction.arrays[0].dims
    if instruction.op == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        dims = [int(dim) for dim in filter(None, contracted[1].split(","))] if contracted else []
        return 2 * int(np.prod(result)) * int(np.prod([left[dim] for dim in dims]))
    return convolution_flops(left, right, result, instruction.attributes)


def convolution_flops(
    left: Sequence[int], right: Sequence[int], result: Sequence[int], attributes: str
) -> int:
    """Return multiplications and additions of one convolution in HLO: 2 for every pair of an input and a kernel element.

    Places in the padding and between the elements of a dilated input do not count: with them the compiler writes gradients
    of strided convolutions, and even batched matrix products, as convolutions.

    Args:
      left: dimensions of the input.
      right: of the kernel.
      result: of the output.
      attributes: of the instruction: window, dim_labels, group counts.
    """
    labels = _LABELS.search(attributes)
    assert labels is not None, attributes[:200]
    in_labels, kernel_labels, out_labels = labels.groups()
    window = _window(attributes)
    pairs = 1
    for place in range(sum(label.isdigit() for label in out_labels)):
        sizes = (left[in_labels.index(str(place))], right[kernel_labels.index(str(place))])
        pairs *= _pairs(
            *sizes,
            result[out_labels.index(str(place))],
            {name: value[place] for name, value in window.items()},
        )
    features_in, features_out = right[kernel_labels.index("i")], result[out_labels.index("f")]
    groups = re.search(r"batch_group_count=(\d+)", attributes)
    batch = left[in_labels.index("b")] // (int(groups[1]) if groups else 1)
    return 2 * batch * features_in * features_out * pairs


def _window(attributes: str) -> dict[str, list]:
    """Return stride, padding and dilations of each spatial dimension."""
    found = _WINDOW.search(attributes)
    fields = dict(part.split("=") for part in found[1].split()) if found else {}
    rank = len(fields.get("size", "").split("x")) if fields.get("size") else 0

    def numbers(name: str) -> list[int]:
        return [int(number) for number in fields[name].split("x")] if name in fields else [1] * rank

    pads = (
        [int(pad.split("_")[0]) for pad in fields["pad"].split("x")]
        if "pad" in fields
        else [0] * rank
    )
    return {
        "stride": numbers("stride"),
        "pad": pads,
        "holes": numbers("lhs_dilate"),
        "spread": numbers("rhs_dilate"),
    }


def _pairs(size: int, kernel: int, out: int, window: Mapping[str, int]) -> int:
    """Count the pairs (place of the output, place of the kernel) along one dimension that meet an element of the input."""
    places = (
        np.arange(out)[:, None] * window["stride"]
        + np.arange(kernel) * window["spread"]
        - window["pad"]
    )
    inside = (places >= 0) & (places < (size - 1) * window["holes"] + 1)
    return int(np.sum(inside & (places % window["holes"] == 0)))
