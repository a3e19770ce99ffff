"""TPU topologies for the compiler; the pods themselves are not needed."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lbopt.errors import NO_VALUE, EnvironmentProblem, MissingPackage, UserError, require
from lbopt.plan._hardware import CHIPS, Chip

_PLANES = ("1x1", "2x2", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = (
    "1x1x1",
    "2x2x1",
    "2x2x2",
    "2x2x4",
    "2x4x4",
    "4x4x4",
    "4x4x8",
    "4x8x8",
    "8x8x8",
    "8x8x16",
    "8x16x16",
    "16x16x16",
)
SHAPES = {
    "v2": _PLANES,
    "v3": (*_PLANES, "16x32", "32x32", "128x32"),
    "v4": _CUBES,
    "v5e": ("2x4", *_PLANES),
    "v5p": (*_CUBES, "16x16x24"),
    "v6e": ("2x4", *_PLANES),
    "tpu7x": (*_CUBES, "16x24x24"),
}
"""The slices that Cloud TPU offers, in chips, and four joined v3 pods; others compile too."""
_NAME = re.compile(r"(v\d\w?|tpu7x):(\d+(?:x\d+){1,2})")
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # no TPU is initialised
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server is asked
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # two compiling processes may run side by side
    # libtpu warns if these two are not set.
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v3-8",
}
_MORE_THAN_ANY = 1 << 40
"""More bytes than any device has."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice of a pod.

    Attributes:
      name: Name of the slice, "v3:16x32" for instance.
      chip: The generation of its chips.
      shape: Number of chips along each axis.
      devices: JAX's devices, host by host, in the compiler's order.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    devices: tuple[Any, ...]

    def is_ring(self, axis: int) -> bool:
        """Return whether the links along an axis form a ring."""
        full = self.chip.full_axis
        if full:
            return self.shape[axis] == full  # an axis over several joined pods is a line
        return all(length % 4 == 0 for length in self.shape)


def prepare_environment() -> None:
    """Let this process compile for TPUs that it does not have; call before any device is used.

    This changes the whole process, so call it only in a process that makes plans: JAX uses the CPU
    from then on, and the compilation cache is off, because it cannot store programs for absent
    devices.

    Raises:
      EnvironmentProblem: If libtpu is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise MissingPackage(
            "libtpu",
            NO_VALUE,
            "its compiler makes the plan, and it is not installed: pip install 'lbopt[plan]' "
            "(Linux on x86-64)",
        )
    os.environ.update(_ENVIRONMENT)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # the setting has no effect before this


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Let a program on CPUs compile for TPUs inside; see `prepare_environment`."""
    cached = jax.config.values["jax_enable_compilation_cache"]
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    prepare_environment()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)
        compilation_cache.reset_cache()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def parse_topology(name: str) -> tuple[Chip, tuple[int, ...]]:
    """Return the chip and the number of chips along each axis; needs no compiler.

    Args:
      name: As `open_topology` takes it.

    Raises:
      UserError: If no pod has this many chips along these axes.

    >>> parse_topology("v3:16x32")[1]
    (16, 32)
    """
    found = _NAME.fullmatch(name)
    if found is None or found[1] not in CHIPS:
        slice_name = _slice_of_accelerator(name)
        fix = f"use GENERATION:CHIPSxCHIPS[xCHIPS], for instance {_listed()}"
        if slice_name:
            fix = f"a topology counts chips along each axis; for this accelerator use {slice_name}"
        raise UserError("topology", name, fix)
    chip = CHIPS[found[1]]
    shape = tuple(map(int, found[2].split("x")))
    require(
        len(shape) == chip.axes and min(shape) >= 1 and math.prod(shape) <= chip.most_chips,
        "topology",
        name,
        f"{found[1]} has {chip.axes} axes of 1 or more chips and up to {chip.most_chips:,} of "
        f"them; use one of {_listed()}",
    )
    return chip, shape


def _slice_of_accelerator(accelerator: str) -> str | None:
    """Return the topology of Google Cloud's name of a slice, "v4-32" for instance; None if unknown.

    These names count cores up to v4 and on v5p, and chips on v5e and v6e.
    """
    found = re.fullmatch(r"(v\d\w?|v5litepod)-(\d+)", accelerator)
    if found is None:
        return None
    generation = "v5e" if found[1] == "v5litepod" else found[1]
    chips = int(found[2]) / (1 if generation in ("v5e", "v6e") else 2)
    names = (f"{generation}:{shape}" for shape in SHAPES.get(generation, ()))
    return next((name for name in names if _num_chips(name) == chips), None)


def _num_chips(name: str) -> int:
    return math.prod(map(int, name.partition(":")[2].split("x")))


def open_topology(name: str) -> Topology:
    """Return the topology of a name.

    Args:
      name: Generation, colon, and the number of chips along each axis: "v3:16x32", "v5p:4x4x8".

    Raises:
      UserError: If there is no such topology; the message lists the usual ones.
      EnvironmentProblem: If the compiler fails for one of the usual ones.
    """
    chip, shape = parse_topology(name)
    try:
        described = _describe(name, chip)
    except Exception as error:  # libtpu raises errors of many types
        cause = " ".join(str(error).split())[:160]
        if name.partition(":")[2] in SHAPES[chip.generation]:
            raise EnvironmentProblem(
                "libtpu",
                NO_VALUE,
                f"the TPU compiler does not start ({cause}); install the version of 'lbopt[plan]'",
                code="installation",
            ) from error
        fix = f"the compiler knows no such slice ({cause}); use one of {_listed()}"
        raise UserError("topology", name, fix, code="choice") from error
    return Topology(name, chip, shape, tuple(described.devices))


def _describe(name: str, chip: Chip) -> Any:
    from jax.experimental import topologies

    # Both cores of a v4 chip are one device, as on Cloud TPU; for v5p that is the default.
    options = {"chip_config_name": "megacore"} if chip.generation == "v4" else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **options)


def _listed() -> str:
    return "; ".join(
        f"{generation}:{{{','.join(shapes)}}}" for generation, shapes in SHAPES.items()
    )


def memory_limit(device: Any) -> int:
    """Return the bytes of HBM that a program may use on a device.

    The compiler says so when it refuses a program that is too large.
    """
    mesh = Mesh(np.array([device]), ("one",), axis_types=(AxisType.Auto,))
    where = NamedSharding(mesh, PartitionSpec())
    vast = jax.ShapeDtypeStruct((_MORE_THAN_ANY,), jnp.uint8, sharding=where)
    try:
        jax.jit(lambda x: x + 1, out_shardings=where).lower(vast).compile()
    except jax.errors.JaxRuntimeError as error:
        refused = Refusal.read(str(error))
        if refused is not None:
            return refused.limit_bytes
        raise
    raise AssertionError("a program of a tebibyte was compiled")


_REFUSED = re.compile(r"\(?([\d.]+)([KMGT]?)\)? ?(?:exceeds available HBM|of) \(?([\d.]+)([KMGT]?)")
_ON_CHIP = re.compile(r"memory space (?!hbm)\w+")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Refusal:
    """The compiler's refusal of a program that does not fit into HBM.

    Attributes:
      needed_bytes: Bytes of HBM that the program needs, as far as the compiler says.
      limit_bytes: Bytes of HBM that it may use.
    """

    needed_bytes: int
    limit_bytes: int

    @classmethod
    def read(cls, message: str) -> Refusal | None:
        """Return the refusal in a compiler's message; None if the message is about something else.

        >>> message = "CompileTimeHbmOom: ... temporaries (27.50G) exceeds available HBM (15.50G)."
        >>> Refusal.read(message).needed_bytes / 2**30
        27.5
        >>> on_chip = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 17M of 16M."
        >>> Refusal.read(on_chip) is None
        True
        """
        full = "RESOURCE_EXHAUSTED" in message or "HbmOom" in message
        found = _REFUSED.search(message) if full and not _ON_CHIP.search(message) else None
        if found is None:
            return None
        needed, limit = (
            float(number) * _UNITS[unit] for number, unit in (found.group(1, 2), found.group(3, 4))
        )
        return cls(math.ceil(needed), math.floor(limit))


def axes_spanned(topology: Topology, devices: Sequence[Any]) -> list[tuple[int, bool]]:
    """Return the number of chips along each axis that devices span, and whether it is a ring."""
    spans = []
    for axis in range(len(topology.shape)):
        places = {device.coords[axis] for device in devices}
        if len(places) > 1:
            extent = max(places) - min(places) + 1
            spans.append((extent, extent == topology.shape[axis] and topology.is_ring(axis)))
    return spans
