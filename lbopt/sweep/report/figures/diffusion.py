"""How far the parameters moved from where they began."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lbopt.report import page
from lbopt.sweep.report.figures import style
from lbopt.sweep.report.figures.curves import Curve, mean_curve, positive, series_of
from lbopt.sweep.report.figures.style import Study

_RUNS_AWAY = 10
"""A curve that gets so many times as far as the middle one leaves the panel whose axis is not logarithmic."""
_FIT_POINTS = 50


def section(study: Study) -> page.Section | None:
    """Draw ||w_t - w_0|| over t on log-x and on log-log axes with the fitted curves, a row of panels for each arm.

    Args:
      study: what is drawn.

    Returns:
      A section with `diffusion.png` and a table of the fits; None if no distance was measured.
    """
    curves = {arm["arm"]: _curves(study, arm) for arm in study.arms}
    measured = [arm for arm in study.arms if curves[arm["arm"]]]
    arms = measured[: style.MOST_PANEL_ROWS]
    if not arms:
        return None
    figure, grid = style.panels(len(arms), 2, sharex=True)
    for (left, right), arm in zip(grid, arms, strict=True):
        _draw_log_x(left, study, arm, curves[arm["arm"]])
        _draw_log_log(right, study, arm, curves[arm["arm"]])
    style.batch_legend(figure, study, study.sizes, dashed="fitted curve")
    style.below(grid, "optimizer step t")
    figure.supylabel("distance from the start, ||w_t - w_0||", fontsize=9)
    alt = "Distance of the parameters from their start over the steps, on log-x and log-log axes, a row for each arm"
    png = page.save_figure(figure, study.workdir / "diffusion.png")
    rows = [row for arm in study.arms for row in _rows(arm)]
    notes = [_ABOUT, *style.left_out(len(arms), len(measured), "arms")]
    return page.Section(
        "Diffusion", notes, pictures=[page.Picture(png, alt, wide=True)], header=_HEADER, rows=rows
    )


_ABOUT = (
    "||w_t - w_0||, the mean over the final seeds, up to the last step that all of them took. On log-x axes a straight line is log t (ultra-slow "
    "diffusion), on log-log axes a power of t; dashed is the fit of log t on the left and of t^p on the right, from the end of warmup on. The table "
    "has the fits, each with two parameters, the mean over seeds of R^2 and of the exponent."
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


def _curves(study: Study, arm: Mapping[str, Any]) -> dict[int, Curve]:
    sizes = [point["global_batch_size"] for point in arm["points"]]
    found = {
        size: positive(mean_curve(series_of(study, arm, size, "curve"), "distance"))
        for size in sizes
    }
    return {size: curve for size, curve in found.items() if curve}


# ---- panels


def _draw_log_x(
    panel: Any, study: Study, arm: Mapping[str, Any], curves: Mapping[int, Curve]
) -> None:
    """Draw distance against log t; curves rise to the right, so there is room for words at the top left."""
    _draw_curves(panel, study, curves)
    panel.set_title(
        style.label(f"{arm['arm']} (log-x)", style.TITLE_LETTERS), fontsize=9, loc="left"
    )
    tops = {size: max(distance for _, distance in curve) for size, curve in curves.items()}
    away = _running_away(tops)
    top = max(top for size, top in tops.items() if size not in away)
    panel.set_ylim(-0.05 * top, 1.2 * top)
    told = [_said_of(arm, "log"), *(f"batch {size} goes on to {tops[size]:,.0f}" for size in away)]
    panel.text(0.03, 0.97, "\n".join(told), transform=panel.transAxes, va="top", fontsize=7)
    _draw_fits(
        panel,
        study,
        arm,
        "log",
        {size: curve for size, curve in curves.items() if size not in away},
    )


def _draw_log_log(
    panel: Any, study: Study, arm: Mapping[str, Any], curves: Mapping[int, Curve]
) -> None:
    """Draw log distance against log t; there is room for words at the bottom right."""
    _draw_curves(panel, study, curves)
    style.log_ticks(panel, "y")
    panel.set_title(
        style.label(f"{arm['arm']} (log-log)", style.TITLE_LETTERS), fontsize=9, loc="left"
    )
    told = _said_of(arm, "power")
    panel.text(0.98, 0.03, told, transform=panel.transAxes, ha="right", va="bottom", fontsize=7)
    _draw_fits(panel, study, arm, "power", curves)


def _draw_curves(panel: Any, study: Study, curves: Mapping[int, Curve]) -> None:
    for size, curve in curves.items():
        panel.plot(*zip(*curve, strict=True), color=study.shade(size), linewidth=1.3)
    style.log_ticks(panel, "x")


def _running_away(tops: Mapping[int, float]) -> list[int]:
    """Return the batch sizes whose curves would flatten all others.

    >>> _running_away({16: 12.0, 128: 20.0, 1024: 12000.0}), _running_away({16: 12.0, 128: 50.0})
    ([1024], [])
    """
    middle = statistics.median_low(tops.values())
    return [size for size, top in tops.items() if top > _RUNS_AWAY * middle]


def _draw_fits(
    panel: Any, study: Study, arm: Mapping[str, Any], kind: str, curves: Mapping[int, Curve]
) -> None:
    """Draw the fits of an arm's cells without moving the axes."""
    panel.autoscale(False)
    for size, curve in curves.items():
        fits = [
            row["diffusion"] for row in study.cells[arm["arm"], size].final if row.get("diffusion")
        ]
        panel.plot(
            *_fitted(fits, kind, curve[-1][0]),
            color=study.shade(size),
            linewidth=0.9,
            linestyle="--",
        )


def _said_of(arm: Mapping[str, Any], kind: str) -> str:
    """Return the R^2 of all fits of one kind, "" if there are none."""
    found = [point["diffusion"][f"{kind}_r2"] for point in arm["points"] if point["diffusion"]]
    return f"R² of {'log t' if kind == 'log' else 't^p'}: {_span(found)}" if found else ""


def _fitted(
    fits: Sequence[Mapping[str, Any]], kind: str, drawn_to: int
) -> tuple[list[float], list[float]]:
    """Return the mean over seeds of the fitted curves, over the steps that all of them were fitted to and that are drawn.

    >>> fit = {"from_step": 1, "to_step": 100, "log": {"intercept": 2.0, "slope": 0.5}}
    >>> steps, distances = _fitted([fit], "log", 100)
    >>> round(steps[-1]), round(distances[0], 3), round(distances[-1], 3)
    (100, 2.0, 4.303)
    """
    first = max((fit["from_step"] for fit in fits), default=drawn_to)
    last = min([drawn_to, *(fit["to_step"] for fit in fits)])
    if last <= first:
        return [], []
    steps = [first * (last / first) ** (place / (_FIT_POINTS - 1)) for place in range(_FIT_POINTS)]
    return steps, [statistics.fmean(_value(fit[kind], step) for fit in fits) for step in steps]


def _value(fit: Mapping[str, float], step: float) -> float:
    if "slope" in fit:
        return fit["intercept"] + fit["slope"] * math.log(step)
    return fit["scale"] * step ** fit["exponent"]


def _span(values: Sequence[float]) -> str:
    """Return the least and the largest value, one where they are shown alike.

    >>> _span([0.771, 0.953]), _span([0.951, 0.953])
    ('0.77 to 0.95', '0.95')
    """
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


# ---- table


def _rows(arm: Mapping[str, Any]) -> list[list[str]]:
    found = []
    for point in arm["points"]:
        fit = point["diffusion"]
        if fit:
            end = "" if point["distance_mean"] is None else f"{point['distance_mean']:.4g}"
            numbers = [f"{fit['log_r2']:.4f}", f"{fit['power_r2']:.4f}", f"{fit['exponent']:.3f}"]
            better = "log t" if fit["log_r2"] > fit["power_r2"] else "t^p"
            found.append([arm["arm"], str(point["global_batch_size"]), end, *numbers, better])
    return found
