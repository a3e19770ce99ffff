"""Log-spaced steps, and fits of the distance from the initial parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import optimize

from lbopt.sweep._finished_trial import Diffusion, LogFit, PowerFit

FEWEST_POINTS = 4
"""Fewest points of a fit: both curves pass through fewer too easily to be compared."""
_EXPONENTS = np.linspace(-2.0, 8.0, 201)
"""Exponents of a power law; the minimiser starts from the best of them."""


def log_spaced_steps(num_steps: int, count: int) -> tuple[int, ...]:
    """Return distinct steps from 1 to `num_steps`, as even in log t as whole numbers allow.

    The last step is `num_steps`, and the first of several is 1.

    Args:
      num_steps: Number of steps of the run, >= 1.
      count: Number of steps to return, >= 0; all steps of a shorter run.

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
) -> Diffusion | None:
    """Fit the distance d from the start by log t and by a power of t, by least squares on d.

    The weight of a point is the length of the axis of log t around it (trapezoid rule), so that
    each decade has the same weight whether the points are log-spaced or every step.

    Args:
      steps: Steps t, 1-based, ascending.
      distances: Distance ||w_t - w_0|| at each step.
      from_step: First step of the fit, for instance the one after warmup.
      to_step: Last step of the fit; None for the last of `steps`.

    Returns:
      Both fits; None for fewer than 4 points, or points that are not finite or all equal.

    >>> fit = fit_diffusion([1, 10, 100, 1000], [2.0, 2.5, 3.0, 3.5], from_step=1)
    >>> round(fit.log.slope, 3), round(fit.log.r2, 6), fit.power.r2 < fit.log.r2
    (0.217, 1.0, True)

    References:
      Hoffer et al., Train Longer, Generalize Better, arXiv 1705.08741v2, abstract: in the initial
      phase of a high learning rate the distance grows like log t.
      You et al., The Limit of the Batch Size, arXiv 2006.08517v1, abstract: results contradict it.
    """
    t = np.asarray(steps, float)
    inside = (t >= from_step) & (t <= (np.inf if to_step is None else to_step))
    t = t[inside]
    d = np.asarray(distances, float)[inside]
    if len(t) < FEWEST_POINTS or not np.isfinite(d).all() or np.ptp(d) == 0:
        return None
    weights = _widths(np.log(t))
    return Diffusion(int(t[0]), int(t[-1]), _fit_log(t, d, weights), _fit_power(t, d, weights))


def _widths(x: np.ndarray) -> np.ndarray:
    """Return the length of the axis around each ascending point, halfway to its neighbours."""
    gaps = np.diff(x)
    return (np.append(gaps, 0) + np.insert(gaps, 0, 0)) / 2


def _fit_log(t: np.ndarray, d: np.ndarray, weights: np.ndarray) -> LogFit:
    x = np.log(t)
    slope, intercept = np.polyfit(x, d, 1, w=np.sqrt(weights))
    return LogFit(float(intercept), float(slope), _r2(d, intercept + slope * x, weights))


def _fit_power(t: np.ndarray, d: np.ndarray, weights: np.ndarray) -> PowerFit:
    """Search the exponent alone: the best scale of each is a linear least-squares problem."""
    relative = t / t[-1]  # no power of it overflows

    def scale(exponent: float) -> float:
        powers = relative**exponent
        return np.sum(weights * powers * d) / np.sum(weights * powers**2)

    def error(exponent: float) -> float:
        return np.sum(weights * (d - scale(exponent) * relative**exponent) ** 2)

    best = int(np.argmin([error(exponent) for exponent in _EXPONENTS]))
    bounds = (_EXPONENTS[max(best - 1, 0)], _EXPONENTS[min(best + 1, len(_EXPONENTS) - 1)])
    found = optimize.minimize_scalar(
        error, bounds=bounds, method="bounded", options={"xatol": 1e-12}
    )

    exponent = float(found.x)
    fitted = scale(exponent) * relative**exponent
    return PowerFit(float(scale(exponent) * t[-1] ** -exponent), exponent, _r2(d, fitted, weights))


def _r2(values: np.ndarray, fitted: np.ndarray, weights: np.ndarray) -> float:
    spread = np.sum(weights * (values - np.average(values, weights=weights)) ** 2)
    return float(1 - np.sum(weights * (values - fitted) ** 2) / spread)
