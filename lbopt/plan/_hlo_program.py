"""A compiled program, read from its text: its instructions, and how often each of them runs.

The text is that of an XLA HLO module after all passes (`compiled.as_text()`). XLA's own
`cost_analysis` counts the body of a loop once; here, trip counts are multiplied out.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterator, Mapping

import numpy as np

from lbopt.aggregators import ONE_IN
from lbopt.parallel import EXCHANGE, LEFT_OUT

BYTES = {
    "pred": 1,
    "s4": 1,
    "u4": 1,
    "s8": 1,
    "u8": 1,
    "f8e3m4": 1,
    "f8e4m3": 1,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "f64": 8,
    "s64": 8,
    "u64": 8,
}
"""Bytes of an element by dtype. Shapes of other types (tokens, memory flags) hold no data."""

_HEADER = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_ON_CHIP = re.compile(r"S\([1-9]\)")
_CALLED = re.compile(
    r"\b(calls|to_apply|condition|body|true_computation|false_computation)=%([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OPERAND = re.compile(r"%([\w.\-]+)")
_NAME = re.compile(r'op_name="([^"]*)"')
_CYCLES = re.compile(r'estimated_cycles":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a result.

    Attributes:
      dtype: Dtype as HLO spells it.
      dims: Dimensions.
      in_hbm: Whether the array lies in HBM, and not in on-chip memory.
    """

    dtype: str
    dims: tuple[int, ...]
    in_hbm: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements, in HBM or on the chip."""
        return int(np.prod(self.dims, dtype=np.int64)) * BYTES[self.dtype]

    @property
    def hbm_bytes(self) -> int:
        """Bytes in HBM: all or none."""
        return self.num_bytes if self.in_hbm else 0


@dataclasses.dataclass(eq=False)
class Instruction:
    """One line of a computation.

    Attributes:
      name: Name in the computation.
      op: Operation, "fusion" or "all-reduce" for instance.
      result: Text of the result's shape.
      rest: Text of the operands and attributes.
      is_root: Whether the instruction yields the computation's result.
    """

    name: str
    op: str
    result: str
    rest: str
    is_root: bool

    @functools.cached_property
    def arrays(self) -> list[Array]:
        """The arrays of its result."""
        return parse_shapes(self.result)

    @functools.cached_property
    def operands(self) -> list[str]:
        """Names of the instructions whose results it uses."""
        return _OPERAND.findall(self.rest[: _closing(self.rest)])

    @property
    def attributes(self) -> str:
        """Text of the attributes, after the operands."""
        return self.rest[_closing(self.rest) :]

    @functools.cached_property
    def path(self) -> str:
        """JAX's path of modules, transformations and operation; "" if the compiler made it."""
        found = _NAME.search(self.rest)
        return found[1] if found else ""

    @functools.cached_property
    def cycles(self) -> int:
        """The compiler's cycle estimate; 0 if it has none."""
        found = _CYCLES.search(self.rest)
        return int(found[1]) if found else 0

    @functools.cached_property
    def called(self) -> dict[str, str]:
        """The computations that it runs, by the attribute that names them."""
        return dict(_CALLED.findall(self.attributes))

    @property
    def branches(self) -> list[str]:
        """Names of the computations of a conditional, that of a false condition first."""
        found = _BRANCHES.search(self.attributes)
        if found:
            return _OPERAND.findall(found[1])
        names = ("false_computation", "true_computation")
        return [self.called[name] for name in names if name in self.called]


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Executed:
    """An instruction that a call of the program executes.

    Attributes:
      instruction: The instruction.
      times: Number of executions; a fraction in a branch that only some steps take.
      computation: Name of the computation that holds the instruction.
      fused: Whether the instruction is inside a fusion, whose cost includes it.
    """

    instruction: Instruction
    times: float
    computation: str
    fused: bool


class HloProgram:
    """A compiled program.

    Args:
      text: Text of the HLO module.
      exchanges: Number of fragments of `lbopt.diloco`, and of the steps in which each is exchanged
        once; (0, 1) without local steps.

    Attributes:
      computations: Instructions of each computation, by name and in order.
      entry: Name of the computation that a call runs.
      unknown_loops: Names of loops whose trip count could not be read; they are counted once.
    """

    def __init__(self, text: str, exchanges: tuple[int, int] = (0, 1)):
        self.exchanges = exchanges
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        current: Computation = {}
        for line in text.splitlines():
            if line[:1] in ("%", "E"):
                header = _HEADER.match(line)
                if header:
                    current = self.computations[header[2]] = {}
                    self.entry = header[2] if header[1] else self.entry
            elif found := _INSTRUCTION.match(line):
                root, name, result, op, rest = found.groups()
                current[name] = Instruction(name, op, result, rest, bool(root))
        self.unknown_loops: list[str] = []

    @functools.cached_property
    def executed(self) -> list[Executed]:
        """All instructions that a call executes on average.

        Of a conditional that is the branch with most cycles. Those of aggregators count by how
        often they are taken, and so does the exchange of local steps, with no worker left out.
        """
        return list(self._walk(self.entry, 1, False))

    def _walk(self, computation: str, times: float, fused: bool) -> Iterator[Executed]:
        for instruction in self.computations.get(computation, {}).values():
            yield Executed(instruction, times, computation, fused)
            called = instruction.called
            if instruction.op == "while":
                trips = self.trip_count(computation, instruction)
                yield from self._walk(called["body"], times * trips, fused)
            elif instruction.op == "fusion":
                yield from self._walk(called["calls"], times, True)
            elif instruction.op in ("call", "async-start"):
                inner = called.get("to_apply") or called.get("calls") or ""
                yield from self._walk(inner, times, fused)
            elif instruction.op == "conditional":
                for branch, share in self._shares(instruction).items():
                    yield from self._walk(branch, times * share, fused)

    def _shares(self, conditional: Instruction) -> dict[str, float]:
        """Return how often each branch of a conditional is taken, without those that never are."""
        scope = pathlib.PurePosixPath(conditional.path).parent.name
        if scope.startswith(ONE_IN):
            if_false, if_true = conditional.branches
            share = 1.0 / int(scope.removeprefix(ONE_IN))
            return {if_false: 1.0 - share, if_true: share}

        branches = sorted(conditional.branches, key=self._work)
        if scope == LEFT_OUT:
            return {branches[0]: 1.0}
        if scope != EXCHANGE:
            return {branches[-1]: 1.0}

        # No exchange is the least work, and that of all fragments at the end of a run the most.
        num_fragments, every = self.exchanges
        share = 1.0 / every
        quiet = {branches[0]: 1.0 - num_fragments * share}
        return quiet | dict.fromkeys(branches[1 : 1 + num_fragments], share)

    def _work(self, computation: str) -> tuple[int, int]:
        """Return the cycles and the instructions of a computation and of the branches in it."""
        own = list(self.computations.get(computation, {}).values())
        inner = [self._work(branch) for one in own for branch in one.branches]
        cycles = sum(one.cycles for one in own) + sum(found for found, _ in inner)
        return cycles, len(own) + sum(found for _, found in inner)

    def trip_count(self, computation: str, loop: Instruction) -> int:
        """Return the trip count of a loop; 1 if it is unknown.

        It is known if the condition compares a counter with a constant, and the counter starts and
        rises by constants.
        """
        # The compiler states the counts that it knows itself.
        found = re.search(r'known_trip_count":?\{"?n"?:"?(\d+)', loop.rest)
        if found:
            return int(found[1])
        count = self._counted(computation, loop)
        if count is None:
            self.unknown_loops.append(loop.name)
            return 1
        return count

    def _counted(self, computation: str, loop: Instruction) -> int | None:
        condition = self.computations[loop.called["condition"]]
        root = next(instruction for instruction in condition.values() if instruction.is_root)
        if root.op == "fusion":
            # The comparison is the root of the fusion, whose parameters stand for the operands.
            inside = self.computations[root.called["calls"]]
            compare = next(instruction for instruction in inside.values() if instruction.is_root)
            outer = {f"{index}": condition[name] for index, name in enumerate(root.operands)}
            found = [inside[name] for name in compare.operands]
            sides = [
                outer[side.rest[: side.rest.index(")")]] if side.op == "parameter" else side
                for side in found
            ]
        else:
            compare = root
            sides = [condition[name] for name in root.operands]

        if compare.op != "compare" or len(sides) != 2:
            return None
        limit = _constant(sides[1])
        index = re.search(r"index=(\d+)", sides[0].attributes)
        if limit is None or index is None or "direction=LT" not in compare.attributes:
            return None

        start = self._initial(computation, loop, int(index[1]))
        stride = self._stride(loop, int(index[1]))
        if start is None or stride is None or stride < 1:
            return None
        return max(0, -(-(limit - start) // stride))

    def _stride(self, loop: Instruction, index: int) -> int | None:
        """Return the increment of the counter at an index of a loop's state; None if unknown."""
        body = self.computations[loop.called["body"]]
        root = next(instruction for instruction in body.values() if instruction.is_root)
        raised = _behind_copies(body, body[root.operands[index]]) if root.op == "tuple" else root
        if raised.op != "add":
            return None
        found = [_constant(body[name]) for name in raised.operands if name in body]
        return next((number for number in found if number is not None), None)

    def _initial(self, computation: str, loop: Instruction, index: int) -> int | None:
        """Return the initial constant at an index of a loop's state; None if it is not one."""
        here = self.computations[computation]
        state = here[loop.operands[0]]
        if state.op != "tuple":
            return None
        return _constant(_behind_copies(here, here[state.operands[index]]))

    def users(self, computation: str) -> Mapping[str, list[Instruction]]:
        """Return the instructions of a computation that use each result, by the result's name."""
        return self._users(computation)

    @functools.cache  # noqa: B019 -- a program lives as long as its plan
    def _users(self, computation: str) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = collections.defaultdict(list)
        for instruction in self.computations[computation].values():
            for operand in instruction.operands:
                found[operand].append(instruction)
        return found

    def parameters(self, computation: str) -> list[Instruction]:
        """Return the parameters of a computation, in order."""
        instructions = self.computations[computation].values()
        found = [each for each in instructions if each.op == "parameter"]
        return sorted(found, key=lambda each: int(each.rest[: each.rest.index(")")]))


def parse_shapes(text: str) -> list[Array]:
    """Return the arrays of a shape in HLO's notation; those of a tuple in order.

    >>> parse_shapes("(f32[8,128]{1,0:T(8,128)}, bf16[2]{0:T(256)S(1)})")
    [Array(dtype='f32', dims=(8, 128), in_hbm=True), Array(dtype='bf16', dims=(2,), in_hbm=False)]
    """
    return [
        Array(dtype, tuple(map(int, filter(None, dims.split(",")))), not _ON_CHIP.search(layout))
        for dtype, dims, layout in _SHAPE.findall(text)
        if dtype in BYTES
    ]


def _closing(text: str) -> int:
    """Return the index at which the parenthesis closes that was opened before a text."""
    depth = 1
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.start()
    return len(text)


def _behind_copies(here: Computation, instruction: Instruction) -> Instruction:
    while instruction.op in ("copy", "bitcast") and instruction.operands[0] in here:
        instruction = here[instruction.operands[0]]
    return instruction


def _constant(instruction: Instruction) -> int | None:
    found = re.match(r"(-?\d+)\)", instruction.rest) if instruction.op == "constant" else None
    return int(found[1]) if found else None
