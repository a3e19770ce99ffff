"""Compile a function for one TPU core that is not here, and read what the compiler says of it.

Needs libtpu (the extra `plan`) and, in the environment before jax is imported, the variables that `run.py` sets.
"""

import dataclasses
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lbopt.plan import HloProgram, estimated_cycles, hbm_bytes, open_topology

TOPOLOGIES = {
    "v3": "v3:2x2",
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
}


@dataclasses.dataclass
class Cost:
    """What the compiler says.

    Attributes:
      hbm_bytes: read and written by one call, see `lbopt.plan.hbm_bytes`.
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
    """Compile `fn` for the first device of a topology of this generation ("v3", "v4", "v5e", "v5p", "v6e")."""
    device = open_topology(TOPOLOGIES[generation]).devices[0]
    everywhere = NamedSharding(Mesh(np.array([device]), ("one",)), PartitionSpec())
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), arguments
    )
    begin = time.perf_counter()
    compiled = jax.jit(fn, donate_argnums=donate).lower(*shapes).compile()
    seconds = time.perf_counter() - begin
    program = HloProgram(compiled.as_text())
    return Cost(
        hbm_bytes(program),
        compiled.cost_analysis()["bytes accessed"],
        compiled.memory_analysis().temp_size_in_bytes,
        estimated_cycles(program),
        seconds,
    )
