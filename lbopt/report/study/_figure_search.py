"""Figures of the search: validation over learning rate, and over rate and warmup together."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lbopt.report import _axes, _colours, _page
from lbopt.report.study import _style
from lbopt.report.study._metric import Metric
from lbopt.report.study._study import ArmResults, Candidate, CellResults, Study
from lbopt.report.study._words import count

_NOTE = (
    "The horizontal axis is the learning rate divided by the rate that the arm's scaling rule "
    "gives; a rule that transfers keeps the peak at the same place. A ring marks what was chosen."
)
_BEST = (
    "Warmup or weight decay was searched too: where a learning rate was tried with several, the "
    "best of them is drawn."
)


def learning_rates(study: Study, folder: pathlib.Path) -> _page.Section | None:
    """Draw validation over the learning-rate factor of runs of full length, a panel for each arm.

    Returns:
      The section; None if no arm tried more than one learning rate.
    """
    searching = [arm for arm in study.measured if _searched(arm, "learning_rate")]
    arms = searching[: 2 * _style.MOST_PANEL_ROWS]
    if not arms:
        return None

    figure, grid, shown = _style.two_columns(len(arms))
    for panel, arm in zip(shown, arms, strict=True):
        for cell in arm.cells:
            # Only a grid tries every rate with the same other factors, so that a line is a curve.
            _draw_rates(panel, study, cell, joined=arm.search.method == "grid")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        _style.title(panel, arm.name)

    _style.score_axis(shown[0], study.metric)
    _style.batch_legend(figure, study)
    _style.below(grid, "learning rate / scaled learning rate")
    figure.supylabel(_style.label(f"validation {study.metric.label}"), fontsize=9)

    others = any(
        _searched(arm, name) for arm in study.measured for name in ("warmup", "weight_decay")
    )
    single = len(study.measured) - len(searching)
    notes = [_NOTE, *[_BEST] * others]
    if single:
        notes.append(
            f"Not drawn: {count(single, 'arm')} of which only one learning rate was tried."
        )
    notes += _style.left_out(len(arms), len(searching), "arms")

    alt = (
        "Mean validation score against learning rate over the scaled rate, a panel for each arm "
        "and a colour for each batch size"
    )
    drawn = _style.picture(figure, folder / "learning_rate_search.png", alt, wide=True)
    return _page.Section("Learning-rate search", notes, pictures=[drawn])


def _searched(arm: ArmResults, name: str) -> bool:
    """Return whether a search tried more than one "learning_rate", "warmup" or "weight_decay"."""
    return any(len(cell.tried(name)) > 1 for cell in arm.cells)


def _draw_rates(panel: Any, study: Study, cell: CellResults, joined: bool) -> None:
    best = best_by(cell.full, study.metric, "learning_rate")
    if not best:
        return
    colour = _style.batch_shade(study, cell.global_batch_size)
    rates = [one.factors.learning_rate for one in best]
    heights = [study.metric.shown(one.score) for one in best]
    line = {"marker": "o", "markersize": 2.5, "linewidth": 1 if joined else 0}
    panel.plot(rates, heights, color=colour, **line)
    for one, rate, height in zip(best, rates, heights, strict=True):
        if one.factors == cell.chosen:
            _style.ring(panel, rate, height, colour, 7, 1.0)


def best_by(tried: Iterable[Candidate], metric: Metric, *names: str) -> list[Candidate]:
    """Return the best candidate, the first of equals, for each value of the named factors."""
    best: dict[tuple[float, ...], Candidate] = {}
    for one in tried:
        key = tuple(getattr(one.factors, name) for name in names)
        if key not in best or metric.badness(one.score) < metric.badness(best[key].score):
            best[key] = one
    return [best[key] for key in sorted(best)]


# ---- learning rate and warmup

_MOST_BATCHES = 4
_CROSS = {
    "marker": "x",
    "color": _colours.WORSE,
    "markersize": 7,
    "markeredgewidth": 2,
    "linestyle": "none",
}
_ABOUT = (
    "A row for each arm. The cross marks the chosen candidate; warmup 1 is the rule's own. "
    "Brighter is better; the worst quarter share the darkest colour, and diverged candidates are "
    "grey. Sampled candidates are dots, smaller for shorter runs. A warmup with * would outlast "
    "its run and ends one step before it."
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Panel:
    """A cell of the figure.

    Attributes:
      cell: The drawn cell.
      is_grid: Whether the search was a grid, which is a heat map; sampled candidates are dots.
      losses: Difference of every candidate from the cell's best, 0 or more; NaN if it diverged.
    """

    cell: CellResults
    is_grid: bool
    losses: list[float]

    @classmethod
    def of(cls, arm: ArmResults, size: int, metric: Metric) -> _Panel | None:
        """Return the panel of an arm at a batch size; None if the cell was not tested."""
        cell = arm.cell(size)
        if cell is None:
            return None
        scores = [one.score for one in cell.candidates if one.score is not None]
        best = min(scores, key=metric.badness, default=math.nan)
        losses = [
            math.nan if one.score is None or one.diverged else metric.worse_by(best, one.score)
            for one in cell.candidates
        ]
        return cls(cell, arm.search.method == "grid", losses)

    @property
    def ticks(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Factors of learning rate and warmup, the axes of a heat map; None unless it is a grid."""
        if not self.is_grid:
            return None
        return tuple(self.cell.tried("learning_rate")), tuple(self.cell.tried("warmup"))


def warmups(study: Study, folder: pathlib.Path) -> _page.Section | None:
    """Draw validation scores over learning rate and warmup, at up to four batch sizes.

    A grid is drawn as a heat map, sampled candidates as dots.

    Returns:
      The section, or None if no arm searched the warmup.
    """
    having = [arm for arm in study.measured if _searched(arm, "warmup")]
    arms = having[: _style.MOST_PANEL_ROWS]
    if not arms:
        return None

    sizes = sorted({cell.global_batch_size for arm in arms for cell in arm.cells})
    sizes = _style.thinned(sizes, _MOST_BATCHES)
    drawn = [[_Panel.of(arm, size, study.metric) for size in sizes] for arm in arms]
    # The axes of heat maps count cells: panels with other factors cannot share them.
    share = _shared(drawn)
    figure, grid = _style.panels(len(arms), len(sizes), 1.35, sharex=share, sharey=share)
    colours = _draw_all(grid, drawn, study.metric)

    for panel, size in zip(grid[0], sizes, strict=True):
        _style.title(panel, f"batch {size}", 8.5, None)
    for row, arm in zip(grid, arms, strict=True):
        row[0].set_ylabel(_style.label(arm.name, 20), fontsize=7.5)
    _style.below(grid, "rate / scaled rate")
    figure.supylabel("warmup / the rule's warmup", fontsize=9)

    every = [panel for row in grid for panel in row]
    bar = figure.colorbar(colours, ax=every, location="bottom", aspect=40, pad=0.02)
    bar.ax.tick_params(labelsize=_style.SMALL)
    metric = study.metric
    worse = f"validation {metric.text} worse than the panel's best by, {metric.units}"
    bar.set_label(_style.label(worse), fontsize=8)

    alt = "Mean validation score over learning rate and warmup, a panel for each arm and batch size"
    total = len(having) * len(study.sizes)
    return _page.Section(
        "Learning rate and warmup",
        [_ABOUT, *_style.left_out(len(arms) * len(sizes), total, "cells")],
        pictures=[_style.picture(figure, folder / "learning_rate_and_warmup.png", alt, wide=True)],
    )


def _shared(drawn: Sequence[Sequence[_Panel | None]]) -> str:
    """Return whether "all" panels have the same axes, those of each "row", or "none"."""
    rows = [{one.ticks for one in row if one} for row in drawn]
    if len(set().union(*rows)) == 1:
        return "all"
    return "row" if all(len(row) == 1 for row in rows) else "none"


def _draw_all(
    grid: Sequence[Sequence[Any]], drawn: Sequence[Sequence[_Panel | None]], metric: Metric
) -> Any:
    """Draw all panels on one colour scale, which ends at the third quartile of all losses."""
    pairs = [
        (axes, one)
        for panels, row in zip(grid, drawn, strict=True)
        for axes, one in zip(panels, row, strict=True)
    ]
    shown = [one for _, one in pairs if one]

    behind = sorted(loss for one in shown for loss in one.losses if math.isfinite(loss))
    top = max(behind[3 * len(behind) // 4], 1e-6) if behind else 1.0
    scale = {"vmin": 0.0, "vmax": top, "cmap": "viridis_r"}

    # Warmup 0 is drawn below all others, because the axis of dots is logarithmic.
    tried = {warmup for one in shown for warmup in one.cell.tried("warmup")}
    bottom = 0.5 * min((warmup for warmup in tried if warmup > 0), default=1.0)

    colours = None
    for axes, one in pairs:
        axes.grid(False)
        if one is None:
            axes.set_visible(False)
        elif one.is_grid:
            colours = _heat_map(axes, one, metric, scale)
        else:
            colours = _dots(axes, one, scale, bottom)

    if 0 in tried:
        for axes, one in pairs:
            if one is not None and not one.is_grid:
                _name_zero(axes, bottom)
    return colours


def _name_zero(axes: Any, bottom: float) -> None:
    """Name the lowest place of a logarithmic axis 0; call it when all is drawn."""
    high = axes.get_ylim()[1]
    ticks = [tick for tick in axes.get_yticks() if 1.5 * bottom < tick <= high]
    axes.set_yticks([bottom, *ticks], ["0", *(f"{tick:g}" for tick in ticks)])


def _heat_map(axes: Any, panel: _Panel, metric: Metric, scale: dict[str, Any]) -> Any:
    cell = panel.cell
    rates = cell.tried("learning_rate")
    warmups = cell.tried("warmup")
    table = np.full((len(warmups), len(rates)), math.nan)
    losses = dict(zip(cell.candidates, panel.losses, strict=True))
    for one in best_by(cell.candidates, metric, "learning_rate", "warmup"):
        place = warmups.index(one.factors.warmup), rates.index(one.factors.learning_rate)
        table[place] = losses[one]

    axes.set_facecolor(_colours.EMPTY)  # shows where no candidate was tried
    image = axes.imshow(table, origin="lower", aspect="auto", **scale)
    turned = 90 if len(rates) > 3 else 0
    axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates], rotation=turned)
    axes.set_yticks(range(len(warmups)), [f"{warmup:g}" for warmup in warmups])

    beside = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": _style.SMALL}
    for warmup in cell.cut_warmups:
        axes.text(1.02, warmups.index(warmup), "*", **beside)
    rate, warmup, _ = cell.chosen
    if rate in rates and warmup in warmups:
        axes.plot(rates.index(rate), warmups.index(warmup), **_CROSS)
    return image


def _dots(axes: Any, panel: _Panel, scale: dict[str, Any], bottom: float) -> Any:
    pairs = zip(panel.cell.candidates, panel.losses, strict=True)
    tried = sorted(pairs, key=lambda pair: pair[0].fidelity)
    x = np.array([one.factors.learning_rate for one, _ in tried])
    y = np.array([one.factors.warmup or bottom for one, _ in tried])
    area = np.array([4 + 18 * one.fidelity for one, _ in tried])
    loss = np.array([loss for _, loss in tried])
    good = np.isfinite(loss)
    axes.scatter(x[~good], y[~good], c=_colours.EMPTY, s=area[~good])
    dots = axes.scatter(x[good], y[good], c=loss[good], s=area[good], edgecolors="none", **scale)
    _axes.log_ticks(axes, "x", "y")
    rate, warmup, _ = panel.cell.chosen
    axes.plot(rate, warmup or bottom, **_CROSS)
    return dots
