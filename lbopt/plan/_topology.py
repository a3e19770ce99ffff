"""TPU pods that are not here, as the compiler knows them."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lbopt.errors import EnvironmentProblem, UserError
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
}
"""The usual slices, in chips, as Cloud TPU sells them, and four joined v3 pods; the compiler takes others too."""
_NAME = re.compile(r"(v\d\w?):(\d+(?:x\d+){1,2})")
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # no TPU is initialised
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server is asked
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # two compiling processes may run side by side
    "TPU_WORKER_HOSTNAMES": "localhost",  # and these two are not missed aloud
    "TPU_ACCELERATOR_TYPE": "v3-8",
}
_WIDER_THAN_ANY = 1 << 40


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice of a pod.

    Attributes:
      name: "v3:16x32".
      chip: what it is made of.
      shape: chips along x, y (and z).
      devices: what JAX calls so, in the order of the compiler, host by host.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    devices: tuple[Any, ...]

    def is_ring(self, axis: int) -> bool:
        """Whether the links along an axis close."""
        size, full = self.shape[axis], self.chip.full_axis
        if full:
            return size == full  # several pods in a row do not close
        return all(length % 4 == 0 for length in self.shape)


def prepare_environment() -> None:
    """Let this process compile for TPUs without having one; before any device is used.

    This changes the whole process, so it belongs into one that only plans: JAX uses the CPU from then
    on, and keeps no compiled programs, because those for absent devices cannot be stored.

    Raises:
      EnvironmentProblem: if libtpu is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise EnvironmentProblem(
            "libtpu, whose compiler makes the plan, is not installed: pip install 'lbopt[plan]' (Linux on x86-64)"
        )
    os.environ.update(_ENVIRONMENT)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # which it is from then on


def open_topology(name: str) -> Topology:
    """Return a topology by name: generation, colon, chips along each axis ("v3:16x32", "v5p:4x4x8").

    Raises:
      UserError: if there is none of that name; the message lists the usual ones.
      EnvironmentProblem: if the compiler knows none of the usual ones either.
    """
    found = _NAME.fullmatch(name)
    if found is None or found[1] not in CHIPS:
        raise UserError(
            f"--topology = {name!r}: use GENERATION:CHIPSxCHIPS[xCHIPS], for instance {_listed()}"
        )
    chip, shape = CHIPS[found[1]], tuple(map(int, found[2].split("x")))
    if len(shape) != chip.axes or min(shape) < 1 or math.prod(shape) > chip.most_chips:
        counts = f"{found[1]} has {chip.axes} axes of 1 or more chips and up to {chip.most_chips:,} of them"
        raise UserError(f"--topology = {name!r}: {counts}; known are {_listed()}")
    try:
        described = _describe(name, chip)
    except Exception as error:  # whatever libtpu raises
        said = " ".join(str(error).split())[:160]
        if found[2] in SHAPES[found[1]]:
            raise EnvironmentProblem(f"the TPU compiler does not start: {said}") from error
        raise UserError(
            f"--topology = {name!r}: the compiler knows no such slice ({said}); known are {_listed()}"
        ) from error
    return Topology(name, chip, shape, tuple(described.devices))


def _describe(name: str, chip: Chip) -> Any:
    from jax.experimental import topologies

    # Both cores of a v4 chip are one device, as on Cloud TPU; the later two-core chip is so by itself.
    options = {"chip_config_name": "megacore"} if chip.generation == "v4" else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **options)


def _listed() -> str:
    return "; ".join(
        f"{generation}:{{{','.join(shapes)}}}" for generation, shapes in SHAPES.items()
    )


def memory_limit(device: Any) -> int:
    """Return how many bytes of HBM a program may use on a device: the compiler says so when it refuses one that is too large."""
    where = NamedSharding(
        Mesh(np.array([device]), ("one",), axis_types=(AxisType.Auto,)), PartitionSpec()
    )
    vast = jax.ShapeDtypeStruct((_WIDER_THAN_ANY,), jnp.uint8, sharding=where)
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
    """The compiler's own: a program that does not fit.

    Attributes:
      needed_bytes: of HBM, as far as it says.
      limit_bytes: that there are.
    """

    needed_bytes: int
    limit_bytes: int

    @classmethod
    def read(cls, message: str) -> Refusal | None:
        """Return what a compiler's message says; None if it is about something else, memory on the chip for instance.

        >>> Refusal.read("CompileTimeHbmOom: ... temporaries (27.50G) exceeds available HBM (15.50G). HLO module: jit_f.").needed_bytes / 2**30
        27.5
        >>> Refusal.read("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 17.20M of 16.00M vmem.") is None
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
    """Return, for each axis that a group of devices spans, the chips along it and whether they form a ring."""
    spans = []
    for axis in range(len(topology.shape)):
        places = {device.coords[axis] for device in devices}
        if len(places) > 1:
            extent = max(places) - min(places) + 1
            spans.append((extent, extent == topology.shape[axis] and topology.is_ring(axis)))
    return spans
