"""The number of batches that this process has begun, by which its guard sees that it progresses.

The loops of training, evaluation and sweeps count; a compiled step called by another program does
not.
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
    """Yield the batches, counting each before it is yielded.

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
