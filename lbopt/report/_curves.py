"""Figures of metrics over the steps of a training run."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lbopt.report import _axes, _colours, _page
from lbopt.report._run_words import finite

_FEW = 20
"""Largest number of points of a curve that are drawn with markers."""
_MANY = 4
"""Largest number of curves that are named at their ends."""
_END_LETTERS = 20
"""Largest number of letters in such a name."""
_MOST_NAMED = 20
"""Largest number of curves that a legend names."""
_LAYERS_WIDTH = 8.0
"""Width of a figure with a legend beside its curves, in inches."""
_IN_PERCENT = ("accuracy", "top-5 accuracy")

Points = list[tuple[int, float]]
"""(step, value)."""


def points_of(lines: Sequence[Mapping[str, Any]], name: str) -> Points:
    """Return the steps and values of a metric; steps without a finite one are left out."""
    return finite(lines, name)


def draw(
    workdir: pathlib.Path,
    stem: str,
    lines: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    axis: str,
    look: _colours.Look,
    log: bool = False,
) -> tuple[str, bool]:
    """Draw metrics against steps in STEM.png.

    Args:
      workdir: Folder of the PNG.
      stem: Name of the PNG, without its ending.
      lines: Lines of metrics.jsonl.
      names: Metrics to draw; those that were not logged are left out.
      axis: Label of the vertical axis; an accuracy is drawn in percent.
      look: Colour of the curves, unless they are many, and their marker, if their points are few.
      log: Whether the vertical axis is logarithmic.

    Returns:
      The figure as SVG in base64, and whether it is too wide for a phone.
    """
    factor = 100 if axis in _IN_PERCENT else 1
    curves = {
        name: [(step, factor * value) for step, value in points]
        for name in names
        if (points := points_of(lines, name))
    }
    named = _named(curves)
    wide = len(named) > _MANY
    figure, axes = _page.new_figure(_LAYERS_WIDTH if wide else _page.WIDTH, 3.6)

    _draw_curves(axes, curves, named, look)
    axes.set_xlabel("optimizer step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(f"{axis}, %" if factor == 100 else axis)
    if log:
        _axes.log_ticks(axes, "y")
    elif factor == 100:
        _scale_percent(axes)

    # A long legend would cover the curves: it stands beside them. A run of NaN losses has no curve.
    if wide:
        axes.legend(frameon=False, fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    elif len(curves) > 1 and any(len(name) > _END_LETTERS for name in _short(curves).values()):
        where = {"loc": "outside lower center", "frameon": False, "ncols": 1, "fontsize": 8}
        figure.legend(*axes.get_legend_handles_labels(), **where)
    elif len(curves) > 1:  # the axis names a single one
        _name_ends(axes, curves)
    return _page.save_figure(figure, workdir / f"{stem}.png"), wide


def _scale_percent(axes: Any) -> None:
    low = axes.dataLim.y0
    high = axes.dataLim.y1
    if _axes.saturates(low, high):
        _axes.error_axis(axes, low, high, 2.7)
        axes.set_ylabel(f"{axes.get_ylabel()} (log of the error)")


def _draw_curves(
    axes: Any, curves: Mapping[str, Points], named: Sequence[str], run: _colours.Look
) -> None:
    """Draw curves; those that are named come last, above the others."""
    unnamed = [name for name in curves if name not in named]
    shades = _shades(named, run.colour)
    for name in [*unnamed, *named]:
        look = {"color": _colours.EMPTY}
        if name in named:
            look = {"label": _page.plain_label(name), "color": shades[name], **_line_of(name)}
        # A curve of one point needs a marker to be seen.
        marker = run.marker if len(curves[name]) <= _FEW else None
        line = {"linewidth": 1.5, "marker": marker, "markersize": 4, **look}
        axes.plot(*zip(*curves[name], strict=True), **line)
    if unnamed:
        title = f"{len(curves)} layers; named: the highest and the lowest at the end"
        axes.set_title(title, fontsize=8, loc="left")


def _line_of(name: str) -> dict[str, Any]:
    """Return the line of a metric: dashed with hollow markers if it was evaluated."""
    if not name.startswith("eval/"):
        return {}
    return {"linestyle": "--", "markerfacecolor": _colours.PAPER}


def _shades(names: Sequence[str], colour: str) -> dict[str, str]:
    """Return the colour of each curve: the run's own, or ordered ones for several of one split."""
    stems = list(dict.fromkeys(name.partition("/")[2] for name in names))
    if len(stems) == 1:
        return dict.fromkeys(names, colour)
    return {name: _colours.shade(stems.index(name.partition("/")[2]), len(stems)) for name in names}


def _name_ends(axes: Any, curves: Mapping[str, Points]) -> None:
    """Name the curves at their ends."""
    drawn = {line.get_label(): line for line in axes.lines}
    ends = []
    short = _short(curves)
    for name, points in curves.items():
        line = drawn[_page.plain_label(name)]
        look = {
            "color": line.get_color(),
            "marker": line.get_marker(),
            "markerfacecolor": line.get_markerfacecolor(),
        }
        ends.append(_axes.End(_page.plain_label(short[name]), *points[-1], look))
    _axes.name_ends(axes, ends)


def _short(names: Iterable[str]) -> dict[str, str]:
    """Return names without the folders that all of them share; a single one keeps its last part.

    >>> _short(["train/ratio/a/b", "train/ratio/c"]), _short(["train/loss", "eval/loss"])
    ({'train/ratio/a/b': 'a/b', 'train/ratio/c': 'c'}, {'train/loss': 'train', 'eval/loss': 'eval'})
    """
    parts = {name: name.split("/") for name in names}
    if len({tuple(one[1:]) for one in parts.values()}) == 1 < len(parts):
        return {name: one[0] for name, one in parts.items()}
    least = min((len(one) - 1 for one in parts.values()), default=0)
    same = 0
    while same < least and len({one[same] for one in parts.values()}) == 1:
        same += 1
    return {name: "/".join(one[same:]) for name, one in parts.items()}


def _named(curves: Mapping[str, Points]) -> list[str]:
    """Return the curves that have a name in the figure.

    Those are all curves or, if there are too many, the highest and the lowest at the last step.
    """
    if len(curves) <= _MOST_NAMED:
        return list(curves)
    ranked = sorted(curves, key=lambda name: curves[name][-1][1])
    return ranked[: -_MOST_NAMED // 2 - 1 : -1] + ranked[: _MOST_NAMED // 2][::-1]
