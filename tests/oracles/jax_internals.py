"""The only uses of JAX's private modules by the tests."""

from jax._src import (
    cloud_tpu_init,  # whether this machine is a TPU VM is decided when JAX is imported
    compilation_cache,  # makes files of the cache as JAX does
    compiler,  # there is no public way to give options to all that is compiled
    tree_util,  # has a class that JAX versions with another flattening lack
    xla_bridge,  # the backends that have started, without starting one
)
from jax._src.clusters import cloud_tpu_cluster
from jax._src.interpreters import mlir  # contexts of programs are costly, and not for users

__all__ = [
    "cloud_tpu_cluster",
    "cloud_tpu_init",
    "compilation_cache",
    "compiler",
    "mlir",
    "tree_util",
    "xla_bridge",
]
