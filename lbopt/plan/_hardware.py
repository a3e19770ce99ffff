"""Figures of TPU chips, each with its source. The compiler says how much memory a program may use.

"Cloud" is docs.cloud.google.com/tpu/docs/ (v2, v3, v4, v5e, v5p, v6e, tpu7x). "book" is
jax-ml/scaling-book@0819a7d8c55ddc113f5cba0285a5f97380cac1e3:tpus.md and sharding.md.
"CACM" is Jouppi et al., A Domain-Specific Supercomputer for Training Deep Neural Networks, CACM
63(7), 2020, quoted from memory: [recalled 90%] is our confidence in a figure. "ISCA" is Jouppi et
al., TPU v4, arXiv:2304.01433v3, Table 4, read in copies of that table only.

The sources differ on links. ISCA has 50 GB/s for v4, and 70 for v3 where CACM has 82; the book,
tpus.md, has 100 GB/s one way for v3, 45 for v4 and v5e, 90 for v5p and v6e. Here the rates are
nominal, by ISCA and Cloud, so the book's are a tenth lower from v4 on.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """One generation of TPU chips.

    Attributes:
      generation: Name of the generation, "v3" for instance.
      flops: Peak operations per second of a chip's matrix units in bf16.
      hertz: Cycles per second in the compiler's estimates.
      link_bytes_per_second: Rate of one link of the interconnect in one direction.
      axes: Number of axes of the torus, 2 or 3.
      most_chips: Largest number of chips; larger topologies are refused. One pod, and for v3 four
        joined pods, as MLPerf v0.7 ran them: mlcommons/training_results_v0.7@
        c66406115bb3c60cb9c49889b076727ccecba31e:Google/benchmarks/bert/tpu-v3-8192-JAX/
        run_and_time.sh has 128 x 32 chips.
      full_axis: Number of chips at which an axis closes to a ring; a shorter axis is a line. 0 if
        any multiple of 4 closes.
      cores_per_chip: Number of cores of a chip that JAX sees as devices.
      sources: Sources of the numbers.
    """

    generation: str
    flops: float
    hertz: float
    link_bytes_per_second: float
    axes: int
    most_chips: int
    full_axis: int
    cores_per_chip: int
    sources: str

    @property
    def device_flops(self) -> float:
        """Peak operations per second of one JAX device."""
        return self.flops / self.cores_per_chip


CHIPS = {
    chip.generation: chip
    for chip in (
        Chip(
            "v2",
            flops=46e12,
            hertz=0.7e9,
            link_bytes_per_second=62e9,
            axes=2,
            most_chips=256,
            full_axis=16,
            cores_per_chip=2,
            sources="peak, clock, link of 496 Gbit/s: CACM [recalled 90%]",
        ),
        Chip(
            "v3",
            flops=123e12,
            hertz=0.94e9,
            link_bytes_per_second=82e9,
            axes=2,
            most_chips=4096,
            full_axis=32,
            cores_per_chip=2,
            sources="peak: Cloud; clock, link of 656 Gbit/s: CACM [recalled 90%]",
        ),
        Chip(
            "v4",
            flops=275e12,
            hertz=1.05e9,
            link_bytes_per_second=50e9,
            axes=3,
            most_chips=4096,
            full_axis=0,
            cores_per_chip=1,
            sources="peak: Cloud; clock, link: ISCA, read in copies of its table",
        ),
        Chip(
            "v5e",
            flops=197e12,
            hertz=1.5e9,
            link_bytes_per_second=50e9,
            axes=2,
            most_chips=256,
            full_axis=16,
            cores_per_chip=1,
            sources="peak, link (an eighth of 400 GB/s a chip): Cloud; clock: book",
        ),
        Chip(
            "v5p",
            flops=459e12,
            hertz=1.75e9,
            link_bytes_per_second=0.1e12,
            axes=3,
            most_chips=8960,
            full_axis=0,
            cores_per_chip=1,
            sources="peak, link (a twelfth of 1200 GB/s a chip): Cloud; clock: peak over 8 units "
            "of 128 x 128",
        ),
        Chip(
            "v6e",
            flops=918e12,
            hertz=1.75e9,
            link_bytes_per_second=0.1e12,
            axes=2,
            most_chips=256,
            full_axis=16,
            cores_per_chip=1,
            sources="peak, link (an eighth of 800 GB/s a chip): Cloud; clock: peak over 524,288 "
            "operations a cycle (the compiler's 369,231 for a matrix product rule out half of "
            "that)",
        ),
        Chip(
            "tpu7x",
            flops=2307e12,
            hertz=2.2e9,
            link_bytes_per_second=0.1e12,
            axes=3,
            most_chips=9216,
            full_axis=0,
            cores_per_chip=2,
            sources="peak, link (a twelfth of 1200 GB/s a chip): Cloud; clock: peak of a core over "
            "524,288 operations a cycle (the compiler's 422,142 for a matrix product rule out half "
            "of that)",
        ),
    )
}
HOP_SECONDS = 1e-6
"""Latency of one hop of the interconnect: about 1 us on every generation (book, sharding.md)."""
