"""The gradient noise scale of one run, or of several seeds together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from lbopt.sweep._finished_trial import Number, Numbers, Probes


def by_step(series: Iterable[tuple[Sequence[float], Numbers | None]]) -> dict[int, list[float]]:
    """Return the numbers of all runs at every step, ascending in the step.

    Args:
      series: Steps and numbers of every run; None for a missing number or series.

    >>> by_step([([1, 2], [1.0, 2.0]), ([1, 2], [3.0, None]), ([1], None)])
    {1: [1.0, 3.0], 2: [2.0]}
    """
    found: dict[int, list[float]] = {}
    for steps, column in series:
        for step, value in zip(steps, column or (), strict=False):
            if value is not None:
                found.setdefault(int(step), []).append(value)
    return dict(sorted(found.items()))


def noise_scales(probes: Sequence[Probes]) -> list[tuple[int, float]]:
    """Return the gradient noise scale tr(Sigma) / |G|^2 at every probed step, in examples.

    At each step it is the sum of the traces over the seeds divided by the sum of the squared norms:
    single estimates of |G|^2 scatter widely and may be negative, so a mean of ratios would mean
    nothing. If the sum is not positive, the signal is lost in the noise and the scale is infinite.

    The noise scale grows by orders of magnitude during training, as |G|^2 falls. Sums over all
    steps would be those of the first few, so a run is described by the median over its probed
    steps. These are log-spaced, so that every stretch of log t has the same weight.

    Args:
      probes: Probes of every seed. At a step where a seed lacks one of the two numbers, only the
        other seeds count.

    Returns:
      Pairs of step and noise scale, ascending in the step.

    >>> noise_scales([Probes([1, 9], noise_trace=[8.0, 6.0], gradient_square_norm=[2.0, -1.0])])
    [(1, 4.0), (9, inf)]

    References:
      McCandlish et al., An Empirical Model of Large-Batch Training, arXiv 1812.06162v1,
      abstract: the scale grows as the loss falls during training.
    """
    pairs = [(one.step, _pairs(one)) for one in probes]
    traces = by_step((steps, [trace for trace, _ in pair]) for steps, pair in pairs)
    norms = by_step((steps, [norm for _, norm in pair]) for steps, pair in pairs)
    return [(step, _ratio(math.fsum(traces[step]), math.fsum(norms[step]))) for step in traces]


def _pairs(probes: Probes) -> list[tuple[Number, Number]]:
    """Return trace and squared norm at every step; (None, None) if one of them is missing."""
    columns = zip(probes.noise_trace or (), probes.gradient_square_norm or (), strict=False)
    return [(None, None) if None in pair else pair for pair in columns]


def _ratio(trace: float, square_norm: float) -> float:
    return trace / square_norm if square_norm > 0 else math.inf
