"""What was probed in the final runs of a cell: gradient noise, curvature along the gradient, disagreement of halves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lbopt.sweep.findings.metric import Row, mean

Probes = Mapping[str, Any]


def probed(final: Sequence[Row]) -> dict[str, Any]:
    """Return what the probes of a cell came to, as JSON data.

    Args:
      final: the final rows of a cell.

    Returns:
      `{"noise_scale" (in examples, see `noise_scales`: the median over the steps), "noise_scale_range" ([least, largest] over
      the steps), "noise_scale_over_steps" ({"step", "noise_scale"}), "lipschitz_peak_step" (of the mean over the seeds),
      "lipschitz_first_step", "lipschitz_steps" (all that were probed), "lipschitz_peaks" ({"step", "at_edge"} of every seed that
      did not diverge: where its constant is largest, and whether that is at its first or its last probe), "phi_mean"}`.
      Null is what was not measured; a noise scale of null in the range or over the steps, or a median of null where there are
      steps, is infinite.
    """
    found = [row["probes"] for row in final if row.get("probes")]
    lipschitz = _means(found, "lipschitz")
    peaks = [
        peak for row in final if not row["diverged"] and (peak := _peak(row.get("probes") or {}))
    ]
    return {
        **_noise(noise_scales(found)),
        "lipschitz_peak_step": max(lipschitz, key=lambda pair: pair[1], default=(None, None))[0],
        "lipschitz_first_step": lipschitz[0][0] if lipschitz else None,
        "lipschitz_steps": [step for step, _ in lipschitz],
        "lipschitz_peaks": peaks,
        "phi_mean": mean(value for _, value in _means(found, "phi")),
    }


def noise_scales(probes: Sequence[Probes]) -> list[tuple[int, float]]:
    """Return the gradient noise scale tr(Sigma) / |G|^2 of every probed step, in examples.

    At each step it is the sum of the traces over the seeds by the sum of the squared norms, as single estimates of the
    latter scatter widely and may be negative: the mean of their ratios would mean nothing. Where the sum is not positive,
    no signal is told from the noise, and the scale is infinite.

    The noise scale grows during training by orders of magnitude, as |G|^2 falls. Sums over all steps would be those of the
    first few, so a run is described by the median over its probed steps; these are log-spaced, so that every stretch of
    log t weighs alike.

    Args:
      probes: of every seed; a step at which a seed has no number is one of the others.

    Returns:
      (step, noise scale), ascending in the step.

    >>> noise_scales([{"step": [1, 9], "noise_trace": [8.0, 6.0], "gradient_square_norm": [2.0, -1.0]}])
    [(1, 4.0), (9, inf)]

    References:
      McCandlish et al., An Empirical Model of Large-Batch Training, arXiv 1812.06162: the scale grows during training
      [recalled 90%].
    """
    traces = by_step(probes, lambda one: _paired(one, "noise_trace"))
    norms = by_step(probes, lambda one: _paired(one, "gradient_square_norm"))
    return [(step, _ratio(math.fsum(traces[step]), math.fsum(norms[step]))) for step in traces]


def _paired(probe: Probes, name: str) -> list[float | None]:
    """Return a column of the two of the noise scale, without the numbers whose other one is missing."""
    columns = [probe.get(one) or () for one in ("noise_trace", "gradient_square_norm")]
    whole = [None not in pair for pair in zip(*columns, strict=False)]
    return [
        value if kept else None for value, kept in zip(probe.get(name) or (), whole, strict=False)
    ]


def _ratio(trace: float, square_norm: float) -> float:
    return trace / square_norm if square_norm > 0 else math.inf


def _noise(scales: Sequence[tuple[int, float]]) -> dict[str, Any]:
    steps, values = [step for step, _ in scales], [value for _, value in scales]
    return {
        "noise_scale": _finite(statistics.median(values)) if values else None,
        "noise_scale_range": [_finite(min(values)), _finite(max(values))] if values else None,
        "noise_scale_over_steps": {"step": steps, "noise_scale": [*map(_finite, values)]}
        if values
        else None,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _peak(probe: Probes) -> dict[str, Any] | None:
    """Return where the curvature along the gradient is largest in a run, None if it was not probed twice."""
    curve = [(value, step) for step, value in zip(probe.get("step", ()), probe.get("lipschitz") or (), strict=False) if value is not None]  # fmt: skip
    if len(curve) < 2:
        return None
    _, peak = max(curve, key=lambda pair: pair[0])
    return {"step": peak, "at_edge": peak in (curve[0][1], curve[-1][1])}


def by_step(
    series: Iterable[Mapping[str, Any]],
    column: Callable[[Mapping[str, Any]], Sequence[float | None]],
) -> dict[int, list[float]]:
    """Return the numbers of all seeds at every step at which one has a number, ascending in the step.

    Args:
      series: `{"step": [...], ...}` of every seed.
      column: one of them -> a number for each step, None where there is none.

    >>> by_step([{"step": [1, 2], "x": [1.0, 2.0]}, {"step": [1, 2], "x": [3.0, None]}], lambda one: one["x"])
    {1: [1.0, 3.0], 2: [2.0]}
    """
    found: dict[int, list[float]] = {}
    for one in series:
        for step, value in zip(one["step"], column(one), strict=False):
            if value is not None:
                found.setdefault(step, []).append(value)
    return dict(sorted(found.items()))


def _means(probes: Iterable[Probes], name: str) -> list[tuple[int, float]]:
    found = by_step(probes, lambda one: one.get(name) or [])
    return [(step, statistics.fmean(values)) for step, values in found.items()]
