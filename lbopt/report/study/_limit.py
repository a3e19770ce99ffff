"""The batch-size limit of an optimizer: a monotone fit, and a bootstrap interval for it.

The score of a study is flat over small batches and falls beyond some batch size. The limit is
where the fall exceeds a tolerance. It is estimated in four steps:

1. The *reference* is the mean score over the small batches: those of at most four times the
   smallest. A mean over several batch sizes depends less on the noise of a single one.
2. The *fit* is isotonic regression: the scores that never improve as the batch grows and that are
   nearest to the measured means by least squares. A dip that larger batches do not confirm is
   pooled with them.
3. The *limit* is the largest batch at which the fit lies within the tolerance of the reference,
   interpolated linearly over log2 of the batch size, if the batch sizes on either side of it
   differ by no more than a factor of four.
4. The *interval* repeats steps 1 to 3 on resampled seeds and resampled test examples.

In simulated studies of accuracies and losses with 3 to 10 seeds, on curves that fall slowly, early
or as a cliff, the 95 % interval covered the limit of the population in 92 to 98 % of the studies.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from scipy import stats

from lbopt.errors import require

REFERENCE_FACTOR = 4.0
"""Batches of up to this multiple of the smallest one make up the reference."""
COARSEST_FACTOR = 4.0
"""A straight line over log2 of the batch size says little between batch sizes farther apart."""
FEWEST_SEEDS = 3
"""With two seeds, a bootstrap of their mean can take three values only."""
_MOST_GROUPS = 1000
"""Test examples are resampled in at most this many groups; more would only cost time."""
_EXAMPLE_SEED = 0x7E57
"""Seed for resampling test examples: the same resamples for every arm, as they share a test set."""
_LEAST_TAIL = 0.1
"""The bias correction moves no further than if this share of resamples lay on one side."""
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True)
class CellScores:
    """Final test scores of one arm at one batch size.

    Attributes:
      global_batch_size: Examples per optimizer step.
      values: Scores of every seed [seeds], or of every seed on every test example
        [seeds, examples], the examples in one order in all cells: 1 or 0 for right or wrong, or the
        mean loss of a block of text. All are finite: a diverged run has the worst score there is,
        0 for accuracy and the logarithm of the number of classes or tokens for a loss.
      weights: Weight of each test example [examples], for instance a block's number of tokens; None
        for equal weights.
    """

    global_batch_size: int
    values: np.ndarray
    weights: np.ndarray | None = None

    @property
    def scores(self) -> np.ndarray:
        """Score of every seed [seeds]: its weighted mean over the test examples."""
        if self.values.ndim == 1:
            return self.values
        return np.average(self.values, axis=1, weights=self.weights)


@dataclasses.dataclass(frozen=True)
class Fit:
    """Isotonic fit of an arm's score over the batch size.

    Attributes:
      global_batch_sizes: The batch sizes, ascending.
      scores: Fitted score at each, never improving from one to the next.
      reference: Mean score over the small batches.
      threshold: Worst accepted score: the reference less the tolerance.
      first_past: Smallest batch size at which the fit is worse than `threshold`; None if at none.
    """

    global_batch_sizes: tuple[int, ...]
    scores: tuple[float, ...]
    reference: float
    threshold: float
    first_past: int | None


@dataclasses.dataclass(frozen=True)
class Limit:
    """The score falls by more than the tolerance within the batch sizes that were tried.

    Attributes:
      global_batch_size: The limit, interpolated between batch sizes.
      low: Lower end of the limit's confidence interval.
      high: Upper end of the limit's confidence interval; infinite if it lies beyond the largest
        batch.
      fit: The fit that it was read from.
    """

    global_batch_size: float
    low: float
    high: float
    fit: Fit


@dataclasses.dataclass(frozen=True)
class NotReached:
    """The fitted score is within the tolerance at every batch size that was tried.

    Attributes:
      low: Lower end of the limit's confidence interval; infinite if even that is beyond the largest
        batch.
      fit: The fit that it was read from.
    """

    low: float
    fit: Fit


Reason: TypeAlias = Literal[
    "few_batch_sizes",
    "few_seeds",
    "no_plateau",
    "coarse_batch_sizes",
    "wide_interval",
    "diverged",
    "not_learned",
    "target_missed",
]


@dataclasses.dataclass(frozen=True)
class CannotTell:
    """The measurements do not determine a limit.

    Attributes:
      reason: "few_batch_sizes": no batch size is beyond the small batches of the reference.
        "few_seeds": a batch size has fewer than `FEWEST_SEEDS`, too few to estimate noise.
        "no_plateau": the score falls by more than the tolerance among the small batches themselves;
        smaller batches have to be tried. "coarse_batch_sizes": the batch sizes on either side of
        the limit differ by more than `COARSEST_FACTOR`. "wide_interval": the interval reaches from
        the small batches to beyond the largest one; more seeds are needed. "diverged" and
        "not_learned": at the smallest batch a seed diverged, or none learned, so there is no
        reference; `lbopt.report.study._arm_limit` finds these. "target_missed": of steps to a
        target, the median run did not reach it at a batch that the limit would include.
      fit: The fit, where the reason is "no_plateau", "coarse_batch_sizes" or "wide_interval".
    """

    reason: Reason
    fit: Fit | None = None


LimitEstimate: TypeAlias = Limit | NotReached | CannotTell


def estimate_limit(
    cells: Sequence[CellScores],
    tolerance: float,
    *,
    higher_is_better: bool = True,
    confidence: float = 0.95,
    num_resamples: int = 2000,
    seed: int | Sequence[int] = 0,
) -> LimitEstimate:
    """Estimate the largest batch size that keeps an arm's score, with a confidence interval.

    Args:
      cells: Scores at each batch size, ascending in batch size.
      tolerance: Loss of score that is accepted, in the unit of the scores: 0.01 for one percentage
        point of accuracy, log(1.05) for five percent of perplexity where the scores are losses.
      higher_is_better: Whether scores are accuracies rather than losses.
      confidence: Level of the interval, in (0, 1).
      num_resamples: Number of bootstrap resamples.
      seed: Seed for resampling the runs. Arms that are compared need different ones.

    Returns:
      The limit with its interval, a lower bound if it was not reached, or the reason why it cannot
      be told.

    Raises:
      UserError: Naming the argument, if cells are out of order, or scores are not finite or of
        unequal shapes.

    >>> accuracies = {16: .98, 32: .98, 64: .98, 128: .98, 256: .96, 512: .9}
    >>> cells = [CellScores(b, a + np.array([-.001, 0, .001])) for b, a in accuracies.items()]
    >>> limit = estimate_limit(cells, tolerance=0.01)
    >>> round(limit.low), round(limit.global_batch_size), round(limit.high)
    (174, 181, 189)
    """
    _check(cells, tolerance, confidence)
    sizes = np.array([cell.global_batch_size for cell in cells])
    num_small = _num_small(sizes)
    if num_small == len(sizes):
        return CannotTell("few_batch_sizes")
    if min(len(cell.values) for cell in cells) < FEWEST_SEEDS:
        return CannotTell("few_seeds")

    sign = 1 if higher_is_better else -1
    means = sign * np.array([np.mean(cell.scores) for cell in cells])
    reference = means[:num_small].mean()
    fitted = isotonic_decreasing(means)
    limit = _crossing(sizes, fitted, reference - tolerance)
    past = sizes[fitted < reference - tolerance - _ROUNDING]
    fit = Fit(
        tuple(sizes.tolist()),
        tuple((sign * fitted).tolist()),
        reference=float(sign * reference),
        threshold=float(sign * (reference - tolerance)),
        first_past=int(past[0]) if len(past) else None,
    )
    # A fall among the small batches themselves leaves no level to compare larger ones with.
    if limit < sizes[num_small - 1]:
        return CannotTell("no_plateau", fit)
    if len(past) and past[0] > COARSEST_FACTOR * sizes[sizes < past[0]][-1]:
        return CannotTell("coarse_batch_sizes", fit)

    limits = resample_limits(
        cells,
        tolerance,
        higher_is_better=higher_is_better,
        confidence=confidence,
        num_resamples=num_resamples,
        seed=seed,
    )
    low, high = _bias_corrected_interval(limits, limit, confidence)
    if low <= max(sizes[num_small - 1], sizes[1]) and high == np.inf:
        return CannotTell("wide_interval", fit)
    if limit == np.inf:
        return NotReached(low, fit)
    return Limit(float(limit), low, high, fit)


def resample_limits(
    cells: Sequence[CellScores],
    tolerance: float,
    *,
    higher_is_better: bool = True,
    confidence: float = 0.95,
    num_resamples: int = 2000,
    seed: int | Sequence[int] = 0,
) -> np.ndarray:
    """Return the limits that a bootstrap over seeds and test examples gives.

    Resampled means are the isotonic fit plus the deviations of resampled seeds and of resampled
    test examples. Seeds are drawn within each batch size. Test examples are drawn once for all
    cells, since all runs were scored on the same ones; examples that are equally hard at all batch
    sizes therefore cancel. Deviations of seeds are enlarged as in Hesterberg's expanded percentile
    interval, by sqrt(n / (n - 1)) and the ratio of Student's to the normal quantile, with the
    2 (n - 1) degrees of freedom of a difference between two cells.

    The chance with which a seed gets an example right shows in both: in the spread of the seeds'
    scores, and in the spread of the examples' means over seeds. To count it once, the examples'
    deviations are shrunk until their variance excludes that part of the noise.

    Args:
      cells: Scores at each batch size, ascending in batch size, with at least two seeds each.
      tolerance: Loss of score that is accepted, in the unit of the scores.
      higher_is_better: Whether scores are accuracies rather than losses.
      confidence: Level of the interval for which the resamples are meant.
      num_resamples: Number of resamples.
      seed: Seed for resampling the runs.

    Returns:
      [num_resamples] limits, interpolated batch sizes; infinite where it is beyond the largest.

    References:
      Hesterberg, What Teachers Should Know about the Bootstrap, arXiv:1411.5279 (dated 19 November
      2014), on the expanded percentile interval.
      Owen, The Pigeonhole Bootstrap, Annals of Applied Statistics 1(2), 2007, pages 386-411,
      doi:10.1214/07-AOAS122, on the triple counting of noise where two factors are resampled
      naively.
    """
    sizes = np.array([cell.global_batch_size for cell in cells])
    sign = 1 if higher_is_better else -1
    means = sign * np.array([np.mean(cell.scores) for cell in cells])
    fitted = isotonic_decreasing(means)

    deviations = _seed_deviations(cells, confidence, num_resamples, seed)
    if all(cell.values.ndim == 2 for cell in cells):
        deviations += _example_deviations(cells, num_resamples)
    deviations *= sign

    num_small = _num_small(sizes)
    references = means[:num_small].mean() + deviations[:, :num_small].mean(1)
    return _crossing(sizes, isotonic_decreasing(fitted + deviations), references - tolerance)


def _bias_corrected_interval(
    limits: np.ndarray, limit: np.ndarray, confidence: float
) -> tuple[float, float]:
    """Return Efron's bias-corrected percentile interval.

    Isotonic fits are biased at the ends of a plateau: its last cell comes out too low. The share of
    resampled limits below the estimate shows by how much, and shifts the percentiles.

    Args:
      limits: Resampled limits [num_resamples], some of them infinite.
      limit: The estimate.
      confidence: Level of the interval.

    References:
      Efron, Nonparametric Standard Errors and Confidence Intervals, Canadian Journal of Statistics
      9 (1981).
    """
    below = np.mean(limits < limit) + np.mean(limits == limit) / 2
    bias = 2 * stats.norm.ppf(np.clip(below, _LEAST_TAIL, 1 - _LEAST_TAIL))
    half_width = stats.norm.ppf((1 + confidence) / 2)
    levels = stats.norm.cdf([bias - half_width, bias + half_width])
    low, high = np.quantile(limits, levels, method="inverted_cdf")
    return float(min(low, limit)), float(max(high, limit))


def _check(cells: Sequence[CellScores], tolerance: float, confidence: float) -> None:
    """Raise `UserError` naming an argument that cannot be used."""
    require(0 < tolerance < np.inf, "tolerance", tolerance, "give a finite number > 0")
    require(0 < confidence < 1, "confidence", confidence, "give a number between 0 and 1")
    sizes = [cell.global_batch_size for cell in cells]
    require(cells, "cells", cells, "give the scores at one batch size at least", code="missing")
    ascending = all(a < b for a, b in itertools.pairwise(sizes))
    require(ascending, "cells", sizes, "give every batch size once, in ascending order")

    examples = {cell.values.shape[1:] for cell in cells}
    fix = "give the same test examples in every cell, or scores of seeds alone"
    require(len(examples) == 1, "cells.values", sorted(examples), fix, code="type")
    for cell in cells:
        fix = "not finite; give a diverged run the worst score there is"
        require(np.isfinite(cell.values).all(), "cells.values", cell.values, fix)


def _num_small(sizes: np.ndarray) -> int:
    """Return how many of the ascending batch sizes make up the reference."""
    return int(np.sum(sizes <= REFERENCE_FACTOR * sizes[0]))


def _crossing(sizes: np.ndarray, fitted: np.ndarray, threshold: np.ndarray) -> np.ndarray:
    """Return where fitted scores fall below a threshold.

    Args:
      sizes: Batch sizes [cells], ascending.
      fitted: Non-increasing scores [..., cells]. The first is at least the threshold: a fit starts
        no lower than the mean of any number of its first cells.
      threshold: Lowest score that is accepted [...].

    Returns:
      [...] batch sizes, interpolated over their logarithm; infinite where no score is too low.
    """
    spare = fitted - np.asarray(threshold)[..., None]
    falls = spare < -_ROUNDING
    reached = falls[..., -1]

    after = np.where(reached, falls.argmax(-1), 1)[..., None]
    spare_before = np.take_along_axis(spare, after - 1, -1)[..., 0]
    spare_after = np.take_along_axis(spare, after, -1)[..., 0]
    share = np.where(reached, spare_before, 0) / np.where(reached, spare_before - spare_after, 1)

    after = after[..., 0]
    log_size = np.log2(sizes[after - 1]) + share * np.log2(sizes[after] / sizes[after - 1])
    return np.where(reached, 2**log_size, np.inf)


def isotonic_decreasing(values: np.ndarray) -> np.ndarray:
    """Return the non-increasing least-squares fits along the last axis.

    `scipy.optimize.isotonic_regression` fits one curve per call; this fits all resamples at once,
    by the formula that defines the same fit: f_k = min over i <= k of max over j >= k of the mean
    of values i to j.

    Args:
      values: [..., points].

    >>> isotonic_decreasing(np.array([3.0, 1.0, 2.0, 0.0])).tolist()
    [3.0, 1.5, 1.5, 0.0]
    """
    points = values.shape[-1]
    fitted = np.full(values.shape, np.inf)
    for first in range(points):
        means = np.cumsum(values[..., first:], -1) / np.arange(1, points - first + 1)
        largest = np.maximum.accumulate(means[..., ::-1], -1)[..., ::-1]
        fitted[..., first:] = np.minimum(fitted[..., first:], largest)
    return fitted


def _seed_deviations(
    cells: Sequence[CellScores], confidence: float, num_resamples: int, seed: int | Sequence[int]
) -> np.ndarray:
    """Return [num_resamples, cells] deviations of the mean score of resampled seeds."""
    generator = np.random.Generator(np.random.Philox(seed))
    quantile = (1 + confidence) / 2
    deviations = np.empty((num_resamples, len(cells)))
    for index, cell in enumerate(cells):
        scores = cell.scores
        count = len(scores)
        drawn = generator.integers(count, size=(num_resamples, count))
        student = stats.t.ppf(quantile, 2 * (count - 1)) / stats.norm.ppf(quantile)
        enlarged = student * math.sqrt(count / (count - 1))
        deviations[:, index] = enlarged * (scores[drawn].mean(1) - scores.mean())
    return deviations


def _example_deviations(cells: Sequence[CellScores], num_resamples: int) -> np.ndarray:
    """Return [num_resamples, cells] deviations of the mean score on resampled test examples."""
    count = cells[0].values.shape[1]
    profiles = np.empty((len(cells), count))
    noise = np.empty(len(cells))
    for index, cell in enumerate(cells):
        weights = np.ones(count) if cell.weights is None else cell.weights / np.mean(cell.weights)
        centred = weights * (cell.values - cell.scores[:, None])
        profiles[index] = centred.mean(0)
        noise[index] = centred.var(0, ddof=1).mean() / len(centred)

    # A deviation shared by all batch sizes moves the reference and the curve by the same amount.
    own = profiles - profiles.mean(0)
    noise = noise * (1 - 2 / len(cells)) + noise.mean() / len(cells)
    explained = noise / np.maximum(own.var(1), np.finfo(float).tiny)
    own *= np.sqrt(np.maximum(0, 1 - explained))[:, None]

    groups = min(count, _MOST_GROUPS)
    totals = np.stack([own[:, group::groups].sum(1) for group in range(groups)], axis=1)
    generator = np.random.Generator(np.random.Philox(_EXAMPLE_SEED))
    drawn = generator.multinomial(groups, np.full(groups, 1 / groups), size=num_resamples)
    return drawn @ totals.T / count
