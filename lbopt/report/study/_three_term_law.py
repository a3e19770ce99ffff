"""The three-term law of the loss, over batch size and steps, for one size of model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from scipy import optimize, stats

FEWEST_VALUES = 3
"""Fewest different batch sizes, and fewest different numbers of steps."""
FEWEST_POINTS = 7
"""Fewest pairs of batch size and steps: two more than the law has numbers."""
_APART = 1.5
_STARTS = (0.2, 0.5, 1.0)
_EXPONENTS = (0.01, 5.0)
_TINY = 1e-9
_CONDITION = 1e-7

WhyNoLaw: TypeAlias = Literal[
    "stops_at_target", "batch_grows", "few_losses", "same_examples", "undetermined"
]


@dataclasses.dataclass(frozen=True, slots=True)
class ThreeTermLaw:
    """L = floor + batch_coefficient / B^batch_exponent + step_coefficient / K^step_exponent.

    Attributes:
      floor: Loss that neither a larger batch nor more steps gets below: the entropy and the term of
        the model's size, which is the same in all runs.
      batch_coefficient: Coefficient of the term of the batch size B, in examples.
      batch_exponent: Exponent of the batch size.
      batch_exponent_error: Half width of its 95 % interval, linearised.
      step_coefficient: Coefficient of the term of the steps K.
      step_exponent: Exponent of the steps.
      step_exponent_error: Half width of its 95 % interval, linearised.
      points: Number of pairs of batch size and steps.
      r2: R^2 of log L.
    """

    floor: float
    batch_coefficient: float
    batch_exponent: float
    batch_exponent_error: float
    step_coefficient: float
    step_exponent: float
    step_exponent_error: float
    points: int
    r2: float

    def best_batch(self, num_examples: float) -> float:
        """Return the batch size with the least loss among runs of B K examples.

        >>> law = ThreeTermLaw(1.0, 2.0, 1.0, 0.1, 8.0, 1.0, 0.1, 9, 1.0)
        >>> law.best_batch(1600)  # 2 / B + 8 B / 1600
        20.0
        """
        up = self.batch_exponent * self.batch_coefficient * num_examples**self.step_exponent
        down = self.step_exponent * self.step_coefficient
        return float((up / down) ** (1 / (self.batch_exponent + self.step_exponent)))


@dataclasses.dataclass(frozen=True, slots=True)
class NoLaw:
    """The losses do not determine the law.

    Attributes:
      reason: "stops_at_target": runs stop at their target, so all losses are alike. "batch_grows":
        the batch size changes within a run. "few_losses": fewer than `FEWEST_VALUES` batch sizes or
        numbers of steps, or `FEWEST_POINTS` pairs. "same_examples": the steps are a power of the
        batch size, as in runs of equal epochs, so the two terms cannot be told apart.
        "undetermined": another law with other exponents fits as well.
    """

    reason: WhyNoLaw


LawEstimate: TypeAlias = ThreeTermLaw | NoLaw


def fit_three_term_law(
    batch_sizes: Sequence[float], steps: Sequence[float], losses: Sequence[float]
) -> LawEstimate:
    """Fit the final losses of runs of one model over their batch sizes and steps.

    The fit is by least squares on log L, from several starts, the best of which is taken.

    Args:
      batch_sizes: B, in examples per step, one for each run.
      steps: K, optimizer steps.
      losses: L, positive final losses; each run has its whole schedule.

    Returns:
      The law, or why the losses do not determine it.

    References:
      Schaipp, How to Allocate Your Tokens? Scaling Laws with Training Steps and Batch Size, arXiv
      2607.01487v1: the three-term law, L = E + A / N^a + B / M^b + C / K^c for model size N, batch
      size M and steps K. The term of N is part of the floor here.
    """
    sizes, counts, found = (np.asarray(one, float) for one in (batch_sizes, steps, losses))
    fewest = min(len(np.unique(sizes)), len(np.unique(counts)))
    pairs = len(set(zip(sizes, counts, strict=True)))
    if fewest < FEWEST_VALUES:
        return NoLaw("few_losses")
    if not _told_apart(np.log(sizes), np.log(counts)):
        return NoLaw("same_examples")
    if pairs < FEWEST_POINTS:
        return NoLaw("few_losses")

    # Each term is written by its value at the mean batch and steps, which the losses tell best.
    x = np.log(sizes) - np.log(sizes).mean()
    y = np.log(counts) - np.log(counts).mean()
    fits = [_fitted(x, y, found, *start) for start in itertools.product(_STARTS, repeat=2)]
    best = min(fits, key=lambda fit: fit.cost)
    errors = _errors(best)
    if errors is None:
        return NoLaw("undetermined")

    floor, batch, batch_exponent, step, step_exponent = best.x
    return ThreeTermLaw(
        floor=float(floor),
        batch_coefficient=float(batch * np.exp(batch_exponent * np.log(sizes).mean())),
        batch_exponent=float(batch_exponent),
        batch_exponent_error=errors[0],
        step_coefficient=float(step * np.exp(step_exponent * np.log(counts).mean())),
        step_exponent=float(step_exponent),
        step_exponent_error=errors[1],
        points=pairs,
        r2=float(1 - np.var(best.fun) / np.var(np.log(found))),
    )


def _told_apart(x: np.ndarray, y: np.ndarray) -> bool:
    """Return whether the steps differ by a factor of 1.5 from any power of the batch size."""
    line = stats.linregress(x, y)
    return bool(np.ptp(y - line.slope * x) > np.log(_APART))


def _fitted(
    x: np.ndarray, y: np.ndarray, losses: np.ndarray, batch_exponent: float, step_exponent: float
) -> optimize.OptimizeResult:
    """Return the fit of (floor, batch term, its exponent, step term, its exponent) from a start."""

    def terms(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.exp(-numbers[2] * x), np.exp(-numbers[4] * y)

    def left(numbers: np.ndarray) -> np.ndarray:
        batch, step = terms(numbers)
        return np.log(numbers[0] + numbers[1] * batch + numbers[3] * step) - np.log(losses)

    def slopes(numbers: np.ndarray) -> np.ndarray:
        batch, step = terms(numbers)
        whole = numbers[0] + numbers[1] * batch + numbers[3] * step
        columns = (np.ones_like(x), batch, -numbers[1] * x * batch, step, -numbers[3] * y * step)
        return np.stack(columns, 1) / whole[:, None]

    # For given exponents the law is linear in the others.
    design = np.stack([np.ones_like(x), np.exp(-batch_exponent * x), np.exp(-step_exponent * y)], 1)
    floor, batch, step = np.maximum(optimize.nnls(design, losses)[0], _TINY * losses.mean())
    start = np.array([floor, batch, batch_exponent, step, step_exponent])
    low = (0.0, 0.0, _EXPONENTS[0], 0.0, _EXPONENTS[0])
    high = (np.inf, np.inf, _EXPONENTS[1], np.inf, _EXPONENTS[1])
    return optimize.least_squares(
        left, start, slopes, bounds=(low, high), x_scale="jac", xtol=1e-12, ftol=1e-12, gtol=1e-12
    )


def _errors(fit: optimize.OptimizeResult) -> tuple[float, float] | None:
    """Return the half widths of both exponents' 95 % intervals.

    None if a term vanishes, an exponent is at its bound or not told from 0, or some numbers of the
    law can be exchanged for others.
    """
    floor, batch, batch_exponent, step, step_exponent = fit.x
    exponents = np.array([batch_exponent, step_exponent])
    inside = (exponents > 1.01 * _EXPONENTS[0]) & (exponents < 0.99 * _EXPONENTS[1])
    if min(batch, step) <= 1e-6 * (floor + batch + step) or not inside.all():
        return None

    scaled = fit.jac / np.linalg.norm(fit.jac, axis=0)
    values = np.linalg.svd(scaled, compute_uv=False)
    if values[-1] < _CONDITION * values[0]:
        return None
    free = len(fit.fun) - len(fit.x)
    variances = np.diag(np.linalg.inv(scaled.T @ scaled)) * (2 * fit.cost / free)
    errors = np.sqrt(variances) / np.linalg.norm(fit.jac, axis=0)
    halves = stats.t.ppf(0.975, free) * errors[[2, 4]]
    return (float(halves[0]), float(halves[1])) if (halves < exponents).all() else None
