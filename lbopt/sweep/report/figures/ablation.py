"""The waterfall: what each ingredient adds at the largest batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lbopt.report import page
from lbopt.sweep.findings.metric import Metric
from lbopt.sweep.report.figures import style
from lbopt.sweep.report.figures.style import Study

_BETTER, _WORSE, _NOISE, _FIRST = "#0072b2", "#d55e00", "#bbbbbb", "#7f7f7f"


def section(study: Study) -> page.Section | None:
    """Draw a bar for each arm of the waterfall, from the one before it to its own mean.

    Args:
      study: what is drawn.

    Returns:
      A section with `waterfall.png`; None if the study has no waterfall, or if an arm of it has no result yet.
    """
    if study.waterfall is None:
        return None
    steps, metric = study.waterfall["steps"], study.metric
    means = [metric.shown(step["mean"]) for step in steps]
    stds = [step["std"] * (100 if metric.name == "accuracy" else 1) for step in steps]
    figure, axes = page.new_figure(style.WIDTH, 1.4 + 0.45 * len(steps))
    low, high = min(means) - max(stds), max(means) + max(stds)
    start, end = max(0.0, low - 0.08 * (high - low)), high + 0.04 * (high - low)
    for place, (mean, std, before) in enumerate(zip(means, stds, [start, *means], strict=False)):
        row, step = len(steps) - 1 - place, steps[place]
        axes.barh(row, mean - before, left=before, height=0.6, color=_colour(step))
        axes.errorbar(mean, row, xerr=std, color="#222222", capsize=3, linewidth=1)
        axes.text(
            1.02,
            row,
            _text(step, metric),
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=8,
        )
    axes.set_yticks(
        range(len(steps)),
        [style.label(step["arm"], style.TICK_LETTERS) for step in reversed(steps)],
        fontsize=9,
    )
    axes.set_xlim(start, min(end, 100.5) if metric.name == "accuracy" else end)
    axes.set_xlabel(f"test {metric.label}")
    axes.set_title(
        f"What each step adds at batch {study.waterfall['global_batch_size']}",
        fontsize=11,
        loc="left",
    )
    png = page.save_figure(figure, study.workdir / "waterfall.png")
    alt = "Test score at the largest batch as one ingredient after the other is added"
    return page.Section("Ablation", [_ABOUT], pictures=[page.Picture(png, alt)])


_ABOUT = (
    "Each bar goes from the arm before it to its own mean over the final seeds: blue for a gain, orange for a loss, grey where it "
    "is not told from seed noise. Beside it is the gain over the arm before and, in brackets, the 95 % Welch interval of the difference of the two "
    "means, which in a coloured bar does not contain 0. Error bars are standard deviations over seeds."
)


def _colour(step: Mapping[str, Any]) -> str:
    if step["gain"] is None:
        return _FIRST
    if not step["told_apart"]:
        return _NOISE
    return _BETTER if step["gain"] > 0 else _WORSE


def _text(step: Mapping[str, Any], metric: Metric) -> str:
    if step["gain"] is None:
        return metric.show(step["mean"])
    unit = "" if metric.name == "accuracy" else "%"
    ends = [step["gain_low"], step["gain_high"]]
    interval = "" if None in ends else f"\n[{', '.join(map(_signed, ends))}]"
    return f"{_signed(step['gain'])}{unit}{interval}"


def _signed(gain: float) -> str:
    return f"{round(gain, 2) + 0.0:+.2f}"
