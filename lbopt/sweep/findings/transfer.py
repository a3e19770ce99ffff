"""LEGW's claims: what stays at the same number of steps while the batch grows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lbopt.sweep.findings.verdicts import HELD, NOT_HELD, UNKNOWN, Arms, Claim, said

Pairs = Sequence[tuple[float, float]]
_HALFWAY = 0.5
"""Between constant steps (exponent 0) and constant epochs (exponent -1)."""


class Warmups(NamedTuple):
    """The warmup of a cell in which it was searched, in steps.

    Attributes:
      global_batch_size: of the cell.
      chosen: on validation.
      shortest: that was tried, above 0.
      longest: that was tried.
    """

    global_batch_size: int
    chosen: float
    shortest: float
    longest: float


def constant_warmup_steps(arms: Arms) -> Claim | None:
    """Hold LEGW's rule, the same warmup steps at every batch size, against the warmups that validation chose.

    The slope of log2(chosen warmup steps) against log2(batch size), with an intercept for each arm, is 0 for constant
    steps and -1 for constant epochs: less than halfway from 0 holds. It cannot be told where the shortest and longest
    warmups that were tried leave slopes on one side only.
    """
    searched = [found for arm in arms if (found := warmups(arm))]
    slope = pooled_slope([[(cell.global_batch_size, cell.chosen) for cell in found] for found in searched])
    if slope is None:
        return None
    what = "constant warmup steps are the right transfer over batch sizes (LEGW)"
    numbers = f"the chosen warmup steps go like batch^{slope:.2f} (0 is constant steps, -1 constant epochs)"
    lowest, highest = attainable_slopes(searched)
    if lowest > -_HALFWAY or highest < -_HALFWAY:
        numbers += f", but what was tried could only give exponents from {lowest:.2f} to {highest:.2f}"
        return said("constant_warmup_steps", UNKNOWN, what, numbers)
    verdict = HELD if abs(slope) < _HALFWAY else NOT_HELD
    return said("constant_warmup_steps", verdict, what, numbers)


def warmups(arm: Mapping[str, Any]) -> list[Warmups]:
    """Return the warmups of an arm's cells in which more than one was tried and one above 0 chosen."""
    found = []
    for point in arm["points"]:
        tried = [one for one in point["search"] if one["fidelity"] == 1]
        steps = [one["warmup_steps"] for one in tried if one["warmup_steps"] > 0]
        if len({one["warmup_factor"] for one in tried}) > 1 and point["warmup_steps"] > 0:
            found.append(Warmups(point["global_batch_size"], point["warmup_steps"], min(steps), max(steps)))
    return found


def attainable_slopes(searched: Sequence[Sequence[Warmups]]) -> tuple[float, float]:
    """Return the steepest slopes, downwards and upwards, that choices among what was tried could have given."""
    ends = []
    for small, large in (("longest", "shortest"), ("shortest", "longest")):
        chosen = []
        for found in searched:
            middle = statistics.fmean(math.log2(cell.global_batch_size) for cell in found)
            sides = [large if math.log2(cell.global_batch_size) > middle else small for cell in found]
            chosen.append([(c.global_batch_size, getattr(c, side)) for c, side in zip(found, sides, strict=True)])
        ends.append(pooled_slope(chosen) or 0.0)
    return ends[0], ends[1]


def lipschitz_peak_stays(arms: Arms) -> Claim | None:
    """Hold LEGW's explanation against the probes: the local Lipschitz constant peaks near the same step at every batch.

    The slope is that of log2(step of the peak) against log2(batch size), as above. It cannot be told where the peak is at
    the first probe in more than half of the cells: that is where probing began, at every batch size.

    References:
      You et al., Large-Batch Training for LSTM and Beyond, arXiv 1901.08256 [recalled 80%].
    """
    points = [[point for point in arm["points"] if point["lipschitz_peak_step"]] for arm in arms]
    slope = pooled_slope([[(p["global_batch_size"], p["lipschitz_peak_step"]) for p in found] for found in points])
    if slope is None:
        return None
    what = "the local Lipschitz constant along the gradient peaks near the same step at every batch (LEGW)"
    cells = [point for found in points for point in found]
    at_first = sum(point["lipschitz_peak_step"] == point["lipschitz_first_step"] for point in cells)
    numbers = f"the step of its peak goes like batch^{slope:.2f} (0 is the same step, -1 the same epoch)"
    if 2 * at_first > len(cells):
        numbers = f"it was largest at the first probe in {at_first} of {len(cells)} cells"
        return said("lipschitz_peak_stays", UNKNOWN, what, numbers)
    return said("lipschitz_peak_stays", HELD if abs(slope) < _HALFWAY else NOT_HELD, what, numbers)


def pooled_slope(groups: Sequence[Pairs]) -> float | None:
    """Return the least-squares slope of log2 y against log2 x, an intercept for each group; None without spread in x.

    >>> pooled_slope([[(16, 64), (64, 16)], [(16, 8), (64, 2)]])
    -1.0
    """
    products = squares = 0.0
    for group in groups:
        xs, ys = ([math.log2(pair[axis]) for pair in group] for axis in (0, 1))
        middle, height = (statistics.fmean(values) if values else 0.0 for values in (xs, ys))
        products += sum((x - middle) * (y - height) for x, y in zip(xs, ys, strict=True))
        squares += sum((x - middle) ** 2 for x in xs)
    return products / squares if squares > 0 else None
