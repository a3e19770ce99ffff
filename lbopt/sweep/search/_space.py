"""The search space: a range for each factor, uniform in its logarithm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lbopt.config import SearchConfig
from lbopt.sweep.search._searcher import Factors


class Range(NamedTuple):
    """A range from `low` to `high`, both included; not searched if they are equal.

    Attributes:
      low: Lower end of the range, > 0, or 0 if both ends are.
      high: Upper end of the range, >= `low`.
    """

    low: float
    high: float

    def nearest(self, value: float) -> float:
        """Return the value, or the nearest end for a value outside of the range."""
        return min(max(value, self.low), self.high)

    def at(self, share: float) -> float:
        """Return the value at a share in [0, 1) of the way in logarithms; both ends must be > 0.

        >>> round(Range(0.1, 10.0).at(0.75), 6)
        3.162278
        """
        low = math.log(self.low)
        high = math.log(self.high)
        return self.nearest(math.exp(low + share * (high - low)))


class Space:
    """The ranges of the three factors.

    Args:
      ranges: Lower and upper end for each of the fields of `Factors`, in their order.

    Attributes:
      searched: Ranges with two different ends, by name.
      rule: First candidate: the arm's rule itself, or the nearest one in the ranges.
    """

    def __init__(self, ranges: Sequence[tuple[float, float]]) -> None:
        named = {name: Range(*ends) for name, ends in zip(Factors._fields, ranges, strict=True)}
        self.searched = {name: ends for name, ends in named.items() if ends.low < ends.high}
        self.rule = Factors(**{name: ends.nearest(1.0) for name, ends in named.items()})

    def with_values(self, values: Mapping[str, float]) -> Factors:
        """Return the candidate with these values of the searched factors, by name."""
        return self.rule._replace(**values)

    def at(self, point: Sequence[float]) -> Factors:
        """Return the candidate at a point of the unit cube over the searched factors.

        Args:
          point: A share in [0, 1) for each of `searched`, in its order; see `Range.at`.

        >>> Space([(1.0, 4.0), (1.0, 1.0), (0.5, 0.5)]).at([0.5])
        Factors(learning_rate=2.0, warmup=1.0, weight_decay=0.5)
        """
        pairs = zip(self.searched.items(), point, strict=True)
        return self.with_values({name: ends.at(float(share)) for (name, ends), share in pairs})


def make_space(config: SearchConfig) -> Space:
    """Return the space of a search, from its three ranges."""
    return Space([config.learning_rate_range, config.warmup_range, config.weight_decay_range])
