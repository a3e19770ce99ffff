"""The only uses of JAX's private modules, each with the reason why no public function serves.

Each function imports what it uses, so that a change inside JAX ends only the calls that need it.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

READ_XLA_FLAGS = """
from jaxlib._jax import CompileOptions
CompileOptions().executable_build_options.debug_options
"""
"""A program in which XLA reads XLA_FLAGS, and ends with its message if it refuses one.

`jax.devices()` reads them too, but first imports JAX and starts the devices, which takes seconds
and may hold a TPU.
"""


def runs_on_cloud_tpu() -> bool:
    """Return whether JAX found a Cloud TPU attached to this machine.

    `jax.devices()` tells it too, but starts the runtime, after which no job can be joined.
    """
    from jax._src import cloud_tpu_init

    return bool(cloud_tpu_init.running_in_cloud_tpu_vm)


def find_in_cluster(
    timeout_s: int,
) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """Return the coordinator's address, the number of processes, this one's index and its devices.

    JAX asks the metadata server, the scheduler or MPI. An entry is None if it does not know.
    `jax.distributed.initialize` looks up the same, but joins JAX's job at once. lbopt must connect
    its own failure detector first.
    """
    from jax._src import clusters

    return clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, timeout_s
    )


def is_whole_program(file: pathlib.Path) -> bool:
    """Return whether JAX can read a file of its compilation cache.

    JAX itself only warns of a torn file, at every start, and does not replace it.
    """
    from jax._src import compilation_cache

    try:
        compilation_cache.decompress_executable(file.read_bytes())
    except Exception:  # of the file system, and of three compression libraries
        return False
    return True
