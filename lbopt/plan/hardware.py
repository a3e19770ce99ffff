"""What is known of TPU chips, each number with its source. How much memory a program may use is asked of the compiler.

Sources, by letter:
  D  docs.cloud.google.com/tpu/docs/ (v2, v3, v4, v5e, v5p, v6e), read November 2026.
  C  Jouppi et al., A Domain-Specific Supercomputer for Training Deep Neural Networks, CACM 63(7), 2020.
  I  Jouppi et al., TPU v4, ISCA 2023, arXiv 2304.01433, table 4.
  J  jax-ml/jax, jax/_src/pallas/mosaic/tpu_info.py, as of commit 04c6362.
  S  jax-ml/scaling-book, tpus.md and sharding.md, as of February 2025.
C and I were not read themselves, but notes on them: their numbers are [recalled 90%].
"""

from __future__ import annotations

import dataclasses

from lbopt.errors import require_choice


@dataclasses.dataclass(frozen=True)
class Chip:
    """One generation.

    Attributes:
      generation: "v3".
      flops: peak operations per second of a chip's matrix units in bf16.
      hertz: what a cycle of the compiler's estimates lasts, 1 / seconds.
      hbm_bytes_per_second: of a chip.
      link_bytes_per_second: of one link of the interconnect in one direction.
      torus_dims: 2 or 3; a chip has two links along each.
      full_axis: chips of an axis that closes to a ring; a shorter one is a line. 0: any multiple of 4 does.
      on_chip_bytes: vector memory of a core.
      cores_per_chip: that JAX sees as devices.
      chips_per_host: that one process has.
      sources: of the numbers.
    """

    generation: str
    flops: float
    hertz: float
    hbm_bytes_per_second: float
    link_bytes_per_second: float
    torus_dims: int
    full_axis: int
    on_chip_bytes: int
    cores_per_chip: int
    chips_per_host: int
    sources: str

    @property
    def device_flops(self) -> float:
        """Peak operations per second of one JAX device."""
        return self.flops / self.cores_per_chip


MIB = 2**20
CHIPS = {
    chip.generation: chip
    for chip in (
        Chip(
            "v2",
            46e12,
            0.70e9,
            700e9,
            62e9,
            2,
            16,
            16 * MIB,
            2,
            4,
            "flops, clock, HBM, link 496 Gbit/s: C [recalled 90%]; VMEM: J",
        ),
        Chip(
            "v3",
            123e12,
            0.94e9,
            900e9,
            82e9,
            2,
            32,
            16 * MIB,
            2,
            4,
            "flops, HBM: D; clock, link 656 Gbit/s: C [recalled 90%]; VMEM: J",
        ),
        Chip(
            "v4",
            275e12,
            1.05e9,
            1200e9,
            50e9,
            3,
            0,
            32 * MIB,
            1,
            4,
            "flops, HBM: D; clock, link: I [recalled 90%]; VMEM: J",
        ),
        Chip(
            "v5e",
            197e12,
            1.5e9,
            819e9,
            50e9,
            2,
            16,
            128 * MIB,
            1,
            4,
            "flops, HBM, link (400 GB/s a chip, both directions): D; clock: S; VMEM: J",
        ),
        Chip(
            "v5p",
            459e12,
            1.75e9,
            2765e9,
            100e9,
            3,
            0,
            128 * MIB,
            1,
            4,
            "flops, HBM, link (1200 GB/s a chip, both directions): D; clock: flops / 8 units of 128 x 128; VMEM: J",
        ),
        Chip(
            "v6e",
            918e12,
            1.75e9,
            1638e9,
            100e9,
            2,
            16,
            128 * MIB,
            1,
            4,
            "flops, HBM, link (800 GB/s a chip, both directions): D; clock: flops / 524,288 operations a cycle (the compiler's estimate of a matrix product, 369,231 a cycle, rules out half of that); VMEM: J",
        ),
    )
}
HOP_SECONDS = 1e-6
"""Latency of one hop of the interconnect: about 1 us on every generation (S)."""


def chip_of(generation: str) -> Chip:
    """Return a generation's numbers, or raise `UserError` listing those known."""
    require_choice("--topology", generation, CHIPS)
    return CHIPS[generation]
