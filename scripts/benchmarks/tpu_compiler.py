"""Compile a function for one TPU core that is not here, and read what the compiler says of it.

Needs libtpu (the extra `plan`) and, in the environment before jax is imported, the variables that `run.py` sets.
"""

import collections
import dataclasses
import re
import time

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

TOPOLOGIES = {"v3": "v3:2x2", "v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
_CYCLES = re.compile(r'estimated_cycles":"(\d+)"')


@dataclasses.dataclass
class Cost:
    """What the compiler says.

    Attributes:
      hbm_bytes: read and written by one call, see `count_hbm_bytes`.
      accessed_bytes: the compiler's own count, which from v4 on includes on-chip memory.
      temporary_bytes: beside arguments and results.
      cycles: the sum of its estimates.
      compile_seconds: tracing, lowering and compiling.
    """

    hbm_bytes: int
    accessed_bytes: float
    temporary_bytes: int
    cycles: int
    compile_seconds: float


def compile_for(generation: str, fn, arguments, donate: tuple[int, ...]) -> Cost:
    """Compile `fn` for the first core of a topology of this generation ("v3", "v4", "v5e", "v5p", "v6e")."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation]).devices[0]
    everywhere = NamedSharding(Mesh(np.array([device]), ("one",)), PartitionSpec())
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), arguments)
    begin = time.perf_counter()
    compiled = jax.jit(fn, donate_argnums=donate).lower(*shapes).compile()
    seconds = time.perf_counter() - begin
    return Cost(
        count_hbm_bytes(compiled.as_text()),
        compiled.cost_analysis()["bytes accessed"],
        compiled.memory_analysis().temp_size_in_bytes,
        sum(map(int, _CYCLES.findall(compiled.as_text()))),
        seconds,
    )


V3_PEAK_FLOPS, V3_HZ = 61.5e12, 940e6
"""Of one TPU v3 core: bf16 FLOP/s of its two matrix units, and the clock that estimated cycles count."""


@dataclasses.dataclass
class StepCost:
    """What the compiler says of a training step on one core of a pod.

    Attributes:
      seconds: the sum of its cycle estimates over the clock.
      argument_bytes: state and batch.
      temporary_bytes: beside them.
      flops: by its own count, matrix products and the rest.
      all_reduces: how many there are.
      all_reduce_bytes: their results.
      seconds_by_part: (forward or backward, part of the model and operation) -> seconds.
      compile_seconds: tracing, lowering and compiling.
    """

    seconds: float
    argument_bytes: int
    temporary_bytes: int
    flops: float
    all_reduces: int
    all_reduce_bytes: int
    seconds_by_part: dict[tuple[str, str], float]
    compile_seconds: float


def pod(topology: str) -> Mesh:
    """Return the mesh of a TPU pod that is not here, for instance "v3:16x32"."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))


def cost_of_step(step, state, batch) -> StepCost:
    """Compile `step` (from `lbopt.make_train_step`) for these shapes. A loop's body is counted once."""
    begin = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    seconds = time.perf_counter() - begin
    text, memory = compiled.as_text(), compiled.memory_analysis()
    parts = _seconds_by_part(text)
    reduces = re.findall(r"= (.+?) all-reduce(?:-start)?\(", text)
    return StepCost(
        sum(parts.values()),
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        compiled.cost_analysis()["flops"],
        len(reduces),
        sum(_hbm_size(*shape)[1] for result in reduces for shape in _SHAPE.findall(result)),
        parts,
        seconds,
    )


def _seconds_by_part(hlo: str) -> dict[tuple[str, str], float]:
    parts: dict[tuple[str, str], float] = collections.defaultdict(float)
    for line in hlo.splitlines():
        cycles = _CYCLES.search(line)
        if cycles:
            name = re.search(r'op_name="([^"]*)"', line)
            parts[_part(name[1] if name else "")] += int(cycles[1]) / V3_HZ
    return parts


def _part(name: str) -> tuple[str, str]:
    """Turn an operation's path into (forward, backward or other; module with numbers left out, operation)."""
    inside = re.search(r"(transpose\()?jvp\((\w*)\)+/(.*)", name)
    if not inside:
        return "other", "copy of the input" if name.startswith("arguments") else "optimizer"
    path = re.sub(r"jit\(\w+\)/|\w+\._\w+/", "", inside[3])
    path = re.sub(r"(block|layer|_Layer_|Conv_|BatchNorm_|Dense_|LayerNorm_)\d+", r"\1", path)
    return "backward" if inside[1] else "forward", path.replace("conv_general_dilated", "convolution")


_SHAPE = re.compile(r"([a-z]+\d+|pred)\[([\d,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\((.*)$")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "custom-call", "copy-done", "slice-done"}


def count_hbm_bytes(hlo: str) -> int:
    """Add up what the entry computation of a compiled program reads from HBM and writes to it.

    `cost_analysis()["bytes accessed"]` counts every operand and result wherever it lies. From v4 on the compiler prefetches
    into on-chip memory and keeps values there between two fusions (layouts marked S(1) or S(3)); this leaves those out.
    Each fusion reads its operands whole, once. Custom calls here join prefetched slices and move nothing.
    """
    sizes: dict[str, list[int]] = {}
    total = 0
    for line in hlo[hlo.index("\nENTRY ") :].splitlines()[1:]:
        found = _INSTRUCTION.match(line)
        if not found:
            continue
        name, results, op, rest = found.groups()
        shapes = [_hbm_size(*shape) for shape in _SHAPE.findall(results)]
        sizes[name] = [on_hbm for on_hbm, _ in shapes]
        if op in _FREE:
            continue
        operands = [operand for operand in re.findall(r"%([\w.\-]+)", rest.split("), ")[0]) if operand in sizes]
        if op in ("copy-start", "slice-start"):
            written, source = (
                (shapes[0], sizes[operands[0]]) if op == "copy-start" else (shapes[-2], sizes[operands[0]])
            )
            total += written[0] + (written[1] if any(source) else 0)
            continue
        total += sum(sizes[name]) + sum(sum(sizes[operand]) for operand in operands)
    return total


def _hbm_size(dtype: str, dims: str, layout: str) -> tuple[int, int]:
    """Return (bytes on HBM, bytes) of one array."""
    count = 1
    for dim in filter(None, dims.split(",")):
        count *= int(dim)
    size = count * _BYTES[dtype]
    return (0 if re.search(r"S\([1-9]\)", layout) else size), size
