"""Optimizer steps and examples to a target score, as a function of the batch size.

Shallue et al., Measuring the Effects of Data Parallelism on Neural Network Training,
arXiv:1811.03600v2, find three regimes as the batch grows. In *perfect scaling* twice the batch
needs half the steps, so the examples stay the same. Then come *diminishing returns*, and at last
*maximal data parallelism*, where a larger batch saves no steps.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from lbopt.errors import require
from lbopt.report.study._limit import CannotTell, CellScores, Limit, LimitEstimate, estimate_limit

EXCESS = 0.25
"""Share of additional examples up to which scaling counts as perfect."""


@dataclasses.dataclass(frozen=True)
class CellSteps:
    """Steps to the target of one arm at one batch size.

    Attributes:
      global_batch_size: Examples per optimizer step.
      steps: Steps to the target of each seed [seeds]; infinite where it was not reached.
      num_steps: Length of the runs in steps.
    """

    global_batch_size: int
    steps: np.ndarray
    num_steps: int


@dataclasses.dataclass(frozen=True)
class StepsToTarget:
    """Median over seeds of the steps to the target, with a bootstrap interval.

    Attributes:
      global_batch_size: Examples per optimizer step.
      steps: The median; infinite if it was not reached by the median seed.
      low: Lower end of the median's confidence interval.
      high: Upper end of the median's confidence interval; infinite like `steps`.
      num_reached: Number of seeds that reached the target.
      num_seeds: Number of seeds.
    """

    global_batch_size: int
    steps: float
    low: float
    high: float
    num_reached: int
    num_seeds: int

    @property
    def examples(self) -> float:
        """Median number of training examples to the target."""
        return self.steps * self.global_batch_size


@dataclasses.dataclass(frozen=True)
class Saving:
    """Exponent a in steps ~ batch size^-a between two neighbouring batch sizes.

    It is 1 in perfect scaling, 0 in maximal data parallelism, and between them where returns
    diminish.

    Attributes:
      from_batch_size: The smaller of the two.
      to_batch_size: The larger of the two.
      exponent: The exponent of the median steps; NaN if either is infinite.
      low: Lower end of the exponent's confidence interval; NaN if a resampled median is infinite.
      high: Upper end of the exponent's confidence interval; NaN with the lower one.
    """

    from_batch_size: int
    to_batch_size: int
    exponent: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Scaling:
    """How the steps to the target depend on the batch size.

    Attributes:
      points: Steps to the target at each batch size.
      savings: Exponents between neighbouring batch sizes; () where the batch grows within a run.
      perfect_until: Largest batch whose runs need at most `EXCESS` more examples than those of
        small batches. A run that missed the target counts with its whole length, which is less
        than it would have needed; a batch whose median run missed it is never within. None where
        the batch grows.
    """

    points: tuple[StepsToTarget, ...]
    savings: tuple[Saving, ...]
    perfect_until: LimitEstimate | None


def measure_scaling(
    cells: Sequence[CellSteps],
    *,
    excess: float = EXCESS,
    confidence: float = 0.95,
    num_resamples: int = 2000,
    seed: int | Sequence[int] = 0,
) -> Scaling:
    """Measure how the steps to a target fall as the batch grows, with a bootstrap over seeds.

    Args:
      cells: Steps to the target at each batch size, ascending in batch size.
      excess: Share of additional examples up to which scaling counts as perfect.
      confidence: Level of the intervals, in (0, 1).
      num_resamples: Number of bootstrap resamples.
      seed: Seed for resampling the runs.

    Raises:
      UserError: Naming the argument, if cells are missing or out of order.

    >>> cells = [CellSteps(b, np.array([99, 100, 101]) * s, 10**4) for b, s in
    ...          ((16, 8), (32, 4), (64, 2), (128, 1), (256, 1))]
    >>> scaling = measure_scaling(cells)
    >>> [round(saving.exponent, 2) for saving in scaling.savings]
    [1.0, 1.0, 1.0, 0.0]
    >>> round(scaling.perfect_until.global_batch_size)  # 1.25 times the examples
    160
    """
    require(cells, "cells", cells, "give the steps at one batch size at least", code="missing")
    generator = np.random.Generator(np.random.Philox(seed))
    resampled = [resample_medians(cell.steps, generator, num_resamples) for cell in cells]

    ends = np.array([(1 - confidence) / 2, (1 + confidence) / 2])
    points = tuple(
        _point(cell, medians, ends) for cell, medians in zip(cells, resampled, strict=True)
    )
    savings = tuple(
        _saving(first, second, ends)
        for first, second in itertools.pairwise(zip(points, resampled, strict=True))
    )

    # The end of perfect scaling is the limit of the examples, on a logarithmic scale.
    examples = [
        CellScores(
            cell.global_batch_size,
            np.log(cell.global_batch_size * np.minimum(cell.steps, cell.num_steps)),
        )
        for cell in cells
    ]
    perfect_until = estimate_limit(
        examples,
        math.log1p(excess),
        higher_is_better=False,
        confidence=confidence,
        num_resamples=num_resamples,
        seed=seed,
    )
    # A whole length that was not enough is no number of examples to the target.
    missed = next((point.global_batch_size for point in points if math.isinf(point.steps)), None)
    if missed is not None and not _ends_before(perfect_until, missed):
        perfect_until = CannotTell("target_missed")
    return Scaling(points, savings, perfect_until)


def _ends_before(perfect_until: LimitEstimate, missed: int) -> bool:
    """Return whether scaling stops being perfect below a batch size, whatever holds there."""
    if isinstance(perfect_until, Limit) and perfect_until.global_batch_size < missed:
        return True
    fit = perfect_until.fit
    return fit is not None and fit.first_past is not None and fit.first_past < missed


def resample_medians(
    steps: np.ndarray, generator: np.random.Generator, num_resamples: int
) -> np.ndarray:
    """Return the medians [num_resamples] of resampled seeds; infinite where one was missed."""
    drawn = generator.integers(len(steps), size=(num_resamples, len(steps)))
    return np.median(np.asarray(steps)[drawn], axis=1)


def _point(cell: CellSteps, medians: np.ndarray, ends: np.ndarray) -> StepsToTarget:
    low, high = np.quantile(medians, ends, method="inverted_cdf")
    reached = int(np.isfinite(cell.steps).sum())
    median = float(np.median(cell.steps))
    return StepsToTarget(
        cell.global_batch_size, median, float(low), float(high), reached, len(cell.steps)
    )


def _saving(
    first: tuple[StepsToTarget, np.ndarray],
    second: tuple[StepsToTarget, np.ndarray],
    ends: np.ndarray,
) -> Saving:
    """Return the exponent between two batch sizes, each given with its resampled medians."""
    small, small_medians = first
    large, large_medians = second
    log_factor = math.log(large.global_batch_size / small.global_batch_size)

    def exponent(steps: np.ndarray, next_steps: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            drop = np.log(steps) - np.log(next_steps)
        return np.where(np.isfinite(drop), drop, np.nan) / log_factor

    median = exponent(np.asarray(small.steps), np.asarray(large.steps))
    low, high = np.quantile(exponent(small_medians, large_medians), ends)
    return Saving(
        small.global_batch_size, large.global_batch_size, float(median), float(low), float(high)
    )
