"""How sure the difference of two means is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy import special


def welch_interval(
    ours: Sequence[float], theirs: Sequence[float], confidence: float = 0.95
) -> tuple[float, float] | None:
    """Return the interval of the difference of two means, ours less theirs, of samples with variances of their own.

    Args:
      ours: at least two finite numbers.
      theirs: as well.
      confidence: in (0, 1).

    Returns:
      (low, high), in the unit of the numbers; None if there are fewer, or if one is not finite.

    >>> [round(end, 3) for end in welch_interval([5.1, 4.9, 5.0], [4.0, 4.2, 3.8])]
    [0.584, 1.416]

    References:
      Welch, The generalization of "Student's" problem when several different population variances are involved, 1947.
    """
    if min(len(ours), len(theirs)) < 2 or not all(map(math.isfinite, (*ours, *theirs))):
        return None
    middle = statistics.fmean(ours) - statistics.fmean(theirs)
    parts = [statistics.variance(values) / len(values) for values in (ours, theirs)]
    if sum(parts) == 0:
        return middle, middle
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (ours, theirs), strict=True)
    )
    half = float(special.stdtrit(freedom, (1 + confidence) / 2)) * math.sqrt(sum(parts))
    return middle - half, middle + half
