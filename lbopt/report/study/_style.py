"""The style of all figures: colours of arms, shades of batch sizes, axes, panels, legends."""

from __future__ import annotations

import math
import pathlib
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from lbopt._shown import printable
from lbopt.config import SweepConfig
from lbopt.report import _axes, _colours, _page
from lbopt.report.study._metric import Metric
from lbopt.report.study._study import ArmResults, Study

GREY = _colours.GREY
WIDTH = _page.WIDTH
PANELS_WIDTH = 6.0
"""Width of a figure with panels, in inches."""
SMALL = 7.5
LEGEND_LETTERS = 58
"""Letters after which a name is broken in a legend."""
TICK_LETTERS = 24
"""Letters after which a name is broken beside an axis."""
TITLE_LETTERS = 32
"""Letters after which a name is broken above a panel."""
MOST_PANEL_ROWS = 8
PROBED = {"linewidth": 1.3, "marker": "o", "markersize": 2}
_LONG_TICKS = 38
_MOST_ENDS = 8
_END_LETTERS = 20
_POINTS_PER_INCH = 72
_EM = 0.54
"""Mean width of a letter of matplotlib's own font, in font sizes."""
_HANDLE_EMS = 4.8
"""Width of the line beside a name and of the gap to the next name in a legend, in font sizes."""


def look(arm: ArmResults, **changes: Any) -> dict[str, Any]:
    """Return the look of an arm, the same in every figure, as options of `Axes.plot`.

    Arms of one optimizer differ in markers and lines; see `ArmResults` for their colours.
    """
    optimizer = arm.config.optimizer
    marker = _colours.optimizer_look(optimizer.name, optimizer.nesterov).marker
    markers = [marker, *(other for other in _colours.MARKERS if other != marker)]
    return {
        "color": arm.colour,
        "marker": markers[arm.twins % len(markers)],
        "linestyle": _colours.LINES[arm.twins % len(_colours.LINES)],
        "markersize": 5,
        **changes,
    }


def colours(arms: Iterable[ArmResults]) -> dict[str, str]:
    """Return the colour of every arm, by its name."""
    return {arm.name: look(arm)["color"] for arm in arms}


def batch_shade(study: Study, size: int) -> str:
    """Return the colour of one of the study's batch sizes, strongest for the largest."""
    return _colours.shade(study.sizes.index(size), len(study.sizes))


def ring(axes: Any, x: float, y: float, colour: Any, size: float = 12, width: float = 1.5) -> None:
    """Draw a ring around a point."""
    axes.plot(
        [x],
        [y],
        linestyle="none",
        marker="o",
        markersize=size,
        markerfacecolor="none",
        markeredgecolor=colour,
        markeredgewidth=width,
    )


def label(text: str, width: int | None = None) -> str:
    """Escape a name for matplotlib and break it into lines of `width` letters.

    >>> label("costs $2 $3"), label("_base"), label("momentum + linear", 12)
    ('costs \\\\$2 \\\\$3', ' _base', 'momentum +\\nlinear')
    """
    shown = printable(text)  # first, so that line breaks within the name itself are shown, not made
    return _page.plain_label(shown if width is None else textwrap.fill(shown, width))


def title(axes: Any, text: str, size: float = 9, letters: int | None = TITLE_LETTERS) -> None:
    """Write a title at the left above an axes."""
    axes.set_title(label(text, letters), fontsize=size, loc="left")


def length_text(config: SweepConfig) -> str:
    """Return how long every trial is, in words."""
    steps = config.train.num_steps
    epochs = config.train.num_epochs
    if epochs and not float(epochs).is_integer():
        epochs = float(f"{epochs:.3g}")
    length = f"{steps} steps" if steps else f"{epochs:g} epochs"
    return f"{length} at every batch size"


def picture(
    figure: Any, file: pathlib.Path, alt: str, caption: str = "", wide: bool = False
) -> _page.Picture:
    """Save a figure and return it for the page."""
    return _page.Picture(_page.save_figure(figure, file), alt, caption, wide)


# ---- axes


def batch_axis(axes: Any, sizes: Sequence[int], small: bool = False) -> None:
    """Make the horizontal axis one of batch sizes, with as many names as fit.

    Args:
      axes: matplotlib axes.
      sizes: Batch sizes of the study, ascending; the last one is always named.
      small: Whether the axis is that of a panel, with half as many names and no label.
    """
    axes.set_xscale("log", base=2)
    letters = sum(len(str(size)) + 1 for size in sizes)
    every = math.ceil(letters / (_LONG_TICKS / (2 if small else 1)))
    named = sizes[:: -max(1, every)][::-1]
    axes.set_xticks(named, [str(size) for size in named])
    axes.minorticks_off()
    pad = max(1.15, (sizes[-1] / sizes[0]) ** 0.04)
    axes.set_xlim(sizes[0] / pad, sizes[-1] * pad)
    if not small:
        axes.set_xlabel("global batch size")


def score_axis(axes: Any, metric: Metric) -> None:
    """Choose the scale of the vertical axis by what is drawn; call it after drawing.

    A perplexity, a loss or an error has a logarithmic axis, unless a score is below 0. An accuracy
    that saturates, near 100 % in one place and points below it in another, has an axis that is
    logarithmic in the error plus one point, so that 97 and 98 % are as far apart as 93 and 95 %.
    """
    if metric.lower_is_better:
        if not axes.dataLim.y0 < 0:
            _axes.log_ticks(axes, "y")
        return
    shared = axes.get_shared_y_axes().get_siblings(axes)
    low = min(one.dataLim.y0 for one in shared)
    high = max(one.dataLim.y1 for one in shared)
    if metric.is_share and _axes.saturates(low, high):
        alone = len(axes.figure.axes) == 1
        _axes.error_axis(axes, low, high, 3.3 if alone else 1.2)
        if axes.get_ylabel() and alone:
            axes.set_ylabel(f"{axes.get_ylabel()} (log of the error)")


# ---- names at the ends of lines


def end_labels(axes: Any, study: Study, ends: Sequence[tuple[ArmResults, float]]) -> bool:
    """Name lines at their right ends, if there is room; call it when the axes are complete.

    Args:
      axes: matplotlib axes, whose horizontal axis is the batch size.
      study: The study.
      ends: Each arm with the height of its line at its largest batch.

    Returns:
      Whether the lines are named: not if there are many or a name is long, or if a line ends
      before the largest batch.
    """
    largest = study.sizes[-1]
    if len(ends) > _MOST_ENDS or any(len(arm.name) > _END_LETTERS for arm, _ in ends):
        return False
    if any(arm.cells[-1].global_batch_size != largest or not math.isfinite(y) for arm, y in ends):
        return False

    named = [_axes.End(label(arm.name), largest, height, look(arm)) for arm, height in ends]
    _axes.name_ends(axes, named)
    return True


# ---- panels


def panels(
    rows: int, columns: int, height_inches: float = 1.9, **options: Any
) -> tuple[Any, list[list[Any]]]:
    """Return a figure and its panels, row by row; options are those of `Figure.subplots`."""
    height = 0.7 + height_inches * rows
    figure, grid = _page.new_panels(rows, columns, PANELS_WIDTH, height, **options)
    for panel in (one for row in grid for one in row):
        panel.tick_params(which="both", labelsize=SMALL, labelbottom=True)
        _page.tidy(panel)
    return figure, grid


def two_columns(count: int) -> tuple[Any, list[list[Any]], list[Any]]:
    """Return a figure of panels in two columns, all of them by row, and the `count` in use."""
    columns = min(2, count)
    figure, grid = panels(-(-count // columns), columns, sharex=True, sharey=True)
    every = [panel for row in grid for panel in row]
    for panel in every[count:]:
        panel.set_visible(False)
    return figure, grid, every[:count]


def below(grid: Sequence[Sequence[Any]], *names: str) -> None:
    """Name the horizontal axis below the lowest visible panel of every column.

    Args:
      grid: Panels, row by row.
      *names: Name of each column, or one for all.
    """
    columns = list(zip(*grid, strict=True))
    for column, name in zip(columns, names * (len(columns) // len(names)), strict=True):
        lowest = [panel for panel in column if panel.get_visible()][-1]
        lowest.set_xlabel(name, fontsize=8.5)


def thinned(values: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` (>= 2) of the values, evenly spread, the first and the last among them.

    >>> thinned([1, 2, 3, 4, 5, 6, 7], 3)
    [1, 4, 7]
    """
    if len(values) <= most:
        return list(values)
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]


def left_out(shown: int, total: int, what: str) -> list[str]:
    """Return a sentence on the arms or sizes that a figure leaves out, if there are any.

    >>> left_out(8, 9, "arms"), left_out(9, 9, "arms")
    (['Drawn for 8 of 9 arms; results.jsonl has all.'], [])
    """
    if shown == total:
        return []
    return [f"Drawn for {shown} of {total} {what}; results.jsonl has all."]


# ---- legends


def legend_below(figure: Any, axes: Any, columns: int = 2, **options: Any) -> None:
    """Name the labelled lines of an axes below the figure, where nothing is covered."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        _legend(figure, handles, labels, columns, **{"fontsize": 9, **options})


def batch_legend(figure: Any, study: Study, dashed: str | None = None) -> None:
    """Name the shades of the batch sizes and the thin dashed lines below the figure."""
    lines = [(str(size), batch_shade(study, size)) for size in study.sizes]
    line_legend(figure, lines, "global batch size", 8, dashed)


def line_legend(
    figure: Any,
    lines: Iterable[tuple[str, Any]],
    title: str | None = None,
    columns: int = 3,
    dashed: str | None = None,
) -> None:
    """Name colours below the figure.

    Args:
      figure: matplotlib figure.
      lines: (name, colour).
      title: Title above the names.
      columns: Greatest number of columns.
      dashed: Name of thin dashed lines; None if there are none.
    """
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, linewidth=2, label=label(name)) for name, colour in lines
    ]
    if dashed is not None:
        handles.append(Line2D([], [], color=GREY, linewidth=1, linestyle="--", label=dashed))
    labels = [str(handle.get_label()) for handle in handles]
    options = {"title": title, "fontsize": 8, "title_fontsize": 8}
    _legend(figure, handles, labels, columns, **options)


def _legend(figure: Any, handles: Any, labels: Sequence[str], columns: int, **options: Any) -> None:
    fitting = _columns(labels, figure.get_size_inches()[0], options["fontsize"], columns)
    where = {"loc": "outside lower center", "frameon": False, "ncols": fitting}
    figure.legend(handles, labels, **where, **options)


def _columns(names: Sequence[str], width_inches: float, font_size: float, most: int) -> int:
    """Return the number of columns in which names fit below a figure, with rows filled evenly.

    >>> _columns(["16", "64", "256"], 6.0, 8, most=8), _columns(["a" * 100, "b"], 6.0, 8, most=8)
    (3, 1)
    """
    space = width_inches * _POINTS_PER_INCH / font_size
    widths = [_HANDLE_EMS + _EM * max(map(len, name.split("\n"))) for name in names]
    if sum(widths) <= space and len(names) <= most:
        return max(1, len(names))
    fitting = max(1, min(most, len(names), int(space / max(widths))))
    rows = -(-len(names) // fitting)
    return -(-len(names) // rows)
