"""A count of the batches that this process has begun, by which its guard sees that it has not stopped.

The loops that run steps count (training, evaluation, sweeps); a compiled step called by another program counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

_begun = 0


def beat() -> None:
    """Count one more batch of training or evaluation."""
    global _begun
    _begun += 1


def beating(batches: Iterable[T]) -> Iterator[T]:
    """Yield the batches, counting each as it is begun.

    >>> before = count()
    >>> list(beating("abc"))
    ['a', 'b', 'c']
    >>> count() - before
    3
    """
    for batch in batches:
        beat()
        yield batch


def count() -> int:
    """Return the number of batches begun so far."""
    return _begun
