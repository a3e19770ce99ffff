"""What a function being traced may know of the replicas it will run on.

A model that normalises over groups of replicas has to know how many there are, and a model must not know about meshes.
The step functions of `lbopt.parallel` state it here while they trace; `lbopt.BatchNorm` reads it. Outside of a step
there is one replica.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The data-parallel replicas of the program being traced.

    Attributes:
      count: how many replicas share the global batch.
      axis_name: the mapped axis when the function sees one replica's part of the batch (`pmap`); None when it sees
        the whole global batch (`jit`).
    """

    count: int = 1
    axis_name: str | None = None


_ALONE = Replicas()
_CURRENT: contextvars.ContextVar[Replicas] = contextvars.ContextVar("replicas", default=_ALONE)


def current() -> Replicas:
    """Return the replicas of the program being traced."""
    return _CURRENT.get()


@contextlib.contextmanager
def tracing_for(count: int, axis_name: str | None = None) -> Iterator[None]:
    """State the replicas while a step function is traced."""
    token = _CURRENT.set(Replicas(count, axis_name))
    try:
        yield
    finally:
        _CURRENT.reset(token)
