"""What the figures of a study share: a colour for each arm, a shade for each batch size, axes, panels."""

from __future__ import annotations

import math
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lbopt.report import page
from lbopt.shown import printable
from lbopt.sweep.findings.metric import Metric
from lbopt.sweep.findings.points import Index

COLOURS = ("#7f7f7f", "#e69f00", "#d55e00", "#56b4e9", "#0072b2", "#009e73", "#cc79a7", "#000000")
"""Told apart without red and green (Okabe and Ito); with the markers they serve 8 arms, then both repeat."""
MARKERS = "svD^oPX*"
WIDTH, PANELS_WIDTH = 5.2, 6.0
"""Inches: 10 points of a figure are still read where a phone shows it 340 pixels wide; panels scroll there."""
SMALL = 7.5
LEGEND_LETTERS, TICK_LETTERS, TITLE_LETTERS = 58, 24, 32
"""After which names are broken in legends, beside an axis, and above a panel."""
MOST_PANEL_ROWS = 8
_LONG_TICKS = 38
_SHORT_DECADES = 2.6
_POINTS_PER_INCH = 72
_EM = 0.54
"""Mean width of a letter of matplotlib's own font, in font sizes."""
_HANDLE_EMS = 4.8
"""What the line beside a name and the gap to the next name take in a legend, in font sizes."""


class Study(NamedTuple):
    """What a figure is drawn from.

    Attributes:
      config: as JSON data.
      arms: of the summary, those with results.
      cells: rows of `results.jsonl`, by (arm, batch size).
      metric: what the study is judged by.
      waterfall: of the summary; None if there is none.
      workdir: where the PNGs go.
    """

    config: Mapping[str, Any]
    arms: Sequence[Mapping[str, Any]]
    cells: Index
    metric: Metric
    waterfall: Mapping[str, Any] | None
    workdir: pathlib.Path

    @property
    def sizes(self) -> list[int]:
        """All batch sizes of the study."""
        return list(self.config["global_batch_sizes"])

    def look(self, arm: Mapping[str, Any]) -> dict[str, Any]:
        """Return an arm's colour and marker: the same in every figure, also where others are missing.

        Args:
          arm: of the summary.

        Returns:
          "color", "marker" and "markersize", options of `Axes.plot`.
        """
        place = [one["name"] for one in self.config["arms"]].index(arm["arm"])
        return {
            "color": COLOURS[place % len(COLOURS)],
            "marker": MARKERS[place % len(MARKERS)],
            "markersize": 5,
        }

    def shade(self, size: int) -> Any:
        """Return the colour of one of the study's batch sizes: dark for small ones, bright for large ones."""
        return shade(self.sizes.index(size), len(self.sizes))


def shade(place: int, count: int) -> Any:
    """Return the colour of the `place`-th of `count` ordered things, from 0; the brightest yellow is left out."""
    from matplotlib import colormaps

    return colormaps["viridis"](0.92 * place / max(1, count - 1))


def label(text: str, width: int | None = None) -> str:
    """Return a name as matplotlib is to be given it, so that it is shown letter by letter.

    Between two dollars matplotlib reads mathematics, and what begins with an underscore it leaves out of legends.

    Args:
      text: any.
      width: letters after which a line is broken; None not to break it.

    >>> label("costs $2 $3"), label("_base"), label("momentum + linear", 12)
    ('costs \\\\$2 \\\\$3', ' _base', 'momentum +\\nlinear')
    """
    shown = printable(text)  # first: a break in a name is none of ours
    return page.label(shown if width is None else textwrap.fill(shown, width))


def _columns(names: Sequence[str], width_inches: float, font_size: float, most: int) -> int:
    """Return in how many columns names fit below a figure, rows filled alike.

    >>> _columns(["16", "64", "256", "1024", "fitted curve"], 6.0, 8, most=8), _columns(["a" * 100, "b"], 6.0, 8, most=8)
    (5, 1)
    """
    room = width_inches * _POINTS_PER_INCH / font_size
    widths = [_HANDLE_EMS + _EM * max(map(len, name.split("\n"))) for name in names]
    if sum(widths) <= room and len(names) <= most:
        return max(1, len(names))
    fitting = max(1, min(most, len(names), int(room / max(widths))))
    rows = -(-len(names) // fitting)
    return -(-len(names) // rows)


def length_text(config: Mapping[str, Any]) -> str:
    """Return how long every trial is, in words; `config` is the study's, as JSON data."""
    train = config["train"]
    length = (
        f"{train['num_steps']} steps"
        if train.get("num_steps")
        else f"{train['num_epochs']:g} epochs"
    )
    return f"{length} at every batch size"


def batch_axis(axes: Any, sizes: Sequence[int], small: bool = False) -> None:
    """Make the horizontal axis one of batch sizes, with as many names as fit.

    Args:
      axes: of matplotlib.
      sizes: of the study, ascending; the last one is always named.
      small: for a panel: half as many names, and no label.
    """
    axes.set_xscale("log", base=2)
    every = math.ceil(
        sum(len(str(size)) + 1 for size in sizes) / (_LONG_TICKS / (2 if small else 1))
    )
    named = sizes[:: -max(1, every)][::-1]
    axes.set_xticks(named, [str(size) for size in named])
    axes.minorticks_off()
    pad = max(1.15, (sizes[-1] / sizes[0]) ** 0.04)
    axes.set_xlim(sizes[0] / pad, sizes[-1] * pad)
    if not small:
        axes.set_xlabel("global batch size")


def log_ticks(axes: Any, which: str) -> None:
    """Make an axis, "x" or "y", logarithmic, with plain numbers at 1, 2, 5 of a short one and at whole decades of a long one.

    Call it after drawing: how long the axis is decides. Where nothing above 0 is drawn, the axis stays as it is.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    if not math.isfinite(getattr(axes.dataLim, f"minpos{which}")):
        return  # nothing is drawn: there is no range to take the logarithm of
    getattr(axes, f"set_{which}scale")("log")
    low, high = getattr(axes, f"get_{which}lim")()
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 10**_SHORT_DECADES else (1,)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def legend_below(figure: Any, axes: Any, columns: int = 2, **options: Any) -> None:
    """Name the lines below the figure, where nothing is covered.

    Args:
      figure: to write below.
      axes: whose labelled lines are named, if there are any.
      columns: of names, at most.
      **options: of `Figure.legend`.
    """
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        look = {"fontsize": 9, **options}
        fitting = _columns(labels, figure.get_size_inches()[0], look["fontsize"], columns)
        figure.legend(
            handles, labels, loc="outside lower center", ncols=fitting, frameon=False, **look
        )


def batch_legend(
    figure: Any, study: Study, sizes: Sequence[int], dashed: str | None = None
) -> None:
    """Name the shades of the batch sizes below the figure.

    Args:
      figure: to write below.
      study: whose shades they are.
      sizes: that are named.
      dashed: what thin dashed lines are; None if there are none.
    """
    line_legend(
        figure, [(str(size), study.shade(size)) for size in sizes], "global batch size", 8, dashed
    )


def line_legend(
    figure: Any,
    lines: Sequence[tuple[str, Any]],
    title: str | None = None,
    columns: int = 3,
    dashed: str | None = None,
) -> None:
    """Name colours below the figure.

    Args:
      figure: to write below.
      lines: (name, colour).
      title: above the names.
      columns: at most.
      dashed: what thin dashed lines are; None if there are none.
    """
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, linewidth=2, label=label(name)) for name, colour in lines
    ]
    if dashed is not None:
        handles.append(Line2D([], [], color="#777777", linewidth=1, linestyle="--", label=dashed))
    look = {"loc": "outside lower center", "frameon": False, "fontsize": 8, "title_fontsize": 8}
    names = [name for name, _ in lines] + ([dashed] if dashed is not None else [])
    fitting = _columns(names, figure.get_size_inches()[0], 8, columns)
    figure.legend(handles=handles, title=title, ncols=fitting, **look)


def panels(
    rows: int, columns: int, height_inches: float = 1.9, **options: Any
) -> tuple[Any, list[list[Any]]]:
    """Return a figure and its panels, row by row, for small print.

    Args:
      rows: of panels.
      columns: of panels.
      height_inches: of a row.
      **options: of `Figure.subplots`.
    """
    figure, grid = page.new_panels(
        rows, columns, PANELS_WIDTH, 0.7 + height_inches * rows, **options
    )
    for panel in (one for row in grid for one in row):
        panel.tick_params(which="both", labelsize=SMALL, labelbottom=True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(True, color="#eeeeee")
        panel.set_axisbelow(True)
    return figure, grid


def below(grid: Sequence[Sequence[Any]], label: str) -> None:
    """Name the horizontal axis below the lowest visible panel of every column.

    Args:
      grid: panels, row by row.
      label: of the axis.
    """
    for column in zip(*grid, strict=True):
        [panel for panel in column if panel.get_visible()][-1].set_xlabel(label, fontsize=8.5)


def thinned(values: Sequence[Any], most: int) -> list[Any]:
    """Return at most so many of the values, evenly spread, the first and the last among them.

    Args:
      values: in order.
      most: >= 2.

    >>> thinned([1, 2, 3, 4, 5, 6, 7], 3)
    [1, 4, 7]
    """
    if len(values) <= most:
        return list(values)
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]


def left_out(shown: int, of: int, what: str) -> list[str]:
    """Say what a figure leaves out, if anything.

    Args:
      shown: how many are drawn.
      of: how many there are.
      what: they are, for instance "arms".

    Returns:
      One sentence, or none.

    >>> left_out(8, 9, "arms"), left_out(9, 9, "arms")
    (['Drawn for 8 of 9 arms; results.jsonl has all.'], [])
    """
    return [] if shown == of else [f"Drawn for {shown} of {of} {what}; results.jsonl has all."]
