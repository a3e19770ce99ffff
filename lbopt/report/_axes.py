"""Axes of figures: accuracies that saturate, and names at the right ends of lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

_SATURATED = 80
"""Percentage that the best score has on an axis that saturates."""
_FALLEN = 3
"""Range of such an axis, in errors of the best score plus one point."""
_TICKS = (100, 90, 50, 0, 98, 95, 99, 80, 97, 70, 96, 85, 93, 30, 60, 92, 94)
"""Possible ticks of such an axis; the first of them are kept."""
_TICK_INCHES = 0.19
_LOG_TICKS = {
    4.0: (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8),
    10**2.6: (1, 2, 5),
    math.inf: (1,),
}
"""Greatest ratio of a logarithmic axis's ends -> its ticks within a decade."""
_END_SIZE = 9
_POINTS_PER_INCH = 72
_OF_THE_FIGURE = 0.75
"""Height of the axes, as a share of the figure's height for each row of panels."""


def log_ticks(axes: Any, *which: str) -> None:
    """Make axes "x" or "y" logarithmic, with more ticks in a decade the shorter they are.

    Call it after drawing, as the length of the axis decides. Where nothing above 0 is drawn, the
    axis stays as it is.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    for name in which:
        if not math.isfinite(getattr(axes.dataLim, f"minpos{name}")):
            continue  # nothing is drawn, so there is no range for a logarithm
        getattr(axes, f"set_{name}scale")("log")
        low, high = getattr(axes, f"get_{name}lim")()
        axis = getattr(axes, f"{name}axis")
        subs = next(ticks for ratio, ticks in _LOG_TICKS.items() if high / low <= ratio)
        axis.set_major_locator(LogLocator(subs=subs))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def saturates(low: float, high: float) -> bool:
    """Return whether percentages from `low` to `high` need `error_axis`.

    >>> saturates(89, 99), saturates(97, 98), saturates(20, 60)
    (True, False, False)
    """
    return high >= _SATURATED and high - low >= _FALLEN * (101 - high)


def error_axis(axes: Any, low: float, high: float, inches: float) -> None:
    """Make the vertical axis one of percentages that is logarithmic in 101 less them.

    97 and 98 % are then as far apart as 93 and 95 %, and 100 % has a place.

    Args:
      axes: matplotlib axes.
      low: Least percentage on it.
      high: Largest percentage on it.
      inches: Height of the axes.
    """
    axes.set_yscale("function", functions=(_height_of, lambda height: 101 - np.exp(-height)))
    bottom, top = _height_of(np.array([max(0.0, low), min(100.0, high)]))
    margin = 0.04 * (top - bottom)
    ends = 101 - np.exp(-np.array([bottom - margin, top + margin]))
    axes.set_ylim(*ends)

    gap = _TICK_INCHES / inches * (top - bottom)
    kept: list[int] = []
    for tick in _TICKS:
        distances = [abs(_height_of(tick) - _height_of(other)) for other in kept]
        if ends[0] <= tick <= ends[1] and min(distances, default=math.inf) > gap:
            kept.append(tick)
    axes.set_yticks(sorted(kept), [str(tick) for tick in sorted(kept)])
    axes.minorticks_off()


def _height_of(percent: Any) -> Any:
    return -np.log(101 - np.minimum(percent, 100.9))


class End(NamedTuple):
    """The right end of a line, and its name.

    Attributes:
      name: Name, as matplotlib shows it.
      x: Last place on the horizontal axis.
      y: Height there.
      look: Options of `Axes.plot`, of which the colour and the marker are used.
    """

    name: str
    x: float
    y: float
    look: Mapping[str, Any]


def name_ends(axes: Any, ends: Sequence[End]) -> None:
    """Write names beside the right ends of lines; call it when the axes are complete."""
    axes.autoscale_view()  # brings the limits up to date
    rows = axes.get_subplotspec().get_gridspec().nrows
    inches = _OF_THE_FIGURE * axes.figure.get_size_inches()[1] / rows
    to_axes = axes.transData + axes.transAxes.inverted()
    found = [(float(to_axes.transform((end.x, end.y))[1]), end) for end in ends]
    found.sort(key=lambda pair: pair[0])

    gap = 1.3 * _END_SIZE / _POINTS_PER_INCH / inches
    places = spread([height for height, _ in found], gap)
    for (_, end), place in zip(found, places, strict=True):
        colour = end.look["color"]
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 3}
        beside = {"textcoords": "axes fraction", "annotation_clip": False}
        axes.annotate("", (end.x, end.y), (1.05, place), arrowprops=line, **beside)
        key = {"transform": axes.transAxes, "clip_on": False, "linestyle": "none", "markersize": 5}
        axes.plot([1.055], [place], **{**end.look, **key})
        text = {"va": "center", "fontsize": _END_SIZE, "transform": axes.transAxes}
        axes.text(1.08, place, end.name, **text)


def spread(heights: Sequence[float], gap: float, top: float = 1.0) -> list[float]:
    """Move ascending heights apart until neighbours differ by a gap, and none is above the top.

    >>> spread([0.5, 0.5, 0.75], 0.125), spread([0.0, 1.0, 1.0], 0.25)
    ([0.5, 0.625, 0.75], [0.0, 0.75, 1.0])
    """
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)

    ceiling = top
    for place in reversed(range(len(placed))):
        placed[place] = min(placed[place], ceiling)
        ceiling = placed[place] - gap
    return placed
