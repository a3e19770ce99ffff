"""Curves through what a study measured, and how sure it is of its limit; NumPy and SciPy only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize

FEWEST_POINTS = 4
"""Through fewer points both diffusion curves pass too easily to be compared."""
_EXPONENTS = (-2.0, 8.0)
"""Where the exponent of a power law is sought."""
_SLACK = 1e-11
"""A mean that is off by rounding alone is not past the limit; `lbopt.sweep.findings.summary.find_limit` grants as much."""


class LogFit(NamedTuple):
    """d(t) = intercept + slope log t.

    Attributes:
      intercept: d at step 1.
      slope: for each factor of e in t.
      r2: 1 minus the unexplained part of the variance of d.
    """

    intercept: float
    slope: float
    r2: float


class PowerFit(NamedTuple):
    """d(t) = scale * t^exponent.

    Attributes:
      scale: d at step 1.
      exponent: 0.5 for a random walk, 1 for a straight line.
      r2: 1 minus the unexplained part of the variance of d, of d itself and not of its logarithm.
    """

    scale: float
    exponent: float
    r2: float


class DiffusionFit(NamedTuple):
    """How the distance from the start grew; the fit with the larger r2 describes it better, both have two parameters.

    Attributes:
      from_step: the first step that was fitted.
      to_step: the last one.
      log: ultra-slow diffusion.
      power: any power law.
    """

    from_step: int
    to_step: int
    log: LogFit
    power: PowerFit

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        return {**self._asdict(), "log": self.log._asdict(), "power": self.power._asdict()}


class CriticalBatch(NamedTuple):
    """S = min_steps * (1 + critical_batch_size / B), for S steps to the target at batch B.

    Attributes:
      min_steps: that no batch, however large, gets below.
      min_examples: that no batch, however small, gets below; min_steps * critical_batch_size.
      critical_batch_size: where twice the steps and twice the examples of these are needed.
      r2: of log S.
    """

    min_steps: float
    min_examples: float
    critical_batch_size: float
    r2: float


def log_spaced_steps(num_steps: int, count: int) -> tuple[int, ...]:
    """Return `count` distinct steps from 1 to `num_steps`, as evenly spaced in log t as whole numbers allow.

    The first is 1 (if there are two or more), the last is `num_steps`; all of them, if there are no more than `count`.

    Args:
      num_steps: >= 1.
      count: >= 0.

    Returns:
      1-based steps, ascending.

    >>> log_spaced_steps(1000, 4), log_spaced_steps(1000, 9), log_spaced_steps(3, 9)
    ((1, 10, 100, 1000), (1, 2, 5, 12, 29, 70, 170, 412, 1000), (1, 2, 3))
    """
    count = min(count, num_steps)
    if count < 2:
        return (num_steps,)[:count]
    steps = [1]
    for left in range(count - 1, 0, -1):
        factor = (num_steps / steps[-1]) ** (1 / left)
        steps.append(max(steps[-1] + 1, round(steps[-1] * factor)))
    return tuple(steps)


def fit_diffusion(
    steps: Sequence[int], distances: Sequence[float], from_step: int, to_step: int | None = None
) -> DiffusionFit | None:
    """Fit the distance from the initial parameters by log t and by a power of t, each by least squares on d itself.

    A point weighs as much as its part of the axis of log t (trapezoid rule), so that each decade weighs alike whether
    the points are log-spaced or every step.

    Args:
      steps: t, 1-based, ascending.
      distances: ||w_t - w_0||, one for each.
      from_step: the first to be fitted, for instance the one after warmup.
      to_step: the last one; None for the last there is.

    Returns:
      Both fits; None where fewer than 4 points, or points that are not finite or all equal, leave nothing to compare.

    >>> fit = fit_diffusion([1, 10, 100, 1000], [2.0, 2.5, 3.0, 3.5], from_step=1)
    >>> round(fit.log.slope, 3), round(fit.log.r2, 6), fit.power.r2 < fit.log.r2
    (0.217, 1.0, True)

    References:
      Hoffer et al., arXiv 1705.08741: the distance grows like log t while the learning rate is high [recalled 80%]. The
      abstract of The Limit of the Batch Size, arXiv 2006.08517, says that its results contradict that.
    """
    t, d = np.asarray(steps, float), np.asarray(distances, float)
    inside = (t >= from_step) & (t <= (np.inf if to_step is None else to_step))
    t, d = t[inside], d[inside]
    if len(t) < FEWEST_POINTS or not np.isfinite(d).all() or np.ptp(d) == 0:
        return None
    weights = _widths(np.log(t))
    return DiffusionFit(int(t[0]), int(t[-1]), _fit_log(t, d, weights), _fit_power(t, d, weights))


def _widths(x: np.ndarray) -> np.ndarray:
    """Return the part of the axis that belongs to each ascending point, halfway to its neighbours."""
    gaps = np.diff(x)
    return (np.append(gaps, 0) + np.insert(gaps, 0, 0)) / 2


def _fit_log(t: np.ndarray, d: np.ndarray, weights: np.ndarray) -> LogFit:
    x = np.log(t)
    middle, height = np.average(x, weights=weights), np.average(d, weights=weights)
    slope = np.sum(weights * (x - middle) * (d - height)) / np.sum(weights * (x - middle) ** 2)
    intercept = height - slope * middle
    return LogFit(float(intercept), float(slope), _r2(d, intercept + slope * x, weights))


def _fit_power(t: np.ndarray, d: np.ndarray, weights: np.ndarray) -> PowerFit:
    """Search the exponent alone: for each one the best scale is a linear least-squares problem."""
    relative = t / t[-1]  # no power of it overflows

    def scale(exponent: float) -> float:
        powers = relative**exponent
        return np.sum(weights * powers * d) / np.sum(weights * powers**2)

    def error(exponent: float) -> float:
        return np.sum(weights * (d - scale(exponent) * relative**exponent) ** 2)

    exponent, _ = _minimise(error, *_EXPONENTS)
    fitted = scale(exponent) * relative**exponent
    return PowerFit(float(scale(exponent) * t[-1] ** -exponent), exponent, _r2(d, fitted, weights))


def _minimise(error: Callable[[float], float], low: float, high: float) -> tuple[float, bool]:
    """Return where a function is least, from the best point of a grid on, and whether that is at an end of the grid."""
    grid = np.linspace(low, high, 201)
    best = int(np.argmin([error(x) for x in grid]))
    bounds = (grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)])
    found = optimize.minimize_scalar(
        error, bounds=bounds, method="bounded", options={"xatol": 1e-12}
    )
    return float(found.x), best in (0, len(grid) - 1)


def _r2(values: np.ndarray, fitted: np.ndarray, weights: np.ndarray) -> float:
    spread = np.sum(weights * (values - np.average(values, weights=weights)) ** 2)
    return float(1 - np.sum(weights * (values - fitted) ** 2) / spread)


def fit_critical_batch(batch_sizes: Sequence[int], steps: Sequence[float]) -> CriticalBatch | None:
    """Fit steps to a target against the batch size.

        (S / S_min - 1) (E / E_min - 1) = 1,  E = B S,    so    S = S_min (1 + B_crit / B),  B_crit = E_min / S_min,

    by least squares on log S, so that every batch weighs alike.

    Args:
      batch_sizes: B, in examples; several runs at one batch are several points.
      steps: S, positive; leave runs out that did not reach the target.

    Returns:
      The fit; None for fewer than 3 batch sizes, or where B_crit lies so far from all of them (a factor of 1000) that
      the steps do not tell it: perfect scaling throughout, or none at all.

    >>> fit = fit_critical_batch([10, 100, 1000], [1100, 200, 110])
    >>> round(fit.min_steps), round(fit.min_examples), round(fit.critical_batch_size), round(fit.r2, 6)
    (100, 10000, 100, 1.0)

    References:
      McCandlish et al., An Empirical Model of Large-Batch Training, arXiv 1812.06162, section 2 [recalled 90%].
    """
    sizes, log_steps = np.asarray(batch_sizes, float), np.log(np.asarray(steps, float))
    if len(set(sizes)) < 3 or np.ptp(log_steps) == 0:
        return None

    def excess(log_critical: float) -> np.ndarray:
        return np.log1p(np.exp(log_critical) / sizes)

    def error(log_critical: float) -> float:
        return np.var(
            log_steps - excess(log_critical)
        )  # the best log S_min is the mean of what is left

    far = np.log(1000)
    log_critical, at_end = _minimise(error, np.log(sizes.min()) - far, np.log(sizes.max()) + far)
    if at_end:
        return None
    critical = float(np.exp(log_critical))
    least = float(np.exp(np.mean(log_steps - excess(log_critical))))
    r2 = 1 - error(log_critical) / np.var(log_steps)
    return CriticalBatch(least, least * critical, critical, float(r2))


def limit_quantiles(limits: np.ndarray, confidence: float = 0.95) -> tuple[int, int]:
    """Return between which of the limits that were drawn the middle part of them lies.

    Args:
      limits: [num_resamples] int, batch sizes, from `resample_limits`.
      confidence: in (0, 1).

    Returns:
      (low, high), two of them.

    >>> limit_quantiles(np.array([16, 64, 64, 64, 256]), confidence=0.5)
    (64, 64)
    """
    ends = np.quantile(limits, [(1 - confidence) / 2, (1 + confidence) / 2], method="inverted_cdf")
    return int(ends[0]), int(ends[1])


def resample_limits(
    values_by_batch: Sequence[tuple[int, Sequence[float]]],
    tolerance: float,
    higher_is_better: bool = True,
    num_resamples: int = 2000,
    seed: int | Sequence[int] = 0,
) -> np.ndarray:
    """Draw the seeds of every batch with replacement, as many as there are, and find the limit of each draw.

    Args:
      values_by_batch: (batch size, one value for each seed), ascending in batch size, without gaps in the study. A run
        that diverged has the worst value there is: accuracy 0, loss infinity.
      tolerance: how far the mean may fall behind the smallest batch's, in the unit of the values: limit_points / 100
        for accuracies in [0, 1], log(1 + p / 100) of losses for p percent of perplexity.
      higher_is_better: accuracy, not loss.
      num_resamples: draws.
      seed: of the draws (Philox: the same on every machine); arms that are compared need one each, as theirs are
        draws of other runs.

    Returns:
      [num_resamples] int, one batch size for each draw, by the rule of `lbopt.sweep.findings.summary.find_limit`.
    """
    draw = np.random.Generator(np.random.Philox(seed))
    means = np.empty((num_resamples, len(values_by_batch)))
    for index, (_, values) in enumerate(values_by_batch):
        chosen = draw.integers(len(values), size=(num_resamples, len(values)))
        means[:, index] = np.asarray(values, float)[chosen].mean(1)
    with np.errstate(invalid="ignore"):  # infinity less infinity is behind
        behind = (means[:, :1] - means) * (1 if higher_is_better else -1)
    holds = behind <= tolerance + _SLACK
    holds[:, 0] = True
    last = np.logical_and.accumulate(holds, axis=1).sum(1) - 1
    return np.asarray([size for size, _ in values_by_batch])[last]
