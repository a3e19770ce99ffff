"""Where candidates are looked for: a range for each factor, uniform in its logarithm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lbopt.config import SearchConfig
from lbopt.sweep.search._protocol import Factors


class Range(NamedTuple):
    """From `low` to `high`, both included; not searched where they are equal.

    Attributes:
      low: the lower end, > 0, or 0 where both ends are.
      high: the upper end.
    """

    low: float
    high: float

    def nearest(self, value: float) -> float:
        """Return the value, or the end that it lies beyond."""
        return min(max(value, self.low), self.high)

    def at(self, part: float) -> float:
        """Return the value at a part in [0, 1) of the way, measured in logarithms; the ends are above 0.

        >>> round(Range(0.1, 10.0).at(0.75), 6)
        3.162278
        """
        low, high = math.log(self.low), math.log(self.high)
        return self.nearest(math.exp(low + part * (high - low)))


class Space:
    """The ranges of the three factors.

    Args:
      ranges: (low, high), one for each of the names of `Factors`, in their order.

    Attributes:
      searched: the ranges that have two ends, by name.
      rule: the candidate that is tried first: the rule itself, or what the ranges have nearest to it.
    """

    def __init__(self, ranges: Sequence[tuple[float, float]]) -> None:
        named = {name: Range(*ends) for name, ends in zip(Factors._fields, ranges, strict=True)}
        self.searched = {name: ends for name, ends in named.items() if ends.low < ends.high}
        self.rule = Factors(**{name: ends.nearest(1.0) for name, ends in named.items()})

    def with_values(self, values: Mapping[str, float]) -> Factors:
        """Return the candidate with these values of the searched factors, by name; the others have their only one."""
        return self.rule._replace(**values)

    def at(self, point: Sequence[float]) -> Factors:
        """Return the candidate at a point of the unit cube over the searched factors.

        Args:
          point: a part in [0, 1) for each of `searched`, in its order; see `Range.at`.

        >>> Space([(1.0, 4.0), (1.0, 1.0), (0.5, 0.5)]).at([0.5])
        Factors(learning_rate=2.0, warmup=1.0, weight_decay=0.5)
        """
        parts = zip(self.searched.items(), point, strict=True)
        return self.with_values({name: ends.at(float(part)) for (name, ends), part in parts})


def make_space(config: SearchConfig) -> Space:
    """Return the space of a search, from its three ranges."""
    return Space([config.learning_rate_range, config.warmup_range, config.weight_decay_range])
