"""How a step is spread over devices."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses

from lbopt.config.checks import at_least
from lbopt.errors import require, require_choice

BACKENDS = ("jit", "pjit", "pmap")
ORDERS = ("given", "torus")


@dataclasses.dataclass
class ParallelConfig:
    """How the step is spread out.

    Attributes:
      backend: "jit" ("pjit" is the same) or "pmap".
      num_devices: None for all there are.
      num_microsteps: gradient accumulation.
      order: of the devices: "given" or "torus", which batch norm over "tiles:RxC" needs; see `lbopt.make_mesh`.
      shard_update: split the optimizer's state and work over the devices; see `lbopt.make_train_step`.
    """

    backend: str = "jit"
    num_devices: int | None = None
    num_microsteps: int = 1
    order: str = "given"
    shard_update: bool = False


def validate_parallel(parallel: ParallelConfig) -> None:
    require_choice("config.parallel.backend", parallel.backend, BACKENDS)
    require_choice("config.parallel.order", parallel.order, ORDERS)
    at_least("config.parallel.num_microsteps", parallel.num_microsteps, 1)
    require(
        not parallel.shard_update or parallel.backend != "pmap",
        "config.parallel.shard_update",
        parallel.shard_update,
        "under pmap every replica holds the whole state; use config.parallel.backend='jit'",
    )
    if parallel.num_devices is not None:
        at_least("config.parallel.num_devices", parallel.num_devices, 1)
