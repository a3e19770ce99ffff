"""Compile a function for one TPU core that is not here, and read what the compiler says of it.

Needs libtpu (the extra `plan`) and, in the environment before jax is imported, the variables that `run.py` sets.
"""

import dataclasses
import re
import time

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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
