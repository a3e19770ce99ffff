"""The configuration of data parallelism."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses

from lbopt.config._checks import DTYPES
from lbopt.config._fields import only
from lbopt.errors import require_choice
from lbopt.parallel import BACKENDS, check_mesh_request

BY_COMPILER = tuple(name for name in BACKENDS if name != "pmap")
"""Backends with which the compiler spreads a step over the devices."""


@dataclasses.dataclass
class ParallelConfig:
    """The distribution of a training step over devices.

    Attributes:
      backend: "jit" ("pjit" is the same) or "pmap".
      num_devices: Number of devices; None for all there are.
      num_microsteps: Number of microsteps over which gradients are accumulated.
      order: Order of the devices: "given" or "torus", which batch norm over "tiles:RxC" needs; see
        `lbopt.make_mesh`.
      shard_update: Whether the optimizer's state and work are split over the devices; see
        `lbopt.make_train_step`.
      reduce_dtype: Dtype in which gradients are summed over devices, "float32" or "bfloat16"; None
        leaves it to the compiler, which may sum the gradients of a bf16 network in bf16. See
        `lbopt.make_train_step`.
      reduce_scatter: Whether each device receives only the sums that it updates, along one axis of
        the torus at a time.

    >>> from lbopt.config import TrainConfig
    >>> parallel = ParallelConfig(num_microsteps=4, shard_update=True)
    >>> TrainConfig(data="digits", model="cnn", parallel=parallel).validate()
    """

    backend: str = "jit"
    num_devices: int | None = None
    num_microsteps: int = 1
    order: str = "given"
    shard_update: bool = False
    reduce_dtype: str | None = None
    reduce_scatter: bool = only(False, shard_update=(True,))


def check_parallel(parallel: ParallelConfig) -> None:
    """Raise `UserError` for a value that no step or mesh takes; `StepOptions` checks the others."""
    check_mesh_request(parallel.num_devices, parallel.order)
    if parallel.reduce_dtype is not None:
        require_choice("reduce_dtype", parallel.reduce_dtype, DTYPES)
