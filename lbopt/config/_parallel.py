"""How a step is spread over devices."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses

from lbopt.config._checks import at_least
from lbopt.errors import require, require_choice

BACKENDS = ("jit", "pjit", "pmap")
ORDERS = ("given", "torus")
REDUCE_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass
class ParallelConfig:
    """How the step is spread out.

    Attributes:
      backend: "jit" ("pjit" is the same) or "pmap".
      num_devices: None for all there are.
      num_microsteps: gradient accumulation.
      order: of the devices: "given" or "torus", which batch norm over "tiles:RxC" needs; see `lbopt.make_mesh`.
      shard_update: split the optimizer's state and work over the devices; see `lbopt.make_train_step`.
      reduce_dtype: sum gradients over devices in "float32" or "bfloat16"; None to leave it to the compiler, which may sum
        what a bf16 network's backward pass leaves in bf16. See `lbopt.make_train_step`.
      reduce_scatter: with shard_update: send each device only the sums that it updates, along one axis of the torus at a time.
    """

    backend: str = "jit"
    num_devices: int | None = None
    num_microsteps: int = 1
    order: str = "given"
    shard_update: bool = False
    reduce_dtype: str | None = None
    reduce_scatter: bool = False


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
    if parallel.reduce_dtype is not None:
        require_choice("config.parallel.reduce_dtype", parallel.reduce_dtype, REDUCE_DTYPES)
    require(
        parallel.shard_update or not parallel.reduce_scatter,
        "config.parallel.reduce_scatter",
        parallel.reduce_scatter,
        "sums are scattered to those who update a part; set config.parallel.shard_update=True",
    )
    if parallel.num_devices is not None:
        at_least("config.parallel.num_devices", parallel.num_devices, 1)
