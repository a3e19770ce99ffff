"""Compile a function for one TPU core without a TPU, and read the compiler's estimates.

This needs libtpu (the extra `plan`) and the environment variables that `run.py` sets before it
imports jax.
"""

import dataclasses
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lbopt.plan import estimated_cycles, hbm_bytes, open_topology, read_program

TOPOLOGIES = {
    "v3": "v3:2x2",
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}


@dataclasses.dataclass
class Cost:
    """The compiler's estimates for one call of a function.

    Attributes:
      hbm_bytes: Bytes read from and written to HBM; see `lbopt.plan.hbm_bytes`.
      accessed_bytes: The compiler's count of bytes, which from v4 on includes on-chip memory.
      temporary_bytes: Bytes of memory beside arguments and results.
      cycles: Sum of the estimated cycles of all operations.
      compile_seconds: Seconds of tracing, lowering and compiling.
    """

    hbm_bytes: int
    accessed_bytes: float
    temporary_bytes: int
    cycles: int
    compile_seconds: float


def compile_for(generation: str, fn, arguments, donate: tuple[int, ...]) -> Cost:
    """Compile a function for one device.

    Args:
      generation: "v3", "v4", "v5e", "v5p", "v6e" or "tpu7x".
      fn: The function.
      arguments: Shapes of its arguments, as trees of `jax.ShapeDtypeStruct`.
      donate: Indices of the arguments whose memory the results may take.
    """
    device = open_topology(TOPOLOGIES[generation]).devices[0]
    everywhere = NamedSharding(Mesh(np.array([device]), ("one",)), PartitionSpec())
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), arguments
    )

    begin = time.perf_counter()
    lowered = jax.jit(fn, donate_argnums=donate).lower(*shapes)
    compiled = lowered.compile()
    seconds = time.perf_counter() - begin
    program = read_program(lowered, compiled)
    return Cost(
        hbm_bytes(program),
        compiled.cost_analysis()["bytes accessed"],
        compiled.memory_analysis().temp_size_in_bytes,
        estimated_cycles(program),
        seconds,
    )
