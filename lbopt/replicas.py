"""What a function being traced may know of the replicas it will run on.

A model that normalises over groups of replicas has to know how many there are, and a model must not know about meshes.
The step functions of `lbopt.parallel` state it here while they trace; `lbopt.BatchNorm` reads it. The context is part of
the key of jit's caches, so a jitted part of a model is traced anew for another number of replicas.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

STATISTICS, GRADIENTS, STATE, METRICS, UPDATE, PARAMETERS = (
    "batch_statistics",
    "reduce_gradients",
    "reduce_state",
    "reduce_metrics",
    "update",
    "gather_parameters",
)
"""Scopes (`jax.named_scope`) of what replicas exchange, by which a compiled program says what an exchange is for."""


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The data-parallel replicas of the program being traced.

    Attributes:
      count: how many replicas share the global batch.
      axis_name: the mapped axis when the function sees one replica's part of the batch (`pmap`); None when it sees
        the whole global batch (`jit`).
      grid: (rows, columns) of the torus on which replica r is at (r // columns, r % columns); None if there is none.
      own_keys: each replica draws from a key of its own, and not from one for the global batch.
      rows: each of these is so many replicas, which run one after another: the function sees one of each.
    """

    count: int = 1
    axis_name: str | None = None
    grid: tuple[int, int] | None = None
    own_keys: bool = False
    rows: int = 1


_CURRENT = jax.make_user_context(default_value=None)


def current() -> Replicas | None:
    """Return the replicas of the program being traced; None if nobody stated them."""
    return _CURRENT.value


def mapped() -> int:
    """Return into how many replicas' parts the batch was split before the traced function saw one of them."""
    here = current()
    return 1 if here is None else here.rows * (here.count if here.axis_name else 1)


@contextlib.contextmanager
def tracing_for(
    count: int,
    axis_name: str | None = None,
    grid: tuple[int, int] | None = None,
    own_keys: bool = False,
) -> Iterator[None]:
    """State the replicas while a step function is traced, for instance in a step of one's own."""
    with _CURRENT(Replicas(count, axis_name, grid, own_keys)):
        yield


@contextlib.contextmanager
def one_after_another(rows: int) -> Iterator[None]:
    """State that each of the replicas is so many, while the function is traced that they run in turn."""
    with _CURRENT(dataclasses.replace(current() or Replicas(), rows=rows)):
        yield


def example_numbers(num_examples: int) -> jax.Array:
    """Return the numbers [num_examples] int32 of the examples that the traced function sees, among all that one key draws for."""
    here = current()
    numbers = jnp.arange(num_examples)
    if here is None or here.axis_name is None or here.own_keys:
        return numbers
    return jax.lax.axis_index(here.axis_name) * num_examples + numbers
