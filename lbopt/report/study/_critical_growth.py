"""How the critical batch grows with the examples: its fit at easier targets of the same runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from lbopt.report.study._critical_batch import (
    CriticalBatch,
    Ends,
    fit_medians,
    percentile_ends,
    resample_critical_batches,
    with_intervals,
)
from lbopt.report.study._steps_to_target import CellSteps, resample_medians

SHARES = (0.125, 0.25, 0.5, 1.0)
"""Shares of the examples that the smallest batch takes to the target, one for each milestone."""
_FEWEST = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluated:
    """Scores of the runs of one arm at one batch size as they were trained.

    Attributes:
      global_batch_size: Examples per optimizer step.
      runs: Steps and scores [evaluations] of each seed, ascending in the step; a score may be NaN.
        Both are empty for a seed that diverged before its first evaluation.
    """

    global_batch_size: int
    runs: tuple[tuple[np.ndarray, np.ndarray], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Milestone:
    """A target and the critical batch for it.

    Attributes:
      share: The one of `SHARES` after which the smallest batch has about this score.
      value: Score to reach.
      examples: Median examples that the smallest batch takes to it.
      critical_batch: The fit of the steps that the batch sizes take to it.
    """

    share: float
    value: float
    examples: float
    critical_batch: CriticalBatch


@dataclasses.dataclass(frozen=True, slots=True)
class CriticalGrowth:
    """B_crit ~ examples^exponent over the milestones of an arm.

    Attributes:
      milestones: Targets, the easiest first, at least three; the last is the study's.
      exponent: Slope of log B_crit over the log of the examples, by least squares.
      interval: Of the exponent, at 95 %, from -inf to inf where the resamples do not tell it.
    """

    milestones: tuple[Milestone, ...]
    exponent: float
    interval: Ends


def measure_growth(
    cells: Sequence[Evaluated],
    target: float,
    *,
    lower_is_better: bool,
    num_resamples: int = 2000,
    seed: int | Sequence[int] = 0,
) -> CriticalGrowth | None:
    """Fit the critical batch at easier targets, which the same runs reached on their way.

    An easier target is the median score of the smallest batch after 1/8, 1/4 or 1/2 of the examples
    that it takes to the target. The steps to each are interpolated linearly between evaluations. A
    target that some run had reached at its first evaluation is left out. Only batch sizes whose
    median run reached the last target count, so all fits have the same ones. Seeds are drawn within
    each batch size for the interval, the same ones for all targets.

    Args:
      cells: Scores of one arm at each batch size, ascending in batch size.
      target: Score to reach.
      lower_is_better: Whether the score is a loss.
      num_resamples: Number of bootstrap resamples.
      seed: Seed for resampling the runs.

    Returns:
      The growth; None with fewer than two seeds or three targets with a critical batch.

    References:
      Zhang et al., How Does Critical Batch Size Scale in Pre-training?, arXiv 2410.21676: a
      constant rate and averaged weights let a run count for every number of tokens.
    """
    sign = 1.0 if lower_is_better else -1.0
    kept = [cell for cell in cells if math.isfinite(np.median(_crossings(cell, target, sign)))]
    if not kept or min(len(cell.runs) for cell in kept) < 2:
        return None
    smallest = kept[0]
    whole = float(np.median(_crossings(smallest, target, sign)))

    found: list[Milestone] = []
    drawn: list[np.ndarray] = []
    for share in SHARES:
        value = target if share == 1 else _score_after(smallest, share * whole, sign)
        if not _is_told(kept, value, sign):
            continue
        steps = [_steps_to(cell, value, sign) for cell in kept]
        fit = fit_medians(steps)
        if fit is None:
            continue
        examples = float(np.median(steps[0].steps)) * smallest.global_batch_size
        resampled = resample_critical_batches(steps, num_resamples=num_resamples, seed=seed)
        found.append(Milestone(share, value, examples, with_intervals(fit, resampled, steps)))
        # The resamples begin with the smallest batch.
        first = np.random.Generator(np.random.Philox(seed))
        resampled_steps = resample_medians(steps[0].steps, first, num_resamples)
        sizes = np.where(resampled.unknown, np.nan, resampled.critical_batch_size)
        drawn.append(np.stack([resampled_steps, sizes]))

    if len(found) < _FEWEST or found[-1].value != target:
        return None
    estimate = np.array([[one.examples for one in found], [_size(one) for one in found]])
    exponent = float(_slope(*estimate))
    slopes = _slope(*np.stack(drawn, axis=-1))
    ends = percentile_ends(slopes, np.isnan(slopes), exponent, -np.inf)
    return CriticalGrowth(tuple(found), exponent, ends)


def _size(one: Milestone) -> float:
    return one.critical_batch.critical_batch_size


def _slope(examples: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the slopes [...] of log sizes over log examples [..., milestones].

    NaN where one is 0 or not finite, or all examples are the same.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(sizes)
        over = np.log(examples)
        centred = over - over.mean(-1, keepdims=True)
        slopes = (logs * centred).sum(-1) / (centred**2).sum(-1)
    return np.where(np.isfinite(slopes), slopes, np.nan)


def _is_told(cells: Sequence[Evaluated], value: float, sign: float) -> bool:
    """Return whether no run had reached a score at its first evaluation already."""
    firsts = [sign * scores[0] for cell in cells for _, scores in cell.runs if len(scores)]
    return math.isfinite(value) and not any(first <= sign * value for first in firsts)


def _steps_to(cell: Evaluated, value: float, sign: float) -> CellSteps:
    last = max((int(steps[-1]) for steps, _ in cell.runs if len(steps)), default=0)
    return CellSteps(cell.global_batch_size, _crossings(cell, value, sign), last)


def _crossings(cell: Evaluated, value: float, sign: float) -> np.ndarray:
    """Return the steps [seeds] after which each run reaches a score; infinite where none does."""
    return np.array([_crossing(steps, scores, value, sign) for steps, scores in cell.runs])


def _crossing(steps: np.ndarray, scores: np.ndarray, value: float, sign: float) -> float:
    reached = np.flatnonzero(sign * scores <= sign * value)
    if not len(reached):
        return math.inf
    place = int(reached[0])
    if place == 0 or not math.isfinite(scores[place - 1]):
        return float(steps[place])
    share = (scores[place - 1] - value) / (scores[place - 1] - scores[place])
    return float(steps[place - 1] + share * (steps[place] - steps[place - 1]))


def _score_after(cell: Evaluated, step: float, sign: float) -> float:
    """Return the median score of the runs after so many steps; NaN before the first evaluation.

    A run without an evaluation has the worst score.
    """
    scores = [
        np.interp(step, steps, scores, left=np.nan) if len(steps) else sign * np.inf
        for steps, scores in cell.runs
    ]
    return float(np.median(scores))
