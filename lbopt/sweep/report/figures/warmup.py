"""What the search tried over learning rate and warmup together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lbopt.report import page
from lbopt.sweep.findings.metric import Metric
from lbopt.sweep.findings.points import cut_warmups, search_of
from lbopt.sweep.report.figures import style
from lbopt.sweep.report.figures.search import Entry, best_by, searched
from lbopt.sweep.report.figures.style import Study

MOST_BATCHES = 4
_CROSS = {
    "marker": "x",
    "color": "#d55e00",
    "markersize": 7,
    "markeredgewidth": 2,
    "linestyle": "none",
}


def section(study: Study) -> page.Section | None:
    """Draw validation over learning rate and warmup, heat maps of a grid and dots of sampled candidates.

    Args:
      study: what is drawn, at four batch sizes at most.

    Returns:
      A section with `learning_rate_and_warmup.png`; None if no arm tried more than one warmup.
    """
    arms = [arm for arm in study.arms if any(searched(point, "warmup") for point in arm["points"])]
    rows = arms[: style.MOST_PANEL_ROWS]
    if not rows:
        return None
    sizes = style.thinned(
        sorted({p["global_batch_size"] for arm in rows for p in arm["points"]}), MOST_BATCHES
    )
    drawn = [[_point(arm, size) for size in sizes] for arm in rows]
    share = _shared(study, rows, drawn)
    figure, grid = style.panels(len(rows), len(sizes), 1.35, sharex=share, sharey=share)
    colours = _draw_all(study, rows, grid, drawn)
    for panel, size in zip(grid[0], sizes, strict=True):
        panel.set_title(f"batch {size}", fontsize=8.5, loc="left")
    for row, arm in zip(grid, rows, strict=True):
        row[0].set_ylabel(style.label(arm["arm"], 20), fontsize=7.5)
    style.below(grid, "rate / scaled rate")
    figure.supylabel("warmup / the rule's warmup", fontsize=9)
    bar = figure.colorbar(
        colours, ax=[panel for row in grid for panel in row], location="bottom", aspect=40, pad=0.02
    )
    bar.ax.tick_params(labelsize=style.SMALL)
    bar.set_label(
        f"validation {study.metric.name} worse than the panel's best by, {_unit(study.metric)}",
        fontsize=8,
    )
    png = page.save_figure(figure, study.workdir / "learning_rate_and_warmup.png")
    alt = "Mean validation score over learning rate and warmup, a panel for each arm and batch size"
    notes = [_ABOUT, *style.left_out(len(rows) * len(sizes), len(arms) * len(study.sizes), "cells")]
    return page.Section(
        "Learning rate and warmup", notes, pictures=[page.Picture(png, alt, wide=True)]
    )


_ABOUT = (
    "A row for each arm; the cross is what was chosen, warmup 1 is the rule's own. Bright is the best of the panel; what is "
    "far behind has the darkest colour, what diverged is grey. Of sampled candidates the dots of shortened runs are small. A warmup "
    "with * would outlast that run and ends one step before it."
)


def _unit(metric: Metric) -> str:
    return "points" if metric.name == "accuracy" else "percent"


def _point(arm: Entry, size: int) -> Entry | None:
    return next((point for point in arm["points"] if point["global_batch_size"] == size), None)


def _is_grid(study: Study, arm: Entry) -> bool:
    return bool(search_of(study.config, arm["arm"])["method"] == "grid")


def _shared(study: Study, arms: Sequence[Entry], drawn: Sequence[Sequence[Entry | None]]) -> str:
    """Return which panels have the same axes: a heat map's are the places in its own grid, so all, a row or none."""
    rows = [
        {
            tuple(map(tuple, _grid(point))) if _is_grid(study, arm) else ()
            for point in row
            if point is not None
        }
        for arm, row in zip(arms, drawn, strict=True)
    ]
    if len(set().union(*rows)) == 1:
        return "all"
    return "row" if all(len(row) == 1 for row in rows) else "none"


def _grid(point: Entry) -> list[list[float]]:
    """Return the factors of the learning rate and of the warmup that were tried, each ascending."""
    return [
        sorted({one[f"{knob}_factor"] for one in point["search"]})
        for knob in ("learning_rate", "warmup")
    ]


def _draw_all(
    study: Study,
    arms: Sequence[Entry],
    grid: Sequence[Sequence[Any]],
    drawn: Sequence[Sequence[Entry | None]],
) -> Any:
    """Draw every panel on one colour scale, from its own best down to three quarters of all that was tried."""
    points = [point for row in drawn for point in row if point is not None]
    behind = sorted(
        loss for point in points for _, loss in _losses(study, point) if math.isfinite(loss)
    )
    scale = {
        "vmin": 0.0,
        "vmax": max(behind[3 * len(behind) // 4], 1e-6) if behind else 1.0,
        "cmap": "viridis_r",
    }
    bottom = _bottom(points)
    colours = None
    for arm, panels, row in zip(arms, grid, drawn, strict=True):
        for panel, point in zip(panels, row, strict=True):
            panel.grid(False)
            if point is None:
                panel.set_visible(False)
            elif _is_grid(study, arm):
                colours = _heat_map(panel, study, point, scale)
            else:
                colours = _dots(panel, study, point, scale, bottom)
    for panel in [
        panel
        for arm, row in zip(arms, grid, strict=True)
        for panel in row
        if not _is_grid(study, arm)
    ]:
        _name_zero(panel, bottom, points)
    return colours


def _bottom(points: Sequence[Entry]) -> float:
    """Return where warmup 0 is drawn on a logarithmic axis: below all others."""
    return 0.5 * min((y for point in points for y in _grid(point)[1] if y > 0), default=1.0)


def _name_zero(panel: Any, bottom: float, points: Sequence[Entry]) -> None:
    """Name the lowest place of a logarithmic axis 0, if there is a warmup of 0; call it when all is drawn."""
    if any(0 in _grid(point)[1] for point in points):
        high = panel.get_ylim()[1]
        ticks = [tick for tick in panel.get_yticks() if 1.5 * bottom < tick <= high]
        panel.set_yticks([bottom, *ticks], ["0", *(f"{tick:g}" for tick in ticks)])


def _losses(study: Study, point: Entry) -> list[tuple[Entry, float]]:
    """Return how much worse than the cell's best every candidate is; NaN for one that diverged."""
    name = f"validation_{study.metric.name}_mean"
    scores = [one[name] for one in point["search"] if one[name] is not None]
    best = (max if study.metric.name == "accuracy" else min)(scores, default=math.nan)
    return [
        (
            one,
            math.nan
            if one[name] is None or one["diverged"]
            else study.metric.worse_by(best, one[name]),
        )
        for one in point["search"]
    ]


def _heat_map(panel: Any, study: Study, point: Entry, scale: Mapping[str, Any]) -> Any:
    rates, warmups = _grid(point)
    table = [[math.nan] * len(rates) for _ in warmups]
    losses = {id(one): loss for one, loss in _losses(study, point)}
    for one in best_by(point["search"], study.metric, ("learning_rate_factor", "warmup_factor")):
        table[warmups.index(one["warmup_factor"])][rates.index(one["learning_rate_factor"])] = (
            losses[id(one)]
        )
    panel.set_facecolor("#dddddd")
    image = panel.imshow(table, origin="lower", aspect="auto", **scale)
    panel.set_xticks(
        range(len(rates)), [f"{rate:g}" for rate in rates], rotation=90 if len(rates) > 3 else 0
    )
    panel.set_yticks(range(len(warmups)), [f"{warmup:g}" for warmup in warmups])
    for warmup in cut_warmups(point["search"]):
        panel.text(
            1.02,
            warmups.index(warmup),
            "*",
            transform=panel.get_yaxis_transform(),
            va="center",
            fontsize=style.SMALL,
        )
    if point["learning_rate_factor"] in rates and point["warmup_factor"] in warmups:
        panel.plot(
            rates.index(point["learning_rate_factor"]),
            warmups.index(point["warmup_factor"]),
            **_CROSS,
        )
    return image


def _dots(panel: Any, study: Study, point: Entry, scale: Mapping[str, Any], bottom: float) -> Any:
    tried = sorted(_losses(study, point), key=lambda pair: pair[0]["fidelity"])
    columns = [
        (
            one["learning_rate_factor"],
            one["warmup_factor"] or bottom,
            loss,
            4 + 18 * one["fidelity"],
        )
        for one, loss in tried
    ]
    finite = [column for column in columns if math.isfinite(column[2])]
    diverged = [column for column in columns if not math.isfinite(column[2])]
    panel.scatter(
        [x for x, *_ in diverged],
        [y for _, y, *_ in diverged],
        c="#cccccc",
        s=[s for *_, s in diverged],
    )
    xs, ys, losses, sizes = zip(*finite, strict=True) if finite else ((), (), (), ())
    dots = panel.scatter(xs, ys, c=losses, s=sizes, edgecolors="none", **scale)
    style.log_ticks(panel, "x")
    style.log_ticks(panel, "y")
    panel.plot(point["learning_rate_factor"], point["warmup_factor"] or bottom, **_CROSS)
    return dots
