"""Figure of the distance of the parameters from their start."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from lbopt.report import _axes, _page
from lbopt.report.study import _style
from lbopt.report.study._read import mean_curve, positive
from lbopt.report.study._study import ArmResults, CellResults, Points, Study
from lbopt.report.study._words import number, span
from lbopt.sweep import Diffusion

_RUNS_AWAY = 10
"""A curve this many times as high as the median one leaves the panel with a linear axis."""
_FIT_POINTS = 50
_ABOUT = (
    "||w_t - w_0||, the mean over the final seeds, up to the last step that all of them took. On "
    "log-x axes a straight line is log t (ultra-slow diffusion), on log-log axes a power of t. The "
    "dashed lines are fits from the end of warmup: log t on the left, t^p on the right. Both have "
    "two parameters. The table has R^2 of both and the exponent, means over the seeds."
)
_HEADER = (
    "arm",
    "batch",
    "distance at the end",
    "R^2 of log t",
    "R^2 of t^p",
    "exponent p",
    "better",
)
Curves = Mapping[int, Points]


def diffusion(study: Study, folder: pathlib.Path) -> _page.Section | None:
    """Draw ||w_t - w_0|| on log-x and on log-log axes with the fits, a row of panels for each arm.

    Returns:
      The section with a table of the fits; None if no distance was measured.
    """
    curves = {arm.name: _curves(arm) for arm in study.measured}
    having = [arm for arm in study.measured if curves[arm.name]]
    arms = having[: _style.MOST_PANEL_ROWS]
    if not arms:
        return None

    figure, grid = _style.panels(len(arms), 2, sharex=True)
    for (left, right), arm in zip(grid, arms, strict=True):
        _draw_log_x(left, study, arm, curves[arm.name])
        _draw_log_log(right, study, arm, curves[arm.name])
    _style.batch_legend(figure, study, dashed="fitted curve")
    _style.below(grid, "optimizer step t")
    figure.supylabel("distance from the start, ||w_t - w_0||", fontsize=9)

    alt = (
        "Distance of the parameters from their start over the steps, on log-x and log-log axes, "
        "a row for each arm"
    )
    return _page.Section(
        "Diffusion",
        [_ABOUT, *_style.left_out(len(arms), len(having), "arms")],
        pictures=[_style.picture(figure, folder / "diffusion.png", alt, wide=True)],
        header=_HEADER,
        rows=[row for arm in study.measured for row in _rows(arm)],
        colours=_style.colours(study.measured),
    )


def _curves(arm: ArmResults) -> Curves:
    found = {cell.global_batch_size: positive(_distance(cell)) for cell in arm.cells}
    return {size: curve for size, curve in found.items() if curve}


def _distance(cell: CellResults) -> Points:
    return mean_curve((run.curve.step, run.curve.distance) for run in cell.final if run.curve)


# ---- panels


def _draw_log_x(panel: Any, study: Study, arm: ArmResults, curves: Curves) -> None:
    """Draw distance against log t; curves rise to the right, so the top left is free for text."""
    _draw_curves(panel, study, curves)
    _style.title(panel, f"{arm.name} (log-x)")
    tops = {size: max(distance for _, distance in curve) for size, curve in curves.items()}
    away = _running_away(tops)
    kept = {size: curve for size, curve in curves.items() if size not in away}
    top = max(tops[size] for size in kept)
    panel.set_ylim(-0.05 * top, 1.2 * top)

    told = [
        _r2("log t", [cell.diffusion.log_r2 for cell in arm.cells if cell.diffusion]),
        *(f"batch {size} reaches {tops[size]:,.0f}" for size in away),
    ]
    panel.text(0.03, 0.97, "\n".join(told), transform=panel.transAxes, va="top", fontsize=7)
    _draw_fits(panel, study, arm, kept, _log_fit)


def _draw_log_log(panel: Any, study: Study, arm: ArmResults, curves: Curves) -> None:
    """Draw log distance against log t; the bottom right is free for text."""
    _draw_curves(panel, study, curves)
    _axes.log_ticks(panel, "y")
    _style.title(panel, f"{arm.name} (log-log)")
    told = _r2("t^p", [cell.diffusion.power_r2 for cell in arm.cells if cell.diffusion])
    panel.text(0.98, 0.03, told, transform=panel.transAxes, ha="right", va="bottom", fontsize=7)
    _draw_fits(panel, study, arm, curves, _power_fit)


def _draw_curves(panel: Any, study: Study, curves: Curves) -> None:
    for size, curve in curves.items():
        panel.plot(*zip(*curve, strict=True), color=_style.batch_shade(study, size), linewidth=1.3)
    _axes.log_ticks(panel, "x")


def _running_away(tops: Mapping[int, float]) -> list[int]:
    """Return the batch sizes whose curves would flatten all others.

    >>> _running_away({16: 12.0, 128: 20.0, 1024: 12000.0}), _running_away({16: 12.0, 128: 50.0})
    ([1024], [])
    """
    middle = statistics.median_low(tops.values())
    return [size for size, top in tops.items() if top > _RUNS_AWAY * middle]


def _r2(what: str, found: list[float]) -> str:
    return f"R² of {what}: {span(found, '{:.2f}')}" if found else ""


def _log_fit(fit: Diffusion, steps: np.ndarray) -> np.ndarray:
    return fit.log.intercept + fit.log.slope * np.log(steps)


def _power_fit(fit: Diffusion, steps: np.ndarray) -> np.ndarray:
    return fit.power.scale * steps**fit.power.exponent


def _draw_fits(panel: Any, study: Study, arm: ArmResults, curves: Curves, values: Any) -> None:
    """Draw the mean over seeds of the fitted curves, at steps that all fits cover.

    The limits of the axes stay.
    """
    panel.autoscale(False)
    for cell in arm.cells:
        if (curve := curves.get(cell.global_batch_size)) is None:
            continue
        fits = [run.diffusion for run in cell.final if run.diffusion]
        first = max((fit.from_step for fit in fits), default=curve[-1][0])
        last = min([curve[-1][0], *(fit.to_step for fit in fits)])
        colour = _style.batch_shade(study, cell.global_batch_size)
        steps = np.geomspace(first, last, _FIT_POINTS) if last > first else np.array([])
        heights = np.mean([values(fit, steps) for fit in fits], axis=0) if len(steps) else steps
        panel.plot(steps, heights, color=colour, linewidth=0.9, linestyle="--")


# ---- table


def _rows(arm: ArmResults) -> Iterable[list[str]]:
    for cell in arm.cells:
        if fit := cell.diffusion:
            numbers = [f"{fit.log_r2:.4f}", f"{fit.power_r2:.4f}", f"{fit.exponent:.3f}"]
            better = "log t" if fit.log_r2 > fit.power_r2 else "t^p"
            end = number(cell.distance, 4)
            yield [arm.name, str(cell.global_batch_size), end, *numbers, better]
