"""LEGW's explanation: the curvature along the gradient peaks near the same step whatever the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lbopt.sweep.findings.differences import student_half_width
from lbopt.sweep.findings.names import arm_name
from lbopt.sweep.findings.verdicts import HELD, NOT_HELD, UNKNOWN, Arms, Claim, said

_HALFWAY = 0.5
"""Between the same step (exponent 0) and the same epoch (exponent -1)."""
_DRAWS = 2000
_TAILS = (0.025, 0.975)
_CLAIMED = (
    "the local Lipschitz constant along the gradient peaks near the same step at every batch (LEGW)"
)
Groups = Sequence[tuple[float, Sequence[float]]]


class Slope(NamedTuple):
    """A least-squares slope of log y against log x.

    Attributes:
      slope: the exponent of x.
      low: end of its 95 % interval; None for both where there is none.
      high: the other end.
      over: what the interval is over, "seeds" or "batch sizes".
    """

    slope: float
    low: float | None
    high: float | None
    over: str


class _Peaks(NamedTuple):
    """Where the curvature of an arm peaks.

    Attributes:
      name: of the arm.
      slope: of the step of the peak over the batch size.
      seeds: runs that have a peak.
      at_edge: those in which it is at the first or the last probe.
      warmups: fewest and most warmup steps of these batch sizes.
    """

    name: str
    slope: Slope
    seeds: int
    at_edge: int
    warmups: tuple[float, float]

    @property
    def told(self) -> tuple[float, float] | None:
        """The interval, None if there is none or if most peaks lie where probing began or ended."""
        if self.slope.low is None or self.slope.high is None or 2 * self.at_edge > self.seeds:
            return None
        return self.slope.low, self.slope.high

    def words(self) -> str:
        slope, low, high = (None if value is None else value + 0.0 for value in self.slope[:3])
        interval = (
            "no interval"
            if low is None
            else f"95 % interval over {self.slope.over} {low:.2f} to {high:.2f}"
        )
        least, most = (f"{value:.3g}" for value in self.warmups)
        warmup = (
            f"{least} steps" if least == most else f"{least} to {most} steps, as the search chose"
        )
        edge = f"{self.at_edge} of {self.seeds} peaks at the first or last probe"
        return f"batch^{slope:.2f} for {self.name} ({interval}; {edge}; warmup of {warmup})"


def lipschitz_peak_stays(arms: Arms) -> Claim | None:
    """Hold LEGW's explanation against the probes: the local Lipschitz constant peaks near the same step at every batch.

    What counts is the slope of log(step of the peak) against log(batch size), 0 for the same step and -1 for the same
    epoch, of each arm. It holds if the 95 % intervals of all of them lie less than halfway from 0, and does not if all lie
    farther away. Else it cannot be told, nor where an arm has most of its peaks at the first or the last probe of a run:
    those lie where probing began or ended, or beyond.

    Args:
      arms: of a summary, those whose warmup follows LEGW: the curvature follows the warmup, so that under one of constant
        epochs a peak that moves would say nothing.

    Returns:
      The claim; None if no arm was probed at two batch sizes or more.

    References:
      You et al., Large-Batch Training for LSTM and Beyond, arXiv 1901.08256 [recalled 80%].
    """
    found = [peaks for index, arm in enumerate(arms) if (peaks := _peaks(arm, index))]
    if not found:
        return None
    told = [one.told for one in found if one.told]
    near = [low > -_HALFWAY and high < _HALFWAY for low, high in told]
    far = [high < -_HALFWAY or low > _HALFWAY for low, high in told]
    verdict = UNKNOWN
    if len(told) == len(found):
        verdict = HELD if all(near) else NOT_HELD if all(far) else UNKNOWN
    numbers = f"in the arms with LEGW's warmup the step of its peak goes like {', '.join(one.words() for one in found)}"
    return said(
        "lipschitz_peak_stays",
        verdict,
        _CLAIMED,
        f"{numbers}; 0 is the same step, -1 the same epoch",
    )


def _peaks(arm: Mapping[str, Any], index: int) -> _Peaks | None:
    points = [point for point in arm["points"] if point["lipschitz_peaks"]]
    if len(points) < 2:
        return None
    peaks = [peak for point in points for peak in point["lipschitz_peaks"]]
    groups = [
        (point["global_batch_size"], [peak["step"] for peak in point["lipschitz_peaks"]])
        for point in points
    ]
    warmups = [point["warmup_steps"] for point in points]
    at_edge = sum(peak["at_edge"] for peak in peaks)
    return _Peaks(
        arm_name(arm), log_slope(groups, index), len(peaks), at_edge, (min(warmups), max(warmups))
    )


def log_slope(groups: Groups, index: int = 0) -> Slope:
    """Return the slope of log y against log x, each x with the mean of its log y, and how sure it is.

    With several y at every x the interval is of percentiles over resampled ones; with a single one somewhere it is that
    of the scatter of the means around the line, by Student's t.

    Args:
      groups: (x, its y), two or more of different x; all > 0.
      index: of the draws, so that those of two arms are independent.

    Returns:
      The slope; without an interval where there is a single y at some x and fewer than three of these.

    >>> log_slope([(16, [64, 64]), (64, [16, 16])])
    Slope(slope=-1.0, low=-1.0, high=-1.0, over='seeds')
    """
    x = np.log([size for size, _ in groups])
    logs = [np.log(values) for _, values in groups]
    slope = float(_slopes(x, np.array([values.mean() for values in logs])))
    if min(map(len, logs)) > 1:
        draw = np.random.Generator(np.random.Philox([0, index]))
        means = [
            values[draw.integers(len(values), size=(_DRAWS, len(values)))].mean(1)
            for values in logs
        ]
        low, high = np.quantile(_slopes(x, np.stack(means, axis=-1)), _TAILS)
        return Slope(round(slope, 9), round(float(low), 9), round(float(high), 9), "seeds")
    half = _half_width(x, np.array([values.mean() for values in logs]), slope)
    if half is None:
        return Slope(round(slope, 9), None, None, "batch sizes")
    return Slope(round(slope, 9), round(slope - half, 9), round(slope + half, 9), "batch sizes")


def _slopes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return least-squares slopes over the last axis of y, [..., len(x)]."""
    apart = x - x.mean()
    return y @ apart / (apart @ apart)


def _half_width(x: np.ndarray, y: np.ndarray, slope: float) -> float | None:
    freedom = len(x) - 2
    if freedom < 1:
        return None
    apart = x - x.mean()
    left = y - y.mean() - slope * apart
    return student_half_width(math.sqrt(left @ left / freedom / (apart @ apart)), freedom)
