"""One compiled step: what the compiler says of it, and what follows from that."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from lbopt import replicas
from lbopt.errors import UserError
from lbopt.plan import _collectives, _costs, _interconnect
from lbopt.plan._collectives import Collective
from lbopt.plan._program import HloProgram, Instruction
from lbopt.plan._topology import Refusal, Topology

Say = Callable[[str], None]
"""Gets a line before something long begins."""


def silent(line: str) -> None:
    """Say nothing."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """An instruction of a step for which the compiler has an estimate.

    Attributes:
      seconds: by the compiler's cycles, over all its executions.
      op: "fusion", ...
      path: of the module and operation that it is for.
    """

    seconds: float
    op: str
    path: str


@dataclasses.dataclass(frozen=True)
class StepCost:
    """One call of a compiled step on one device.

    Attributes:
      fits: whether the compiler takes it.
      hbm_bytes: that it holds: arguments, results that reuse none of them, temporaries and code; what the compiler says it
        would need, if it does not fit.
      argument_bytes: state and batch.
      temporary_bytes: beside arguments and results.
      flops: by the compiler's count, with the matrix products of loops multiplied out (all else in a loop counts once).
      matrix_flops: of matrix products and convolutions alone.
      hbm_bytes_moved: read from HBM and written to it.
      update_hbm_bytes: of them by the optimizer, exchanges left out.
      seconds: the sum of the compiler's cycle estimates over the clock, loops multiplied out.
      roofline_seconds: what the compiler thinks is the least (`optimal_seconds`); None where it is no positive number, and
        for a program with loops, whose bodies it counts once.
      collectives: what is exchanged.
      collective_seconds: by the model of `lbopt.plan._interconnect`.
      operations: the costliest first.
      compile_seconds: tracing, lowering and compiling.
      unknown_loops: loops that were counted once, since nobody knows how often they run.
    """

    fits: bool
    hbm_bytes: int
    compile_seconds: float
    argument_bytes: int = 0
    temporary_bytes: int = 0
    flops: float = 0.0
    matrix_flops: int = 0
    hbm_bytes_moved: int = 0
    update_hbm_bytes: int = 0
    seconds: float = 0.0
    roofline_seconds: float | None = None
    collectives: tuple[Collective, ...] = ()
    collective_seconds: float = 0.0
    operations: tuple[Operation, ...] = ()
    unknown_loops: int = 0

    @property
    def step_seconds(self) -> float:
        """Computation, then communication: nothing overlaps."""
        return self.seconds + self.collective_seconds

    @property
    def update_seconds(self) -> float:
        """Of the optimizer's part of computation."""
        scopes = {replicas.UPDATE, replicas.PARAMETERS}
        return sum(
            operation.seconds
            for operation in self.operations
            if scopes & set(operation.path.split("/"))
        )


def cost_of(lower: Any, topology: Topology, devices: Sequence[Any]) -> StepCost:
    """Lower, compile and read a step.

    Args:
      lower: () -> what JAX lowered.
      topology: that it is for.
      devices: of its mesh, in order.

    Raises:
      UserError: if the compiler refuses it for another reason than memory.
    """
    begin = time.perf_counter()
    try:
        compiled = lower().compile()
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        seconds = time.perf_counter() - begin
        refused = Refusal.read(str(error))
        if refused is not None:
            return StepCost(False, refused.needed_bytes, seconds)
        said = " ".join(str(error).split())[:240]
        raise UserError(f"--config: the TPU compiler takes no such step: {said}") from error
    return read_cost(compiled, topology, devices, time.perf_counter() - begin)


def read_cost(
    compiled: Any, topology: Topology, devices: Sequence[Any], compile_seconds: float
) -> StepCost:
    """Read what the compiler says of a compiled step."""
    program = HloProgram(compiled.as_text())
    memory, said = compiled.memory_analysis(), compiled.cost_analysis()
    found = _collectives.collectives(program, len(devices))
    matrix = _costs.matrix_flops(program)
    least = said.get("optimal_seconds", 0.0)
    hertz = topology.chip.hertz
    looped = any(run.times > 1 for run in program.executed) or bool(program.unknown_loops)
    return StepCost(
        fits=True,
        hbm_bytes=memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes,
        compile_seconds=compile_seconds,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        flops=said.get("flops", 0.0) + matrix - _costs.matrix_flops(program, multiplied=False),
        matrix_flops=matrix,
        hbm_bytes_moved=_costs.hbm_bytes(program),
        update_hbm_bytes=_costs.hbm_bytes(program, functools.partial(_updates, program)),
        seconds=_costs.estimated_cycles(program) / hertz,
        roofline_seconds=least if least > 0 and not looped else None,
        collectives=tuple(found),
        collective_seconds=_interconnect.seconds(topology, devices, found),
        operations=_operations(program, hertz),
        unknown_loops=len(program.unknown_loops),
    )


def _updates(program: HloProgram, instruction: Instruction) -> bool:
    """Say whether it is the optimizer's. A fusion that also puts the new part in its place is named for the place."""
    scopes = instruction.path.split("/")
    if replicas.PARAMETERS not in scopes:
        return replicas.UPDATE in scopes
    fused = program.computations.get(instruction.called.get("calls", ""), {})
    return any(replicas.UPDATE in part.path.split("/") for part in fused.values())


def _operations(program: HloProgram, hertz: float) -> tuple[Operation, ...]:
    found = [
        Operation(
            run.times * run.instruction.cycles / hertz, run.instruction.op, run.instruction.path
        )
        for run in program.executed
        if not run.fused and run.instruction.cycles
    ]
    return tuple(sorted(found, key=lambda operation: -operation.seconds))
