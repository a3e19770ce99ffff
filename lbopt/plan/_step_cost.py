"""The cost of one compiled step: the compiler's figures, and times derived from them."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from lbopt import replicas
from lbopt.errors import NO_VALUE, EnvironmentProblem, UserError
from lbopt.plan import _collectives, _costs, _interconnect
from lbopt.plan._collectives import Collective
from lbopt.plan._hlo_program import HloProgram, Instruction
from lbopt.plan._topology import Refusal, Topology

Say = Callable[[str], None]
"""Function that gets a line before something long begins."""


def silent(line: str) -> None:
    """Ignore a line."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """An instruction of a step that has a cycle estimate.

    Attributes:
      seconds: Seconds by the compiler's cycles, summed over all its executions.
      op: Name of the HLO operation, "fusion" for instance.
      path: Path of the module and operation that it belongs to.
    """

    seconds: float
    op: str
    path: str


@dataclasses.dataclass(frozen=True)
class StepCost:
    """The cost of one call of a compiled step on one device.

    Attributes:
      fits: Whether the step fits into HBM.
      hbm_bytes: HBM that the step needs: arguments, results that do not reuse an argument's memory,
        temporaries and code. If it does not fit, the compiler's figure.
      compile_seconds: Seconds of tracing, lowering and compiling.
      argument_bytes: Bytes of the state and the batch.
      temporary_bytes: Bytes of temporaries.
      flops: Operations by the compiler's count, with the matrix products in loops multiplied out;
        everything else in a loop counts once.
      matrix_flops: Operations of matrix products and convolutions.
      hbm_bytes_moved: Bytes that are read from HBM or written to it.
      update_hbm_bytes: The optimizer's share of these bytes, without collectives.
      seconds: Sum of the compiler's cycle estimates over the clock, with loops multiplied out.
      roofline_seconds: The compiler's lower bound (`optimal_seconds`). None if it is not positive,
        or if the program has loops, whose bodies it counts once.
      collectives: The collectives of the step.
      collective_seconds: Seconds of the collectives by the model of `lbopt.plan._interconnect`.
      operations: The operations that have an estimate, the most expensive first.
      unknown_loops: Number of loops with an unknown trip count; they are counted once.
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
        """Seconds of computation and communication, which do not overlap."""
        return self.seconds + self.collective_seconds

    @property
    def update_seconds(self) -> float:
        """Seconds of the optimizer's computation."""
        scopes = {replicas.UPDATE, replicas.PARAMETERS}
        return sum(
            operation.seconds
            for operation in self.operations
            if scopes & set(operation.path.split("/"))
        )


def cost_of(
    lower: Any, topology: Topology, devices: Sequence[Any], exchanges: tuple[int, int] = (0, 1)
) -> StepCost:
    """Lower and compile a step, and return its cost.

    Args:
      lower: Function that returns the step as JAX lowers it.
      topology: The topology to compile for.
      devices: The devices in the order of the mesh.
      exchanges: See `HloProgram`.

    Raises:
      UserError: If the compiler refuses the step for another reason than memory.
    """
    begin = time.perf_counter()
    try:
        lowered = lower()
        compiled = lowered.compile()
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        seconds = time.perf_counter() - begin
        refused = Refusal.read(str(error))
        if refused is not None:
            return StepCost(False, refused.needed_bytes, seconds)
        cause = " ".join(str(error).split())[:240]
        raise UserError(
            "config",
            NO_VALUE,
            f"the TPU compiler refuses a step of it ({cause}); change the config",
            code="installation",
        ) from error
    seconds = time.perf_counter() - begin
    program = read_program(lowered, compiled, exchanges)
    return read_cost(compiled, program, topology, devices, seconds)


def read_program(lowered: Any, compiled: Any, exchanges: tuple[int, int] = (0, 1)) -> HloProgram:
    """Return the program of a compiled function.

    jaxlib 0.10.2 cannot read every program that libtpu 0.0.51 makes for TPU7x. Such a function is
    compiled once more, and the compiler itself writes the text.

    Args:
      lowered: The function as JAX lowers it.
      compiled: The same function, compiled.
      exchanges: See `HloProgram`.

    Raises:
      EnvironmentProblem: If the compiler does not write it either.
    """
    try:
        return HloProgram(compiled.as_text(), exchanges)
    except jax.errors.JaxRuntimeError as error:
        with tempfile.TemporaryDirectory() as folder:
            lowered.compile(
                {
                    "xla_dump_to": folder,
                    "xla_dump_hlo_as_text": True,
                    "xla_syntax_sugar_async_ops": True,  # as jaxlib writes them
                }
            )
            texts = [file.read_text() for file in Path(folder).glob("*.after_codegen.txt")]
        if len(texts) != 1:
            raise EnvironmentProblem(
                "libtpu",
                NO_VALUE,
                "neither this jaxlib nor the compiler tells the program; install a newer jaxlib",
                code="installation",
            ) from error
        return HloProgram(texts[0], exchanges)


def read_cost(
    compiled: Any,
    program: HloProgram,
    topology: Topology,
    devices: Sequence[Any],
    compile_seconds: float,
) -> StepCost:
    """Return the cost of a compiled step.

    Args:
      compiled: The compiled step.
      program: Its program, as `read_program` returns it.
      topology: The topology that it was compiled for.
      devices: The devices in the order of the mesh.
      compile_seconds: Seconds that its compilation took.
    """
    memory = compiled.memory_analysis()
    analysis = compiled.cost_analysis()
    found = _collectives.collectives(program, len(devices))
    # The compiler counts the body of a loop once: the products of its other iterations are added.
    matrix = _costs.matrix_flops(program)
    least = analysis.get("optimal_seconds", 0.0)
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
        flops=analysis.get("flops", 0.0) + matrix - _costs.matrix_flops(program, multiplied=False),
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
    """Return whether an instruction belongs to the optimizer's update.

    A fusion that also writes the updated shard into the parameters has the path of that write, so
    the instructions inside of it decide.
    """
    scopes = instruction.path.split("/")
    if replicas.PARAMETERS not in scopes:
        return replicas.UPDATE in scopes
    fused = program.computations.get(instruction.called.get("calls", ""), {})
    return any(replicas.UPDATE in inner.path.split("/") for inner in fused.values())


def _operations(program: HloProgram, hertz: float) -> tuple[Operation, ...]:
    found = [
        Operation(
            run.times * run.instruction.cycles / hertz, run.instruction.op, run.instruction.path
        )
        for run in program.executed
        if not run.fused and run.instruction.cycles
    ]
    return tuple(sorted(found, key=lambda operation: -operation.seconds))
