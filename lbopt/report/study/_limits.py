"""How far an arm goes, and what fails beyond: optimisation or generalisation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from lbopt.report.study._metric import ACCURACY, Metric
from lbopt.report.study._model import Arm, Cell, Failure, Limit
from lbopt.report.study._words import quoted

OPTIMISE, GENERALISE = "optimise", "generalise"
_MOST = 0.5
_ROUNDING = 1e-9
_SLACK = 1e-11
"""A mean that is off by rounding alone is not past the limit."""


def limit_of(
    cells: Sequence[Cell], sizes: Sequence[int], limit_points: float, metric: Metric, index: int
) -> tuple[Limit, Failure | None] | None:
    """Return the limit of an arm and what fails past it.

    Args:
      cells: tested cells of the arm, ascending in batch size.
      sizes: batch sizes of the study.
      limit_points: tolerance, in the metric's unit.
      metric: the measure.
      index: place of the arm, so that the resamples of two arms are independent.

    Returns:
      None where a seed diverged or none learned at the smallest batch, or that batch has no result.
    """
    if not cells or cells[0].diverged or cells[0].learned is False:
        return None  # the mean of the other seeds would be that of those which went well
    # Up to the first gap only: the limit of an unfinished study starts at its smallest batch or not
    # at all.
    pairs = zip(cells, sizes, strict=False)
    row = [cell for cell, _ in itertools.takewhile(lambda p: p[0].global_batch_size == p[1], pairs)]
    means = [(cell.global_batch_size, metric.centre(cell.scores)) for cell in row]
    found = find_limit(means, limit_points, metric)
    if found is None:
        return None

    draws = _draws(row, limit_points, metric, index)
    limit = Limit(found, found == sizes[-1], quantiles(draws), draws)
    past = next((cell for cell in row if cell.global_batch_size > found), None)
    return limit, None if past is None else failure(row[0], past, metric)


def find_limit(
    points: Sequence[tuple[int, float]], limit_points: float, metric: Metric = ACCURACY
) -> int | None:
    """Return the largest batch size up to which the score stays near the smallest batch's.

    Args:
      points: (batch size, accuracy in [0, 1] or perplexity), ascending in batch size.
      limit_points: percentage points of accuracy, percent of a perplexity.
      metric: the measure.

    Returns:
      The batch size; None if there are no points or the first is not finite.

    >>> find_limit([(16, 0.98), (64, 0.975), (256, 0.95), (1024, 0.98)], limit_points=1.0)
    64
    """
    limit = None
    for size, score in points:
        if not metric.worse_by(points[0][1], score) <= limit_points + _ROUNDING:
            break
        limit = size
    return limit


def _draws(row: Sequence[Cell], limit_points: float, metric: Metric, index: int) -> np.ndarray:
    """Return the limit in every bootstrap resample of the seeds."""
    if metric is ACCURACY:
        measured = [(cell.global_batch_size, cell.scores) for cell in row]
        return resample_limits(measured, limit_points / 100, seed=(0, index))
    losses = [(cell.global_batch_size, metric.on_scale(cell.scores)) for cell in row]
    tolerance = math.log1p(limit_points / 100)
    return resample_limits(losses, tolerance, higher_is_better=False, seed=(0, index))


def quantiles(draws: np.ndarray, confidence: float = 0.95) -> tuple[int, int]:
    """Return the two resampled values between which the middle `confidence` of them lies.

    >>> quantiles(np.array([16, 64, 64, 64, 256]), confidence=0.5)
    (64, 64)
    """
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    low, high = np.quantile(draws, tails, method="inverted_cdf")
    return int(low), int(high)


def resample_limits(
    values_by_batch: Sequence[tuple[int, Sequence[float]]],
    tolerance: float,
    higher_is_better: bool = True,
    num_resamples: int = 2000,
    seed: int | Sequence[int] = 0,
) -> np.ndarray:
    """Return the limit of every bootstrap resample of the seeds.

    Args:
      values_by_batch: (batch size, one value for each seed), ascending, without gaps in the study.
        A run that diverged has the worst value there is: accuracy 0, loss infinity.
      tolerance: how far the mean may fall behind the smallest batch's, in the unit of the values:
        limit_points / 100 for accuracies in [0, 1], log(1 + p / 100) of losses for p percent of
        perplexity.
      higher_is_better: whether the values are accuracies, not losses.
      num_resamples: number of resamples.
      seed: seed of the resamples (Philox: the same on every machine); two arms need two, as theirs
        are other runs.

    Returns:
      [num_resamples] int, batch sizes, by the rule of `lbopt.report.study._limits.find_limit`.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    means = np.empty((num_resamples, len(values_by_batch)))
    for index, (_, values) in enumerate(values_by_batch):
        chosen = rng.integers(len(values), size=(num_resamples, len(values)))
        means[:, index] = np.asarray(values, float)[chosen].mean(1)

    with np.errstate(invalid="ignore"):  # infinity less infinity is behind
        behind = (means[:, :1] - means) * (1 if higher_is_better else -1)
    holds = behind <= tolerance + _SLACK
    holds[:, 0] = True
    last = np.logical_and.accumulate(holds, axis=1).sum(1) - 1
    return np.asarray([size for size, _ in values_by_batch])[last]


# ---- failures


def failure(first: Cell, past: Cell, metric: Metric) -> Failure:
    """Tell a failure to optimise from one to generalise, at the first batch size past the limit.

    Where more than half of what the test lost is lost in training too, the model was not optimised;
    otherwise it was, and did not generalise. Losses are those of the mean accuracy in percentage
    points, or of the mean loss of a language model.

    Args:
      first: cell at the smallest batch size.
      past: cell at the first batch size past the limit.
      metric: the measure.
    """
    test, train = (_lost(first, past, split, metric) for split in ("test", "train"))
    share = train / test if test is not None and train is not None and test > 0 else None
    kind = _kind(past, train, share)
    return Failure(past.global_batch_size, kind, past.diverged, past.seeds, test, train, share)


def _kind(past: Cell, train: float | None, share: float | None) -> str | None:
    """Return what failed; without training means, divergence alone tells it."""
    if train is None:
        return OPTIMISE if past.diverged else None
    if share is None:  # the test lost nothing by its mean
        return OPTIMISE if train > 0 else GENERALISE
    return OPTIMISE if share > _MOST else GENERALISE


def _lost(first: Cell, past: Cell, split: str, metric: Metric) -> float | None:
    name = "accuracy" if metric is ACCURACY else "loss"
    before, after = first.means.of(split, name), past.means.of(split, name)
    if before is None or after is None:
        return None
    return 100 * (before - after) if metric is ACCURACY else after - before


def why_no_limit(arm: Arm) -> str:
    """Return why an arm with a tested smallest batch has no limit, as a clause."""
    first = arm.cells[0]
    if not first.diverged and first.learned is False:
        return f"it did not learn at the smallest batch, {first.global_batch_size}"
    if not first.diverged:
        return f"its score at the smallest batch, {first.global_batch_size}, is not finite"
    return f"it diverged{of_seeds(first)} at the smallest batch, {first.global_batch_size}"


def of_seeds(counted: Cell | Failure) -> str:
    """Return in how many of the seeds training diverged, as a clause; "" if in all."""
    if counted.diverged == counted.seeds:
        return ""
    return f" with {counted.diverged} of {counted.seeds} seeds"


def without_limit(arms: Sequence[Arm]) -> list[str]:
    """Return a clause for each arm without a limit, with the reason."""
    return [
        f"{quoted(arm.name)} has no limit: {why_no_limit(arm)}" for arm in arms if not arm.limit
    ]
