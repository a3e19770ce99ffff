"""What the search tried over learning rate and warmup together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lbopt.report import page
from lbopt.sweep.findings.metric import Metric
from lbopt.sweep.report.figures import style
from lbopt.sweep.report.figures.search import Entry, best_by, searched
from lbopt.sweep.report.figures.style import Study

MOST_BATCHES = 4
_CROSS = {"marker": "x", "color": "#d55e00", "markersize": 7, "markeredgewidth": 2, "linestyle": "none"}


def section(study: Study) -> page.Section | None:
    """Draw validation over learning rate and warmup, heat maps of a grid and dots of sampled candidates."""
    arms = [arm for arm in study.arms if any(searched(point, "warmup") for point in arm["points"])]
    rows = arms[: style.MOST_PANEL_ROWS]
    if not rows:
        return None
    sizes = style.thinned(sorted({p["global_batch_size"] for arm in rows for p in arm["points"]}), MOST_BATCHES)
    figure, grid = style.panels(len(rows), len(sizes), 1.35, sharex="all", sharey="all")
    points = {(arm["arm"], p["global_batch_size"]): p for arm in rows for p in arm["points"]}
    shown = [(panel, points.get((arm["arm"], size))) for row, arm in zip(grid, rows, strict=True) for panel, size in zip(row, sizes, strict=True)]  # fmt: skip
    colours = _draw_all(study, shown)
    for panel, size in zip(grid[0], sizes, strict=True):
        panel.set_title(f"batch {size}", fontsize=8.5, loc="left")
    for row, arm in zip(grid, rows, strict=True):
        row[0].set_ylabel(arm["arm"], fontsize=7.5)
    style.below(grid, "rate / scaled rate")
    figure.supylabel("warmup / the rule's warmup", fontsize=9)
    bar = figure.colorbar(colours, ax=[panel for row in grid for panel in row], location="bottom", aspect=40, pad=0.02)
    bar.ax.tick_params(labelsize=style.SMALL)
    bar.set_label(f"validation {study.metric.name} worse than the panel's best by, {_unit(study.metric)}", fontsize=8)
    png = page.save_figure(figure, study.workdir / "learning_rate_and_warmup.png")
    alt = "Mean validation score over learning rate and warmup, a panel for each arm and batch size"
    notes = [_ABOUT, *style.left_out(len(rows) * len(sizes), len(arms) * len(study.sizes), "cells")]
    return page.Section("Learning rate and warmup", notes, pictures=[page.Picture(png, alt, wide=True)])


_ABOUT = (
    "A row for each arm; the cross is what was chosen, warmup 1 is the rule's own. Bright is the best of the panel; what is "
    "far behind has the darkest colour, what diverged is grey. Of sampled candidates the dots of shortened runs are small."
)


def _unit(metric: Metric) -> str:
    return "points" if metric.name == "accuracy" else "percent"


def _draw_all(study: Study, shown: Sequence[tuple[Any, Entry | None]]) -> Any:
    """Draw every panel on one colour scale, from its own best down to three quarters of all that was tried."""
    behind = sorted(loss for _, point in shown if point for _, loss in _losses(study, point) if math.isfinite(loss))
    scale = {"vmin": 0.0, "vmax": max(behind[3 * len(behind) // 4], 1e-6) if behind else 1.0, "cmap": "viridis_r"}
    draw = _heat_map if study.config["search"]["method"] == "grid" else _dots
    colours = None
    for panel, point in shown:
        panel.grid(False)
        if point is not None:
            colours = draw(panel, study, point, scale)
    return colours


def _losses(study: Study, point: Entry) -> list[tuple[Entry, float]]:
    """Return how much worse than the cell's best every candidate is; NaN for one that diverged."""
    name = f"validation_{study.metric.name}_mean"
    scores = [one[name] for one in point["search"] if one[name] is not None]
    best = (max if study.metric.name == "accuracy" else min)(scores, default=math.nan)
    return [
        (one, math.nan if one[name] is None or one["diverged"] else study.metric.worse_by(best, one[name]))
        for one in point["search"]
    ]


def _heat_map(panel: Any, study: Study, point: Entry, scale: Mapping[str, Any]) -> Any:
    rates, warmups = (
        sorted({one[f"{knob}_factor"] for one in point["search"]}) for knob in ("learning_rate", "warmup")
    )
    table = [[math.nan] * len(rates) for _ in warmups]
    losses = {id(one): loss for one, loss in _losses(study, point)}
    for one in best_by(point["search"], study.metric, ("learning_rate_factor", "warmup_factor")):
        table[warmups.index(one["warmup_factor"])][rates.index(one["learning_rate_factor"])] = losses[id(one)]
    panel.set_facecolor("#dddddd")
    image = panel.imshow(table, origin="lower", aspect="auto", **scale)
    panel.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates], rotation=90 if len(rates) > 3 else 0)
    panel.set_yticks(range(len(warmups)), [f"{warmup:g}" for warmup in warmups])
    panel.plot(rates.index(point["learning_rate_factor"]), warmups.index(point["warmup_factor"]), **_CROSS)
    return image


def _dots(panel: Any, study: Study, point: Entry, scale: Mapping[str, Any]) -> Any:
    tried = sorted(_losses(study, point), key=lambda pair: pair[0]["fidelity"])
    columns = [
        (one["learning_rate_factor"], one["warmup_factor"], loss, 4 + 18 * one["fidelity"]) for one, loss in tried
    ]
    finite = [column for column in columns if math.isfinite(column[2])]
    diverged = [column for column in columns if not math.isfinite(column[2])]
    panel.scatter([x for x, *_ in diverged], [y for _, y, *_ in diverged], c="#cccccc", s=[s for *_, s in diverged])
    xs, ys, losses, sizes = zip(*finite, strict=True) if finite else ((), (), (), ())
    dots = panel.scatter(xs, ys, c=losses, s=sizes, edgecolors="none", **scale)
    style.log_ticks(panel, "x")
    style.log_ticks(panel, "y")
    panel.plot(point["learning_rate_factor"], point["warmup_factor"], **_CROSS)
    return dots
