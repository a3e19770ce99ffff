"""Whether the gradient noise scale predicts how far the batch goes, and whether diffusion is logarithmic."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lbopt.sweep.findings.verdicts import HELD, NOT_HELD, UNKNOWN, Arms, Claim, said

WITHIN = 4.0
"""A prediction of a limit is good within this factor: batch sizes of a study are factors of 2 apart, or of 4."""
_ENOUGH = 0.5
_FEWEST_RANKED = 3


def noise_scale_predicts_limit(arms: Arms) -> Claim | None:
    """Hold the claim that the gradient noise scale predicts how far the batch goes against the limits that were reached.

    The noise scale is the one at an arm's smallest batch. It holds if it is within a factor of 4 of the limit for more than
    half of the arms and, where three or more can be ranked, if the rank correlation is above 0.5.

    Args:
      arms: of a summary.

    Returns:
      The claim, which cannot be told if all such arms held up to the largest batch; None if no arm has both a limit and a noise
      scale.
    """
    reached = [arm for arm in arms if arm["limit"] and not arm["limit_is_largest"]]
    pairs = [(noise, arm["limit"]) for arm in reached if (noise := _small_batch_noise(arm))]
    if not pairs and any(arm["limit"] and _small_batch_noise(arm) for arm in arms):
        why = "no arm with a measured noise scale reached its limit"
        return said("noise_scale_predicts_limit", UNKNOWN, _claimed("limit"), why)
    return _predicted("noise_scale_predicts_limit", "limit", pairs)


def noise_scale_predicts_critical_batch(arms: Arms) -> Claim | None:
    """Hold the same claim as `noise_scale_predicts_limit` against the critical batches that the steps to a target gave.

    Args:
      arms: of a summary.

    Returns:
      The claim; None if no arm has both a critical batch and a noise scale.
    """
    fitted = [arm for arm in arms if arm["critical_batch"]]
    pairs = [(n, arm["critical_batch"]["critical_batch_size"]) for arm in fitted if (n := _small_batch_noise(arm))]
    return _predicted("noise_scale_predicts_critical_batch", "critical batch", pairs)


def _small_batch_noise(arm: Mapping[str, Any]) -> float | None:
    return arm["points"][0]["noise_scale"] if arm["points"] else None


def _claimed(thing: str) -> str:
    return f"the gradient noise scale at the smallest batch predicts the {thing}"


def _predicted(name: str, thing: str, pairs: Sequence[tuple[float, float]]) -> Claim | None:
    """Judge predictions of batch sizes.

    The prediction is the noise scale at an arm's smallest batch, which nobody needs large batches to measure. It holds if
    it is within a factor of 4 for more than half of the arms, and, where three or more can be ranked, if the rank
    correlation is above 0.5.

    Args:
      name: of the claim.
      thing: that is predicted.
      pairs: (noise scale, what it predicts) of every arm that has both.

    References:
      McCandlish et al., An Empirical Model of Large-Batch Training, arXiv 1812.06162 [recalled 90%].
    """
    if not pairs:
        return None
    ratios = sorted(found / noise for noise, found in pairs)
    within = sum(1 / WITHIN <= ratio <= WITHIN for ratio in ratios)
    rank = rank_correlation(pairs)
    low, high = f"{ratios[0]:.3g}", f"{ratios[-1]:.3g}"
    numbers = f"the {thing} is {low if low == high else f'{low} to {high}'} times the noise scale"
    numbers += f", within a factor of {WITHIN:g} for {within} of {len(pairs)} arms"
    numbers += "" if rank is None else f", rank correlation {rank:.2f}"
    good = 2 * within > len(pairs) and (rank is None or rank > _ENOUGH)
    return said(name, HELD if good else NOT_HELD, _claimed(thing), numbers)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation, ties sharing their mean rank; None for fewer than 3 pairs or a constant side.

    >>> rank_correlation([(1, 10), (2, 30), (3, 20)])
    0.5
    """
    columns = [[pair[axis] for pair in pairs] for axis in (0, 1)]
    if len(pairs) < _FEWEST_RANKED or any(len(set(column)) == 1 for column in columns):
        return None
    return round(statistics.correlation(*(_ranks(column) for column in columns)), 9)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect.bisect_left(ordered, value) + bisect.bisect_right(ordered, value)) / 2 for value in values]


def diffusion_is_logarithmic(arms: Arms) -> Claim | None:
    """Hold the claim that the distance from the start grows like log t against the fits of log t and of a power of t.

    It holds if log t has the larger R^2 in more than half of the cells, and cannot be told if in just half; both fits have
    two parameters.

    Args:
      arms: of a summary.

    Returns:
      The claim; None if no cell has fits.

    References:
      Hoffer et al., arXiv 1705.08741 [recalled 80%]; contradicted by You et al., The Limit of the Batch Size, arXiv 2006.08517.
    """
    fits = [point["diffusion"] for arm in arms for point in arm["points"] if point["diffusion"]]
    if not fits:
        return None
    logarithmic = sum(fit["log_r2"] > fit["power_r2"] for fit in fits)
    exponents = [fit["exponent"] for fit in fits]
    log_r2, power_r2 = (statistics.median(fit[name] for fit in fits) for name in ("log_r2", "power_r2"))
    numbers = f"log t fits better than a power of t in {logarithmic} of {len(fits)} cells"
    numbers += f" (median R^2 {log_r2:.4f} against {power_r2:.4f}; median exponent {statistics.median(exponents):.2f})"
    verdict = UNKNOWN if 2 * logarithmic == len(fits) else HELD if 2 * logarithmic > len(fits) else NOT_HELD
    what = "diffusion is ultra-slow, the distance from the start growing like log t,"
    return said("diffusion_is_logarithmic", verdict, what, numbers)
