"""The critical batch of a target: its fit to steps over batch size, with bootstrap intervals."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lbopt.report.study._steps_to_target import CellSteps, resample_medians

OVERHEAD = 0.2
"""Share of additional examples at the overhead point; Zhang et al., arXiv 2410.21676."""
_FAR = 1000.0
FEWEST_SIZES = 3
_BISECTIONS = 50
_ENDS = (0.025, 0.975)
_ONE_SIGMA = (0.159, 0.841)
_SURE = 0.95
_STUDIES = 200
_RESAMPLES = 100

Ends = tuple[float, float]
"""Lower and upper end of a 95 % interval; the upper one may be infinite."""


@dataclasses.dataclass(frozen=True, slots=True)
class CriticalIntervals:
    """Percentile intervals of a critical batch over resampled seeds, at 95 %.

    Attributes:
      min_steps: Interval of S_min.
      critical_batch_size: Interval of B_crit, from 0 (a larger batch saves no steps) to infinity
        (it always does).
      overhead_batch_size: Interval of the overhead point.
    """

    min_steps: Ends
    critical_batch_size: Ends
    overhead_batch_size: Ends


@dataclasses.dataclass(frozen=True, slots=True)
class CriticalBatch:
    """S = min_steps (1 + critical_batch_size / B), for S steps to the target at batch B.

    Attributes:
      min_steps: Steps that no batch, however large, gets below.
      min_examples: Examples that no batch, however small, gets below; min_steps *
        critical_batch_size.
      critical_batch_size: Batch size that needs twice `min_steps` and twice `min_examples`.
      r2: R^2 of log S.
      overhead_batch_size: Batch size that needs 20 % more examples than the smallest, by the fit.
      intervals: Intervals over the seeds; None where a batch size has fewer than two.
    """

    min_steps: float
    min_examples: float
    critical_batch_size: float
    r2: float
    overhead_batch_size: float
    intervals: CriticalIntervals | None = None


def fit_critical_batch(batch_sizes: Sequence[int], steps: Sequence[float]) -> CriticalBatch | None:
    """Fit steps to a target against the batch size.

        (S / S_min - 1) (E / E_min - 1) = 1,  E = B S,  so  S = S_min (1 + B_crit / B),  B_crit =
        E_min / S_min,

    by least squares on log S, so that every batch has the same weight.

    Args:
      batch_sizes: B, in examples; several runs at one batch are several points.
      steps: S, positive, for runs that reached the target.

    Returns:
      The fit, without intervals; None for fewer than 3 batch sizes, or if B_crit is beyond all of
      them by a factor of 1000: perfect scaling throughout, or none at all.

    >>> fit = fit_critical_batch([10, 100, 1000], [1100, 200, 110])
    >>> round(fit.min_steps), round(fit.critical_batch_size), round(fit.r2, 6)
    (100, 100, 1.0)

    References:
      McCandlish et al., An Empirical Model of Large-Batch Training, arXiv 1812.06162v1,
      equations 2.11 and 2.12; restated by Kaplan et al., Scaling Laws for Neural Language Models,
      arXiv 2001.08361v1, equations 5.1 and 5.2.
    """
    sizes = np.asarray(batch_sizes, float)
    log_steps = np.log(np.asarray(steps, float))
    if len(set(sizes)) < FEWEST_SIZES or np.ptp(log_steps) == 0:
        return None
    found = _fit(sizes, log_steps[None], np.ones((1, len(sizes)), bool))
    least = float(found[0][0])
    critical = float(found[1][0])
    if not 0 < critical < math.inf:
        return None

    left = log_steps - np.log(least) - np.log1p(critical / sizes)
    r2 = float(1 - np.var(left) / np.var(log_steps))
    return CriticalBatch(
        least, least * critical, critical, r2, overhead_batch(float(sizes.min()), critical)
    )


def overhead_batch(smallest: float, critical_batch_size: float) -> float:
    """Return the batch size that needs 20 % more examples than a small one.

    By the fit, batch B needs B S = S_min (B + B_crit) examples, so

        B + B_crit = 1.2 (b + B_crit),  B = 1.2 b + 0.2 B_crit.

    Args:
      smallest: b, the batch size from which scaling would be ideal, in examples.
      critical_batch_size: B_crit, in examples.

    >>> overhead_batch(10, 100)
    32.0

    References:
      Zhang et al., How Does Critical Batch Size Scale in Pre-training?, arXiv 2410.21676; in
      hlzhang109/critical-batch-size@c5b509d, plots/chinchilla.ipynb, with b = 256.
    """
    return (1 + OVERHEAD) * smallest + OVERHEAD * critical_batch_size


def measure_critical_batch(
    cells: Sequence[CellSteps], *, num_resamples: int = 2000, seed: int | Sequence[int] = 0
) -> CriticalBatch | None:
    """Fit the median steps to a target against the batch size, with a bootstrap over seeds.

    Seeds are drawn within each batch size, and each resample is fitted like the medians. Resamples
    in which fewer than three batch sizes reach the target widen the intervals at both ends.

    Args:
      cells: Steps to the target at each batch size.
      num_resamples: Number of bootstrap resamples.
      seed: Seed for resampling the runs.

    Returns:
      The fit over the batch sizes whose median seed reached the target; None as by
      `fit_critical_batch`.

    >>> cells = [CellSteps(b, np.array([0.9, 1, 1.1]) * 100 * (1 + 100 / b), 10**6)
    ...          for b in (10, 100, 1000)]
    >>> low, high = measure_critical_batch(cells).intervals.critical_batch_size
    >>> low < 100 < high
    True
    """
    fit = fit_medians(cells)
    if fit is None or min(len(cell.steps) for cell in cells) < 2:
        return fit
    drawn = resample_critical_batches(cells, num_resamples=num_resamples, seed=seed)
    return with_intervals(fit, drawn, cells)


def fit_medians(cells: Sequence[CellSteps]) -> CriticalBatch | None:
    """Return the fit over the batch sizes whose median seed reached the target."""
    pairs = _of_medians(cells)
    return fit_critical_batch([size for size, _ in pairs], [steps for _, steps in pairs])


def _of_medians(cells: Sequence[CellSteps]) -> list[tuple[int, float]]:
    medians = [(cell.global_batch_size, float(np.median(cell.steps))) for cell in cells]
    return [(size, median) for size, median in medians if math.isfinite(median)]


def with_intervals(
    fit: CriticalBatch, drawn: CriticalResamples, cells: Sequence[CellSteps]
) -> CriticalBatch:
    """Return a fit with the intervals that resamples of its cells give."""
    smallest = min(size for size, _ in _of_medians(cells))
    low, high = percentile_ends(drawn.critical_batch_size, drawn.unknown, fit.critical_batch_size)
    overheads = overhead_batch(smallest, low), overhead_batch(smallest, high)
    least_ends = percentile_ends(drawn.min_steps, drawn.unknown, fit.min_steps)
    return dataclasses.replace(fit, intervals=CriticalIntervals(least_ends, (low, high), overheads))


class CriticalResamples(NamedTuple):
    """Fits of resampled seeds, each array [resamples].

    Attributes:
      min_steps: S_min.
      critical_batch_size: B_crit, 0 if a larger batch saves no steps and infinite if it always
        does.
      unknown: Whether fewer than three batch sizes reach the target, so that the two say nothing.
    """

    min_steps: np.ndarray
    critical_batch_size: np.ndarray
    unknown: np.ndarray


def resample_critical_batches(
    cells: Sequence[CellSteps], *, num_resamples: int = 2000, seed: int | Sequence[int] = 0
) -> CriticalResamples:
    """Fit the median steps of resampled seeds, which are drawn within each batch size.

    Args:
      cells: Steps to the target at each batch size.
      num_resamples: Number of bootstrap resamples.
      seed: Seed for resampling the runs.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    drawn = np.stack([resample_medians(cell.steps, generator, num_resamples) for cell in cells], 1)
    reached = np.isfinite(drawn)
    log_steps = np.log(np.where(reached, drawn, 1.0))
    sizes = np.array([cell.global_batch_size for cell in cells], float)
    return CriticalResamples(*_fit(sizes, log_steps, reached), reached.sum(1) < FEWEST_SIZES)


def detectable_ratio(
    batch_sizes: Sequence[int], num_seeds: int, deviation: float, power: float
) -> float:
    """Return the ratio of two critical batches that their bootstrap tells apart.

    Studies are simulated, and resamples of their seeds. Their fits are taken as normal on the
    logarithm; the ratio is told apart where it is above 1 in 95 % of the resamples.

    Args:
      batch_sizes: B, three or more; both critical batches lie in their geometric middle.
      num_seeds: Runs at each of them.
      deviation: Standard deviation of log S between seeds.
      power: Share of studies in which the ratio is told apart.

    Returns:
      The ratio; infinite if seeds vary so much that none is told apart.

    >>> round(detectable_ratio((64, 256, 1024, 4096), 5, 0.1, 0.8), 1)
    1.4
    """
    sizes = np.asarray(batch_sizes, float)
    log_steps = np.log1p(math.sqrt(sizes[0] * sizes[-1]) / sizes)
    generator = np.random.Generator(np.random.Philox(0))
    noise = deviation * generator.normal(size=(_STUDIES, 1, len(sizes), num_seeds))
    drawn = generator.integers(num_seeds, size=(_STUDIES, _RESAMPLES, len(sizes), num_seeds))
    resampled = np.take_along_axis(noise, drawn, axis=-1)

    between = _spread_of_fits(sizes, log_steps + np.median(noise, axis=-1))
    of_resamples = _spread_of_fits(sizes, log_steps + np.median(resampled, axis=-1), axis=1)
    quantile = statistics.NormalDist().inv_cdf
    needed = quantile(_SURE) * float(np.mean(of_resamples)) + quantile(power) * float(between)
    return math.exp(math.sqrt(2) * needed) if math.isfinite(needed) else math.inf


def _spread_of_fits(sizes: np.ndarray, log_steps: np.ndarray, axis: int | None = None) -> Any:
    """Return half the range of the middle 68 % of log B_crit, for log S [..., sizes]."""
    flat = log_steps.reshape(-1, len(sizes))
    _, found = _fit(sizes, flat, np.ones(flat.shape, bool))
    with np.errstate(divide="ignore"):
        logs = np.log(found).reshape(log_steps.shape[:-1])
    low, high = np.quantile(logs, _ONE_SIGMA, axis=axis, method="inverted_cdf")
    with np.errstate(invalid="ignore"):
        return (high - low) / 2


def percentile_ends(
    values: np.ndarray, unknown: np.ndarray, estimate: float, least: float = 0.0
) -> Ends:
    """Return the ends of the percentile interval, widened to contain the estimate.

    An unknown value may be anything from `least` to infinity.
    """
    low, high = (
        float(np.quantile(np.where(unknown, worst, values), level, method="inverted_cdf"))
        for worst, level in zip((least, np.inf), _ENDS, strict=True)
    )
    return min(low, estimate), max(high, estimate)


def _fit(
    sizes: np.ndarray, log_steps: np.ndarray, reached: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Fit many sets of steps at once, each by least squares on log S.

    The best log S_min for a given B_crit is the mean of log S - log(1 + B_crit / B), so that B_crit
    alone is searched: the one with the least variance of that difference.

    Args:
      sizes: Batch sizes [points].
      log_steps: log S [sets, points], finite.
      reached: Whether a point counts [sets, points].

    Returns:
      S_min and B_crit [sets]. If the best B_crit is a factor of 1000 beyond all batch sizes, it is
      0 or infinite, and S_min the geometric mean of the steps or 0.
    """
    weights = reached / np.maximum(1, reached.sum(1, keepdims=True))
    centred = log_steps - (weights * log_steps).sum(1, keepdims=True)

    # The search starts at the best point of a grid, as the error is flat far from all batch sizes.
    grid = np.linspace(np.log(sizes.min() / _FAR), np.log(sizes.max() * _FAR), 201)
    excess = np.log1p(np.exp(grid[:, None]) / sizes)
    variance = weights @ (excess**2).T - (weights @ excess.T) ** 2
    best = np.argmin(variance - 2 * (weights * centred) @ excess.T, axis=1)

    # The slope of the variance changes its sign beside the best point.
    low = grid[np.maximum(best - 1, 0)]
    high = grid[np.minimum(best + 1, len(grid) - 1)]
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        ratio = np.exp(middle)[:, None] / sizes
        change = ratio / (1 + ratio)
        left = centred - np.log1p(ratio)
        mean = (weights * left).sum(1, keepdims=True)
        rises = (weights * (left - mean) * change).sum(1) < 0
        high = np.where(rises, middle, high)
        low = np.where(rises, low, middle)

    critical = np.exp((low + high) / 2)
    critical = np.where(best == 0, 0.0, np.where(best == len(grid) - 1, np.inf, critical))
    left = np.where(reached, log_steps - np.log1p(critical[:, None] / sizes), 0.0)
    least = np.exp(left.sum(1) / np.maximum(1, reached.sum(1)))
    return least, critical
