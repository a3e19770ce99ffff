"""Facts about the replicas of a program, for functions that are being traced.

A model that normalizes over groups of replicas has to know their number, and a model must not know
about meshes. The step functions of `lbopt.parallel` state the replicas here while they trace, and
`lbopt.BatchNorm` reads them. The context is part of the key of jit's caches, so a jitted part of a
model is traced anew for another number of replicas.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

# Scopes (`jax.named_scope`) of exchanges between replicas. They show in a compiled program what a
# collective is for.
STATISTICS = "batch_statistics"
GRADIENTS = "reduce_gradients"
STATE = "reduce_state"
METRICS = "reduce_metrics"
UPDATE = "update"
PARAMETERS = "gather_parameters"


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The data-parallel replicas of the program being traced.

    Attributes:
      count: Number of replicas that share the global batch.
      axis_name: Mapped axis if the function sees the shard of one replica (`pmap`); None if it sees
        the whole global batch (`jit`).
      grid: (rows, columns) of the torus, with replica r at (r // columns, r % columns); None if
        there is no torus.
      own_keys: Whether each replica has a random key of its own, instead of one for the global
        batch.
      simulated: Number of replicas that each of the `count` simulates by running them sequentially;
        the function sees one at a time.
    """

    count: int = 1
    axis_name: str | None = None
    grid: tuple[int, int] | None = None
    own_keys: bool = False
    simulated: int = 1


_CURRENT = jax.make_user_context(default_value=None)


def current() -> Replicas | None:
    """Return the replicas of the program being traced; None outside of a step."""
    return _CURRENT.value


def mapped() -> int:
    """Return the number of shards of the global batch, of which the traced function sees one."""
    here = current()
    return 1 if here is None else here.simulated * (here.count if here.axis_name else 1)


@contextlib.contextmanager
def tracing_for(
    count: int,
    axis_name: str | None = None,
    grid: tuple[int, int] | None = None,
    own_keys: bool = False,
) -> Iterator[None]:
    """State the replicas while a step function is traced, for instance in a step of one's own.

    Args:
      count: Number of replicas that share the global batch.
      axis_name: Mapped axis if the function sees the examples of one replica (`pmap`, `shard_map`);
        None if it sees the global batch (`jit`).
      grid: (rows, columns) of the torus of replicas, for batch norm over tiles; None for no torus.
      own_keys: Whether each replica has a random key of its own.

    >>> import jax, jax.numpy as jnp, lbopt
    >>> norm = lbopt.BatchNorm(stats_scope="replicas:2", use_running_average=False)
    >>> with tracing_for(4):  # the batch is that of 4 replicas, normalized two by two
    ...     found = jax.eval_shape(norm.init, jax.random.key(0), jnp.zeros((8, 3)))
    >>> found["batch_stats"]["mean"].shape
    (3,)
    """
    with _CURRENT(Replicas(count, axis_name, grid, own_keys)):
        yield


@contextlib.contextmanager
def one_after_another(simulated: int) -> Iterator[None]:
    """State that each replica simulates this number of replicas, while their function is traced."""
    with _CURRENT(dataclasses.replace(current() or Replicas(), simulated=simulated)):
        yield


def example_numbers(num_examples: int) -> jax.Array:
    """Return the places of the examples that the traced function sees.

    They count the examples that share a random key: those of the global batch, or of one replica if
    each has a key of its own.

    Args:
      num_examples: Number of examples that the function sees.

    Returns:
      [num_examples] int32.
    """
    here = current()
    numbers = jnp.arange(num_examples)
    if here is None or here.axis_name is None or here.own_keys:
        return numbers
    return jax.lax.axis_index(here.axis_name) * num_examples + numbers
