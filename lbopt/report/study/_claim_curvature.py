"""Claim of LEGW (linear-epoch gradual warmup): curvature peaks near one step at every batch."""

from __future__ import annotations

import dataclasses

from lbopt.report.study._statistics import Slope, log_slope
from lbopt.report.study._study import CellResults, Study
from lbopt.report.study._words import HELD, NOT_HELD, UNKNOWN, Claim, judged, say, span

_HALFWAY = 0.5
"""Between the same step (exponent 0) and the same epoch (exponent -1)."""
_WHAT = (
    "the local Lipschitz constant along the gradient peaks near the same step at every batch (LEGW)"
)
_PEAKS = """batch^{{ "%.2f" % (slope.slope + 0.0) }} for {{ arm | name }} (
    {%- if slope.low is none %}no interval
    {%- else %}95 % interval over {{ slope.over }} {{ "%.2f" % (slope.low + 0.0) }} to
    {{ "%.2f" % (slope.high + 0.0) }}
    {%- endif %}; {{ at_edge }} of {{ seeds }} peaks at the first or last probe; warmup of
    {{ warmup }} steps{{ ", as the search chose" if " to " in warmup }})"""


@dataclasses.dataclass(frozen=True, slots=True)
class _Peaks:
    """The peaks of the curvature of an arm.

    Attributes:
      arm: Name of the arm.
      slope: Slope of log(step of the peak) against log(batch size).
      seeds: Number of runs that have a peak.
      at_edge: Number of runs whose peak is at the first or the last probe.
      warmup: Warmup steps of the cells, least and most.
    """

    arm: str
    slope: Slope
    seeds: int
    at_edge: int
    warmup: str

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of the slope; None if there is none, or most peaks are at an edge."""
        if self.slope.low is None or self.slope.high is None or 2 * self.at_edge > self.seeds:
            return None
        return self.slope.low, self.slope.high


def lipschitz_peak_stays(study: Study) -> Claim | None:
    """Judge LEGW's explanation of its warmup by the probed Lipschitz constants.

    The measure is the slope of log(step of the peak) against log(batch size) of each arm under
    LEGW's warmup, 0 for the same step and -1 for the same epoch. The curvature follows the warmup,
    so arms with a warmup of constant epochs are no evidence. The claim holds if the 95 % intervals
    of all arms lie less than halfway from 0, and does not if all lie farther away. Otherwise it
    cannot be told; nor can it if an arm has most of its peaks at the first or the last probe.

    Returns:
      The claim; None if no such arm was probed at two batch sizes or more.

    References:
      You et al., Large-Batch Training for LSTM and Beyond, arXiv 1901.08256v1 [recalled 80%].
    """
    legw = [arm for arm in study.arms if arm.config.schedule.warmup_rule == "legw"]
    return judge_peaks([(arm.name, arm.cells) for arm in legw])


def judge_peaks(arms: list[tuple[str, tuple[CellResults, ...]]]) -> Claim | None:
    """Judge the peaks of arms, each its name and its cells; see `lipschitz_peak_stays`."""
    found = [
        _peaks(name, measured, place)
        for place, (name, cells) in enumerate(arms)
        if len(measured := [cell for cell in cells if cell.peaks]) > 1
    ]
    if not found:
        return None

    told = [one.interval for one in found if one.interval]
    near = [low > -_HALFWAY and high < _HALFWAY for low, high in told]
    far = [high < -_HALFWAY or low > _HALFWAY for low, high in told]
    verdict = UNKNOWN
    # An arm without an interval may contradict the others, so nothing is told without it.
    if len(told) == len(found):
        verdict = HELD if all(near) else NOT_HELD if all(far) else UNKNOWN

    exponents = ", ".join(
        say(_PEAKS, **{f.name: getattr(one, f.name) for f in dataclasses.fields(one)})
        for one in found
    )
    return judged(
        "lipschitz_peak_stays",
        verdict,
        _WHAT,
        f"in the arms with LEGW's warmup the step of its peak goes like {exponents}",
        "0 is the same step, -1 the same epoch",
    )


def _peaks(name: str, cells: list[CellResults], place: int) -> _Peaks:
    peaks = [peak for cell in cells for peak in cell.peaks]
    groups = [(cell.global_batch_size, [peak.step for peak in cell.peaks]) for cell in cells]
    return _Peaks(
        name,
        log_slope(groups, place),
        len(peaks),
        sum(peak.at_edge for peak in peaks),
        span(cell.first.warmup_steps for cell in cells),
    )
