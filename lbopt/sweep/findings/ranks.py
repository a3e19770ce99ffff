"""Whether one order agrees with another by more than chance."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_FEWEST = 3
_ALL_ORDERS_UP_TO = 7
_DRAWS = 10_000
_ROUNDING = 1e-9


class RankTest(NamedTuple):
    """How two orders agree.

    Attributes:
      correlation: Spearman's.
      p: share of all orders in which it would be at least as high.
      least_p: of the best agreement that these numbers, with their ties, could show.
    """

    correlation: float
    p: float
    least_p: float


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation, ties sharing their mean rank; None for fewer than 3 pairs or a constant side.

    >>> rank_correlation([(1, 10), (2, 30), (3, 20)])
    0.5
    """
    columns = _columns(pairs)
    if len(pairs) < _FEWEST or any(len(set(column)) == 1 for column in columns):
        return None
    return round(statistics.correlation(*columns), 9)


def rank_test(pairs: Sequence[tuple[float, float]]) -> RankTest | None:
    """Hold the rank correlation of pairs against those of all orders of one side.

    Args:
      pairs: of more than 7 pairs, 10,000 random orders stand for all.

    Returns:
      The test, one-sided; None where there is no correlation.

    >>> rank_test([(1, 10), (2, 20), (3, 30), (4, 40)])
    RankTest(correlation=1.0, p=0.041666666666666664, least_p=0.041666666666666664)
    """
    correlation = rank_correlation(pairs)
    if correlation is None:
        return None
    ours, theirs = (np.asarray(column) for column in _columns(pairs))
    agreement = ours[_orders(len(pairs))] @ theirs  # Spearman's correlation grows with it
    p, least = (float(np.mean(agreement >= value - _ROUNDING)) for value in (ours @ theirs, np.sort(ours) @ np.sort(theirs)))  # fmt: skip
    return RankTest(correlation, p, least)


def _orders(count: int) -> np.ndarray:
    """Return orders of so many things, [orders, count] int, the given one first."""
    if count <= _ALL_ORDERS_UP_TO:
        return np.array([*itertools.permutations(range(count))])
    given = np.tile(np.arange(count), (_DRAWS, 1))
    orders = np.random.Generator(np.random.Philox(0)).permuted(given, axis=1)
    orders[0] = np.arange(count)
    return orders


def _columns(pairs: Sequence[tuple[float, float]]) -> list[list[float]]:
    return [_ranks([pair[axis] for pair in pairs]) for axis in (0, 1)]


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [
        (bisect.bisect_left(ordered, value) + bisect.bisect_right(ordered, value)) / 2
        for value in values
    ]
