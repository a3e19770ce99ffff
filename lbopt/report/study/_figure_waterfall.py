"""Figure of the gain of each part of a recipe at the largest batch."""

from __future__ import annotations

import math
import pathlib
from typing import Any

from lbopt.report import _colours, _page
from lbopt.report.study import _style
from lbopt.report.study._metric import Metric
from lbopt.report.study._study import Study, WaterfallStep

_ABOUT_WATERFALL = (
    "Each bar goes from the mean of the arm before to the arm's own, over the final seeds: blue "
    "for a gain, orange for a loss, grey if seed noise could explain it. The text beside it is the "
    "gain over the arm before and, in brackets, the 95 % Welch interval of the difference of the "
    "means; blue and orange bars have intervals without 0. Error bars are standard deviations over "
    "seeds, cut where no score can be."
)


def waterfall(study: Study, folder: pathlib.Path) -> _page.Section | None:
    """Draw a bar for each arm of the waterfall, from the mean of the arm before to its own."""
    if study.waterfall is None:
        return None

    steps = study.waterfall.steps
    metric = study.metric
    means = [metric.shown(step.mean) for step in steps]
    stds = [metric.shown(step.std) for step in steps]
    # The axis does not begin at 0, where gains of a point would not be seen.
    low = min(means) - max(stds)
    high = max(means) + max(stds)
    start = low - 0.08 * (high - low)
    start = max(0.0, start) if min(means) >= 0 else start
    lowest = metric.shown(metric.lowest) if math.isfinite(metric.lowest) else -math.inf
    highest = metric.shown(metric.highest) if math.isfinite(metric.highest) else math.inf
    end = high + 0.04 * (high - low)

    figure, axes = _page.new_figure(_style.WIDTH, 1.4 + 0.45 * len(steps))
    bars = zip(steps, means, stds, [start, *means], strict=False)
    beside = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8}
    for place, (step, mean, std, before) in enumerate(bars):
        row = len(steps) - 1 - place
        axes.barh(row, mean - before, left=before, height=0.6, **_fill(step))
        reach = [[min(std, mean - lowest)], [min(std, highest - mean)]]
        axes.errorbar(mean, row, xerr=reach, color=_colours.INK, capsize=3, linewidth=1)
        axes.text(1.02, row, _gain(step, metric), **beside)

    names = [_style.label(step.arm, _style.TICK_LETTERS) for step in reversed(steps)]
    axes.set_yticks(range(len(steps)), names, fontsize=9)
    axes.set_xlim(start, min(end, 100.5) if metric.scale == "percent" else end)
    axes.set_xlabel(_style.label(f"test {metric.label}"))
    size = study.waterfall.global_batch_size
    _style.title(axes, f"What each step adds at batch {size}", 11, None)

    alt = "Test score at the largest batch as one ingredient after the other is added"
    drawn = _style.picture(figure, folder / "waterfall.png", alt)
    notes = [_ABOUT_WATERFALL, *["The axis does not begin at 0."] * (start > 0)]
    return _page.Section("Ablation", notes, pictures=[drawn])


def _fill(step: WaterfallStep) -> dict[str, Any]:
    """Return the look of a bar; a gain that seed noise could explain is an outline."""
    if step.gain is None:
        return {"color": _colours.GREY}
    if not step.told_apart:
        return {"facecolor": _colours.EMPTY, "edgecolor": _colours.GREY, "linewidth": 1}
    return {"color": _colours.BETTER if step.gain > 0 else _colours.WORSE}


def _gain(step: WaterfallStep, metric: Metric) -> str:
    if step.gain is None:
        return metric.show(step.mean)
    gain = f"{_signed(step.gain)}{'' if metric.scale == 'percent' else ' %'}"
    if step.gain_low is None or step.gain_high is None:
        return f"{gain}\n[too few seeds]"
    return f"{gain}\n[{_signed(step.gain_low)}, {_signed(step.gain_high)}]"


def _signed(gain: float) -> str:
    return f"{round(gain, 2) + 0.0:+.2f}"
