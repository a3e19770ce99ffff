"""Whether the distance from the start grows like the logarithm of the steps."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lbopt.sweep.findings.metric import ACCURACY, Metric
from lbopt.sweep.findings.names import arm_name, listed
from lbopt.sweep.findings.verdicts import HELD, NOT_HELD, UNKNOWN, Arms, Claim, said

_FITS = 0.95
_TRAINED = 0.9
_WHAT = "diffusion is ultra-slow, the distance from the start growing like log t,"
_CURVES = {1: "log t", -1: "a power of t"}


class _Cells(NamedTuple):
    """The cells of an arm, or of several.

    Attributes:
      names: of the arms.
      fits: means over the seeds, of the cells that count.
      diverged: how many do not, as a seed diverged.
      untrained: how many do not, as the training accuracy stayed too low.
    """

    names: list[str]
    fits: list[Mapping[str, float]]
    diverged: int
    untrained: int

    def count(self, sign: int) -> int:
        """Count the cells that speak for log t (1) or for a power of t (-1)."""
        return sum(_speaks(fit) == sign for fit in self.fits)

    @property
    def sign(self) -> int:
        """What most cells speak for; 0 if most speak for neither."""
        return next((sign for sign in (1, -1) if 2 * self.count(sign) > len(self.fits)), 0)


def diffusion_is_logarithmic(
    arms: Arms, metric: Metric = ACCURACY, rates_fall: int = 0
) -> Claim | None:
    """Hold the claim that the distance from the start grows like log t against the fits of log t and of a power of t.

    Both fits have two parameters, so the one with the larger R^2 is the better; but a cell speaks for neither if that R^2
    is below 0.95, as the better of two bad fits describes nothing. The claim holds if most cells speak for log t, and does
    not if most speak for a power of t. Where at least a third of the arms say the opposite of that, it cannot be told.

    Cells in which a final seed diverged do not count, nor do those of classifiers that got less than 90 % of the training
    set right: how far a run goes that does not train is not what the claim is about.

    Args:
      arms: of a summary, with constant rates: of a rate that falls the distance grows ever more slowly anyway.
      metric: what the study is judged by.
      rates_fall: how many arms are not among them for that.

    Returns:
      The claim; None if no cell has fits.

    References:
      Hoffer et al., arXiv 1705.08741 [recalled 80%]; contradicted by You et al., The Limit of the Batch Size, arXiv 2006.08517.
    """
    cells = [
        _cells_of(arm, metric) for arm in arms if any(point["diffusion"] for point in arm["points"])
    ]
    if not cells:
        return None
    every = _all(cells)
    judged = [one for one in cells if one.fits]
    notes = _notes(every, rates_fall)
    if not every.fits:
        return said(
            "diffusion_is_logarithmic",
            UNKNOWN,
            _WHAT,
            "; ".join(["there is no cell to judge by", *notes]),
        )
    against = [one.names[0] for one in judged if every.sign and one.sign == -every.sign]
    verdict = (
        {1: HELD, 0: UNKNOWN, -1: NOT_HELD}[every.sign]
        if 3 * len(against) < len(judged)
        else UNKNOWN
    )
    but = [f"but for {listed(against)} it is {_CURVES[-every.sign]}"] if against else []
    return said(
        "diffusion_is_logarithmic", verdict, _WHAT, "; ".join([_numbers(every), *but, *notes])
    )


def _cells_of(arm: Mapping[str, Any], metric: Metric) -> _Cells:
    points = [point for point in arm["points"] if point["diffusion"]]
    whole = [point for point in points if not point["diverged"]]
    kept = [point["diffusion"] for point in whole if metric is not ACCURACY or _is_trained(point)]
    return _Cells([arm_name(arm)], kept, len(points) - len(whole), len(whole) - len(kept))


def _all(cells: Sequence[_Cells]) -> _Cells:
    names, fits, diverged, untrained = zip(*cells, strict=True)
    return _Cells(
        [*itertools.chain(*names)], [*itertools.chain(*fits)], sum(diverged), sum(untrained)
    )


def _is_trained(point: Mapping[str, Any]) -> bool:
    accuracy = point["train_accuracy_mean"]
    return accuracy is None or accuracy >= _TRAINED


def _speaks(fit: Mapping[str, float]) -> int:
    """Return 1 if log t describes the distance, -1 if a power of t does, 0 if neither."""
    if max(fit["log_r2"], fit["power_r2"]) < _FITS:
        return 0
    return 1 if fit["log_r2"] > fit["power_r2"] else -1


def _numbers(cells: _Cells) -> str:
    log_r2, power_r2, exponent = (
        statistics.median(fit[name] for fit in cells.fits)
        for name in ("log_r2", "power_r2", "exponent")
    )
    count = len(cells.fits)
    found = f"log t is the better fit, with R^2 of at least {_FITS:g}, in {cells.count(1)} of {count} cell{'s' * (count > 1)}, a power of t in {cells.count(-1)}"
    found += f" (median R^2 {log_r2:.4f} against {power_r2:.4f}; median exponent {exponent:.2f})"
    return found if cells.sign else f"neither fits most cells: {found}"


def _notes(cells: _Cells, rates_fall: int) -> list[str]:
    """Count what was left out."""
    counts = {
        "left out, as a seed diverged": cells.diverged,
        f"left out, as training accuracy stayed under {100 * _TRAINED:.0f} %": cells.untrained,
    }
    notes = [f"{count} cell{'s' * (count > 1)} {why}" for why, count in counts.items() if count]
    falling = f"{rates_fall} arm{'s' * (rates_fall > 1)} not judged, as the rate falls"
    return [*notes, falling] if rates_fall else notes
