"""How far the parameters moved from where they began."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lbopt.report import page
from lbopt.sweep.findings.points import average
from lbopt.sweep.report.figures import style
from lbopt.sweep.report.figures.style import Study


def section(study: Study) -> page.Section | None:
    """Draw ||w_t - w_0|| over t on log-x and on log-log axes, a row of panels for each arm.

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
    for row, arm in zip(grid, arms, strict=True):
        for panel, vertical in zip(row, ("linear", "log"), strict=True):
            for size, curve in curves[arm["arm"]].items():
                panel.plot(*zip(*curve, strict=True), color=study.shade(size), linewidth=1.3)
            style.log_ticks(panel, "x")
            if vertical == "log":
                style.log_ticks(panel, "y")
            panel.set_title(f"{arm['arm']} ({'log-log' if vertical == 'log' else 'log-x'})", fontsize=9, loc="left")
    style.batch_legend(figure, study, study.sizes)
    style.below(grid, "optimizer step t")
    figure.supylabel("distance from the start", fontsize=9)
    alt = "Distance of the parameters from their start over the steps, on log-x and log-log axes, a row for each arm"
    png = page.save_figure(figure, study.workdir / "diffusion.png")
    rows = [row for arm in study.arms for row in _rows(arm)]
    notes = [_ABOUT, *style.left_out(len(arms), len(measured), "arms")]
    return page.Section("Diffusion", notes, pictures=[page.Picture(png, alt, wide=True)], header=_HEADER, rows=rows)


_ABOUT = (
    "||w_t - w_0||, the mean over the final seeds. On log-x axes a straight line is log t (ultra-slow diffusion), on log-log axes a "
    "power of t. The table has the fits, each with two parameters, the mean over seeds of R^2 and of the exponent."
)
_HEADER = ("arm", "batch", "distance at the end", "R^2 of log t", "R^2 of t^p", "exponent p", "better")


def _curves(study: Study, arm: Mapping[str, Any]) -> dict[int, list[tuple[int, float]]]:
    found = {}
    for point in arm["points"]:
        size = point["global_batch_size"]
        final = study.cells[arm["arm"], size].final
        curve = average([row["curve"] for row in final if row.get("curve")], "distance")
        positive = [(step, distance) for step, distance in curve if distance > 0]
        if positive:
            found[size] = positive
    return found


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
