"""LEGW's claim: the warmup stays at the same number of steps while the batch grows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from lbopt.sweep.findings.metric import ACCURACY, Metric
from lbopt.sweep.findings.names import quoted
from lbopt.sweep.findings.verdicts import HELD, NOT_HELD, UNKNOWN, Arms, Claim, said
from lbopt.sweep.findings.warmups import (
    EPOCHS,
    GROWING,
    Contest,
    Warmups,
    compare,
    is_searched,
    total,
    warmups,
)

Pairs = Sequence[tuple[float, float]]
_WARMUP = "constant_warmup_steps"
_CLAIMED = "constant warmup steps are the right transfer over batch sizes (LEGW)"
_CARRIED = "carried to another batch size, the chosen warmup "
_IN_PROPORTION = "as steps in proportion to the batch"
_DRAWN = "warmup was drawn together with the learning rate, not crossed with it in a grid, so neither's part can be told"
_NOWHERE = (
    "no warmup that was chosen inside of the range tried can be carried to another batch size both as the same steps and "
    "as the same epochs, for want of tried ones near these"
)


def constant_warmup_steps(arms: Arms, metric: Metric = ACCURACY) -> Claim | None:
    """Hold LEGW's rule, the same warmup steps at every batch size, against the scores of the search itself.

    The slope of the chosen warmup over the batch size would not do: every arm's grid is centred on its own rule, so that
    choices of pure noise have slope 0 under LEGW and -1 under constant epochs. Instead the warmup that validation chose at
    one batch size is carried to every other one as the same number of steps and as the same number of epochs, and their
    scores there, of the same search, are compared: without any influence of the warmup either is as often the better one,
    and `compare` shuffles scores to tell how far ahead one may get by chance.

    It holds if constant steps lead by more than chance gives (95 %) and are not behind steps that grow with the batch; it
    does not if constant epochs lead so, or growing steps; else, or if an arm contradicts the others as clearly, it cannot
    be told.

    Args:
      arms: of a summary.
      metric: what the study is judged by.

    Returns:
      The claim; None if no cell tried several warmups, or if all that did chose by the steps to a target.
    """
    if not any(
        is_searched(point) for arm in arms for point in arm["points"] if point["target"] is None
    ):
        return None
    cells = {arm["arm"]: found for arm in arms if (found := warmups(arm, metric.name))}
    if not cells:
        return said(_WARMUP, UNKNOWN, _CLAIMED, _DRAWN)
    contests, against_growing = ([compare(one, exponent, place) for place, one in enumerate(cells.values())] for exponent in (EPOCHS, GROWING))  # fmt: skip
    pooled, growing = total(contests), total(against_growing)
    slopes = _slopes(cells)
    if not pooled.told[0] and growing.sign >= 0:
        return said(_WARMUP, UNKNOWN, _CLAIMED, f"{_NOWHERE}; {slopes}")
    if growing.sign < 0:
        return said(
            _WARMUP, NOT_HELD, _CLAIMED, f"{_CARRIED}{_counts(growing, _IN_PROPORTION)}; {slopes}"
        )
    numbers = f"{_CARRIED}{_counts(pooled, 'as the same number of epochs')}; {slopes}"
    against = [
        quoted(name)
        for name, one in zip(cells, contests, strict=True)
        if one.sign * pooled.sign < 0
    ]
    if against:
        return said(
            _WARMUP,
            UNKNOWN,
            _CLAIMED,
            f"{numbers}; but {' and '.join(against)} alone says the opposite",
        )
    if growing.lead < 0 < pooled.sign:
        return said(
            _WARMUP, UNKNOWN, _CLAIMED, f"{numbers}; but it also {_counts(growing, _IN_PROPORTION)}"
        )
    return said(_WARMUP, {1: HELD, 0: UNKNOWN, -1: NOT_HELD}[pooled.sign], _CLAIMED, numbers)


def _counts(contest: Contest, other: str) -> str:
    low, high = contest.by_chance
    better, worse, told = (int(column[0]) for column in contest)
    return (
        f"scored better as the same number of steps than {other} in {better} "
        f"of {told} cases and worse in {worse}, a lead of {contest.lead} where scores shuffled over the warmups give {low} to {high} (95 %)"
    )


def _slopes(cells: dict[str, list[Warmups]]) -> str:
    """Say how the chosen warmup steps of every arm go with the batch size."""
    found = []
    for name, one in cells.items():
        pairs = [(cell.global_batch_size, cell.steps[cell.chosen]) for cell in one]
        slope = pooled_slope([[pair for pair in pairs if pair[1] > 0]])
        found += [] if slope is None else [f"batch^{slope + 0.0:.2f} for {quoted(name)}"]
    return f"the chosen warmup steps go like {', '.join(found) or 'nothing, none being above 0'} (0 is constant steps, -1 constant epochs)"


def pooled_slope(groups: Sequence[Pairs]) -> float | None:
    """Return the least-squares slope of log2 y against log2 x, an intercept for each group; None without spread in x.

    Args:
      groups: the (x, y) of each, all > 0; a group may be empty.

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
