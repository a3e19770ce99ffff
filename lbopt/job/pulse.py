"""A count of what this process has begun, by which others see that it has not stopped."""

_begun = 0


def beat() -> None:
    """Count one more step of training or evaluation."""
    global _begun
    _begun += 1


def count() -> int:
    """Return how many there were.

    >>> before = count()
    >>> beat()
    >>> count() - before
    1
    """
    return _begun
