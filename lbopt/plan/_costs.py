"""Cycles, operations and HBM traffic of a compiled program, with loops multiplied out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lbopt.plan._hlo_program import Array, Executed, HloProgram, Instruction

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
"""Ends of asynchronous operations, which are counted at their start."""
_PARTIAL_READS = {"dynamic-slice", "gather", "slice"}
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")


def estimated_cycles(program: HloProgram) -> int:
    """Return the sum of the compiler's cycle estimates.

    Collectives and some gradients of pooling have no estimate and count as 0.
    """
    runs = (run for run in program.executed if not run.fused)
    return round(sum(run.times * run.instruction.cycles for run in runs))


def hbm_bytes(
    program: HloProgram, counts: Callable[[Instruction], bool] = lambda instruction: True
) -> int:
    """Return the number of bytes that are read from HBM and written to it.

    `cost_analysis()["bytes accessed"]` counts every operand and result, wherever it lies. From v4
    on the compiler prefetches arrays into on-chip memory and keeps results there for the next
    fusion (layouts marked S(1) or S(3)); these are left out. A fusion reads each operand once,
    either the slices that it takes or all of it. An update in place writes only the update. Custom
    calls in these programs join prefetched slices and move nothing. The padding of tiles is not
    counted.

    Args:
      program: The compiled program.
      counts: Function that tells whether to count an instruction; all are counted by default.
    """
    moved = (
        run.times * _moved(program, run)
        for run in program.executed
        if not run.fused and counts(run.instruction)
    )
    return round(sum(moved))


def matrix_flops(program: HloProgram, multiplied: bool = True) -> int:
    """Return the multiplications and additions of all matrix products and convolutions.

    Args:
      program: The compiled program.
      multiplied: Whether to multiply the operations in a loop by its trip count.
    """
    products = (run for run in program.executed if run.instruction.op in ("convolution", "dot"))
    return round(
        sum((run.times if multiplied else 1) * _product_flops(program, run) for run in products)
    )


def _moved(program: HloProgram, run: Executed) -> int:
    """Return the HBM bytes that one execution of an instruction reads and writes."""
    here = program.computations[run.computation]
    instruction = run.instruction
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
    root = next(inner for inner in program.computations[inside].values() if inner.is_root)
    return total + _written(program.computations[inside], root, fusion.arrays)


def _read(program: HloProgram, computation: str, number: int) -> float:
    """Return the bytes that a fusion reads of a parameter: those of slices, or infinity for all."""
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
        elif places == [0] and user.op == "dynamic-update-slice":
            continue  # it reads nothing of the array that it updates
        else:
            return math.inf
    return total


def _written(inside: Mapping[str, Instruction], root: Instruction, results: Sequence[Array]) -> int:
    """Return the bytes that a fusion writes to HBM: its results, or the update of one in place."""
    outputs = [inside[name] for name in root.operands] if root.op == "tuple" else [root]
    if len(outputs) != len(results):  # one instruction with several results
        return sum(result.hbm_bytes for result in results)

    total = 0
    for output, result in zip(outputs, results, strict=True):
        output = _behind_bitcasts(inside, output)
        in_place = (
            output.op == "dynamic-update-slice"
            and _behind_bitcasts(inside, inside[output.operands[0]]).op == "parameter"
        )
        update = inside[output.operands[1]].arrays[0].num_bytes if in_place else result.hbm_bytes
        total += min(result.hbm_bytes, update)
    return total


def _behind_bitcasts(inside: Mapping[str, Instruction], instruction: Instruction) -> Instruction:
    while instruction.op == "bitcast" and instruction.operands[0] in inside:
        instruction = inside[instruction.operands[0]]
    return instruction


def _once_or_twice(array: Array, source: Instruction) -> int:
    """Return the HBM bytes of a slice: it is written, and read if its source is in HBM."""
    from_hbm = any(whole.in_hbm for whole in source.arrays)
    return array.hbm_bytes + (array.num_bytes if from_hbm else 0)


def _hbm(instruction: Instruction) -> int:
    return sum(array.hbm_bytes for array in instruction.arrays)


def _product_flops(program: HloProgram, run: Executed) -> int:
    """Return the multiplications and additions of one matrix product or convolution."""
    here = program.computations[run.computation]
    instruction = run.instruction
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
    """Return the multiplications and additions of one convolution in HLO.

    There are 2 for each pair of an input and a kernel element that meet. Positions in the padding
    and between the elements of a dilated input do not count: the compiler uses them to write the
    gradients of strided convolutions, and even batched matrix products, as convolutions.

    Args:
      left: Dimensions of the input.
      right: Dimensions of the kernel.
      result: Dimensions of the output.
      attributes: Attributes of the instruction, with `window`, `dim_labels` and group counts.
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

    features_in = right[kernel_labels.index("i")]
    features_out = result[out_labels.index("f")]
    groups = re.search(r"batch_group_count=(\d+)", attributes)
    batch = left[in_labels.index("b")] // (int(groups[1]) if groups else 1)
    return 2 * batch * features_in * features_out * pairs


def _window(attributes: str) -> dict[str, list]:
    """Return stride, padding and dilations (of input and kernel) of each spatial dimension."""
    found = _WINDOW.search(attributes)
    fields = dict(text.split("=") for text in found[1].split()) if found else {}
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
    """Return the number of pairs of output and kernel positions that meet an input element.

    Args:
      size: Length of the input along one dimension.
      kernel: Length of the kernel.
      out: Length of the output.
      window: Stride, padding and dilations of the dimension.
    """
    places = (
        np.arange(out)[:, None] * window["stride"]
        + np.arange(kernel) * window["spread"]
        - window["pad"]
    )
    inside = (places >= 0) & (places < (size - 1) * window["holes"] + 1)
    return int(np.sum(inside & (places % window["holes"] == 0)))
