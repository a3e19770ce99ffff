"""Figures of scores: against batch size, limits, training beside test, precision, waterfall."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

from lbopt.config import AggregatorConfig
from lbopt.report import _page
from lbopt.report.study import _style
from lbopt.report.study._arm_limit import (
    interval_text,
    limit_text,
    limit_with_interval,
    on_scores,
    why_unknown,
)
from lbopt.report.study._limit import CannotTell, Limit
from lbopt.report.study._metric import ACCURACY, PERPLEXITY, Metric, metric_named
from lbopt.report.study._study import ArmResults, Failure, Study, WaterfallStep

FIGURE = "accuracy_vs_batch_size.png"
_OF_OTHERS = "score_vs_batch_size.png"
"""The same figure of a metric other than accuracy and perplexity."""
_ZOOM = 6
_FEW = 8
"""Number of names for which the figure's height suffices."""
_NAME_INCHES = 0.2
"""Additional height of the figure for each further name, in inches."""


# ---- test score against batch size


def scores(study: Study, folder: pathlib.Path) -> _page.Section:
    """Draw the test score against the batch size, and a second time near the best score."""
    name = study.metric.text
    seeds = len(study.config.final_seeds)
    mark = "a ring marks the limit" if study.has_limits else "every run stops at the target"
    caption = (
        f"Mean over {seeds} seeds; the band goes from the worst seed to the best, {mark}. A run "
        f"takes {_length(study)}."
    )
    alt = f"Test {name} against global batch size, a line for each arm"
    file = FIGURE if study.metric in (ACCURACY, PERPLEXITY) else _OF_OTHERS
    pictures = [_style.picture(_draw(study), folder / file, alt, caption)]
    if (near := _near_the_top(study)) is not None:
        close = folder / f"{study.metric.name}_near_the_top.png"
        alt = f"The same test {name}, near its best"
        caption = "The same, where the limits are decided."
        pictures.append(_style.picture(_draw(study, near), close, alt, caption))
    return _page.Section(f"Test {name} against batch size", pictures=pictures)


def _length(study: Study) -> str:
    return f"{'' if study.has_limits else 'at most '}{_style.length_text(study.config)}"


def _near_the_top(study: Study) -> tuple[float, float] | None:
    """Return the range of percentages that decides limits, if it is a small part of the figure."""
    if study.metric.scale != "percent":
        return None
    shown = [[study.metric.shown(cell.test.mean) for cell in arm.cells] for arm in study.measured]
    means = [[mean for mean in arm if math.isfinite(mean)] for arm in shown]
    if not any(means):
        return None
    best = max(map(max, filter(None, means)))
    worst = min(map(min, filter(None, means)))
    height = _ZOOM * study.config.limit_points
    inside = max(sum(mean > best - height for mean in arm) for arm in means)
    wanted = inside > 1 and best - worst > 3 * height
    return (best - height, best + 0.15 * height) if wanted else None


def _draw(study: Study, near: tuple[float, float] | None = None) -> Any:
    metric = study.metric
    arms = study.measured
    height = 4.6 + _NAME_INCHES * max(0, len(arms) - _FEW)
    figure, axes = _page.new_figure(_style.WIDTH, height)

    for arm in arms:
        look = _style.look(arm)
        sizes = [cell.global_batch_size for cell in arm.cells]
        low, mean, high = (
            [metric.shown(getattr(cell.test, name)) for cell in arm.cells]
            for name in ("min", "mean", "max")
        )
        axes.fill_between(sizes, low, high, color=look["color"], alpha=0.15, linewidth=0)
        axes.plot(sizes, mean, **look, label=_label(arm))
        if isinstance(arm.limit, Limit):
            height = metric.shown(on_scores(metric, arm.limit.fit.threshold))
            _style.ring(axes, arm.limit.global_batch_size, height, look["color"])

    _style.batch_axis(axes, study.sizes)
    _style.score_axis(axes, metric)
    if near is not None:
        axes.set_ylim(*near)
    axes.set_ylabel(_style.label(f"test {metric.label}"))
    whole = f"{study.config.name}: {_length(study)}"
    _style.title(axes, f"Near the best test {metric.text}" if near else whole, 11, 60)
    _style.legend_below(figure, axes)
    return figure


def _label(arm: ArmResults) -> str:
    limit = f" (limit {limit_with_interval(arm.limit)})" if arm.limit else ""
    return _style.label(arm.name + limit, _style.LEGEND_LETTERS)


# ---- limits


def limits(study: Study, folder: pathlib.Path) -> _page.Section | None:
    """Draw the limit of every arm with its interval; None if no arm has a known limit."""
    arms = [arm for arm in study.measured if arm.limit]
    if all(isinstance(arm.limit, CannotTell) for arm in arms):
        return None
    figure, axes = _page.new_figure(_style.WIDTH, 1.3 + 0.32 * len(arms))
    names = [_style.label(arm.name, _style.TICK_LETTERS) for arm in reversed(arms)]
    for place, arm in enumerate(reversed(arms)):
        _draw_limit(axes, place, arm)
    axes.set_yticks(range(len(arms)), names, fontsize=9)
    axes.set_ylim(-0.6, len(arms) - 0.4)
    _style.batch_axis(axes, study.sizes)
    # A title of the whole figure: beside long names the axes are too narrow for it.
    near = study.metric.amount(study.config.limit_points)
    title = f"Largest batch within {near} of small batches"
    figure.suptitle(title, x=0.02, ha="left", fontsize=11)

    over = "seeds and test examples" if all(arm.limit_over_examples for arm in arms) else "seeds"
    caption = f"The bar is the 95 % bootstrap interval over {over}; an arrow goes beyond the study."
    alt = "The limit of every arm and its interval"
    unit = {ACCURACY: "lost, points", PERPLEXITY: "lost, nats"}.get(study.metric, "loss rose by")
    lost = f"train {unit}", f"test {unit}"
    return _page.Section(
        "The limit of every arm",
        pictures=[_style.picture(figure, folder / "limits.png", alt, caption)],
        header=("arm", "limit", "95 % interval", "first batch past it", "fails to", *lost),
        rows=[_limit_row(study, arm) for arm in arms],
    )


def _draw_limit(axes: Any, place: int, arm: ArmResults) -> None:
    limit = arm.limit
    look = _style.look(arm, markersize=8)
    at = {"fontsize": 8, "va": "center", "ha": "left", "annotation_clip": False}
    if limit is None or isinstance(limit, CannotTell):
        axes.annotate("cannot be told", (0.02, place), xycoords=axes.get_yaxis_transform(), **at)
        return

    largest = limit.fit.global_batch_sizes[-1]
    high = limit.high if isinstance(limit, Limit) else math.inf
    bar = {"linewidth": 3, "alpha": 0.4, "solid_capstyle": "butt", "color": look["color"]}
    axes.plot([min(limit.low, largest), min(high, largest)], [place, place], **bar)
    if math.isinf(high):
        axes.plot([largest], [place], color=look["color"], marker=">", alpha=0.4, markersize=10)
    if isinstance(limit, Limit):
        axes.plot([limit.global_batch_size], [place], **look)
    else:
        axes.annotate("   not reached", (largest, place), **at)


def _limit_row(study: Study, arm: ArmResults) -> list[str]:
    """Return a line of the table; without an interval it has the reason instead."""
    limit = arm.limit
    failed = arm.failure
    assert limit is not None
    known = why_unknown(study, arm) if isinstance(limit, CannotTell) else interval_text(limit)
    past = ["", "", "", ""]
    if failed:
        lost = [_lost(failed, value) for value in (failed.train_lost, failed.test_lost)]
        past = [str(failed.global_batch_size), failed.kind or "not told", *lost]
    return [arm.name, limit_text(limit), known, *past]


def _lost(failed: Failure, value: float | None) -> str:
    if value is None:
        return "diverged" if failed.diverged else "not told"
    return f"{value:.3g}"


# ---- training beside test

_ABOUT_TRAINING = (
    "Solid: training score ({}, at the end of the run). Dashed, with hollow markers: test score. "
    "The dotted line is the first batch past the arm's limit. If the training score lost more than "
    "half as much as the test score there, the arm fails to optimise; otherwise it fails to "
    "generalise. A line has a gap where a seed diverged, as there is no mean"
)
_OF_CLASSIFIERS = "; in the test accuracy a diverged classifier counts as 0"
_LOSS = metric_named("loss")
_PART = "a fixed random subset of the training set, as large as the validation set"


def training(study: Study, folder: pathlib.Path) -> _page.Section | None:
    """Draw training beside test, a row of panels for each arm; None if runs stop at a target."""
    if not study.has_limits:
        return None

    arms = study.measured[: _style.MOST_PANEL_ROWS]
    metric = ACCURACY if study.metric is PERPLEXITY else study.metric
    drawn = [metric, *[_LOSS] * (metric != _LOSS)]
    figure, grid = _style.panels(len(arms), len(drawn), sharex=True, sharey="col")
    for row, arm in zip(grid, arms, strict=True):
        for panel, one in zip(row, drawn, strict=True):
            _draw_training(panel, study, arm, one)
            _style.score_axis(panel, one)
        failed = arm.failure
        verdict = ""
        if failed and failed.kind:
            verdict = f" (fails to {failed.kind} at {failed.global_batch_size})"
        _style.title(row[0], f"{arm.name}: {metric.label}{verdict * (metric == _LOSS)}")
        if metric != _LOSS:
            _style.title(row[1], "loss" + verdict, letters=None)

    _style.legend_below(figure, grid[0][0], fontsize=8, handlelength=4)
    _style.below(grid, "global batch size")
    alt = (
        f"Training and test {metric.text} and loss against batch size, a row of panels for each arm"
    )
    part = _PART if study.config.trial_devices == "all" else "the whole training set"
    about = _ABOUT_TRAINING.format(part) + _OF_CLASSIFIERS * (metric is ACCURACY) + "."
    return _page.Section(
        "Failure to optimise or to generalise",
        [about, *_style.left_out(len(arms), len(study.measured), "arms")],
        pictures=[_style.picture(figure, folder / "train_and_test.png", alt, wide=True)],
    )


def _draw_training(panel: Any, study: Study, arm: ArmResults, metric: Metric) -> None:
    look = _style.look(arm, markersize=3.5)
    sizes = [cell.global_batch_size for cell in arm.cells]
    for split, line, fill in (("train", "-", look["color"]), ("test", "--", "white")):
        means = [cell.mean_of(split, metric) for cell in arm.cells]
        heights = [metric.shown(mean) for mean in means]
        panel.plot(sizes, heights, linestyle=line, markerfacecolor=fill, **look, label=split)
    if arm.failure:
        past = arm.failure.global_batch_size
        panel.axvline(past, color=_style.GREY, linestyle=":", linewidth=1.2)
    _style.batch_axis(panel, study.sizes, small=True)


# ---- bits of the format in which replicas send gradients

_FULL = (8, 23)
_NEAR = 6
"""Height of the panel near the best, in tolerances of the limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class _ArmFormat:
    """The format of an arm.

    Attributes:
      bits: Exponent bits, mantissa bits.
      shifted: Whether each layer is shifted by a power of two; None in full precision, where it
        makes no difference.
    """

    bits: tuple[int, int]
    shifted: bool | None


def precision(study: Study, folder: pathlib.Path) -> _page.Section | None:
    """Draw the test score over the bits of `aps` aggregators; None unless arms differ in them."""
    found = {arm.name: form for arm in study.measured if (form := _format(arm.train.aggregator))}
    forms = sorted({one.bits for one in found.values()}, key=lambda bits: (sum(bits), bits))
    if len([bits for bits in forms if bits != _FULL]) < 2:
        return None

    near = study.metric is ACCURACY
    metric = study.metric
    figure, grid = _style.panels(1 + near, 1, 2.3)
    for panel in (row[0] for row in grid):
        for size in study.sizes:
            for shifted in (True, False):
                _line(panel, study, found, forms, size, shifted)
        names = [f"{1 + sum(bits)}\ne{bits[0]}m{bits[1]}" for bits in forms]
        panel.set_xticks(range(len(forms)), names)
        panel.set_ylabel(_style.label(f"test {metric.label}"), fontsize=8.5)

    # Formats with few bits fail by tens of points, beside which the others look alike.
    if near:
        best = max(metric.shown(cell.test.mean) for arm in study.measured for cell in arm.cells)
        grid[1][0].set_ylim(best - _NEAR * study.config.limit_points, best + 0.3)
    _style.below(grid, "bits of the format (exponent, mantissa)")
    _style.batch_legend(figure, study, "without a shift")

    caption = (
        "Means over the final seeds; the bars go from the worst to the best. "
        "Solid: each layer is shifted by a power of two (APS)."
        + " Below: the same, near the best."
        * near
    )
    alt = "Test score over the bits in which gradients are reduced, a line for each batch size"
    drawn = _style.picture(figure, folder / "precision.png", alt, caption)
    return _page.Section("How many bits it takes", pictures=[drawn])


def _format(aggregator: AggregatorConfig) -> _ArmFormat | None:
    if aggregator.name == "mean":
        return _ArmFormat(_FULL, None)
    if aggregator.name != "aps":
        return None
    return _ArmFormat((aggregator.exponent_bits, aggregator.mantissa_bits), aggregator.shift)


def _line(
    panel: Any,
    study: Study,
    found: dict[str, _ArmFormat],
    forms: list[tuple[int, int]],
    size: int,
    shifted: bool,
) -> None:
    """Draw the arms at one batch size, with or without a shift."""
    drawn = []
    for arm in study.measured:
        form = found.get(arm.name)
        cell = arm.cell(size)
        if form and cell and form.shifted is not (not shifted):
            ends = (cell.test.min, cell.test.mean, cell.test.max)
            drawn.append((forms.index(form.bits), *map(study.metric.shown, ends)))
    if not drawn:
        return

    # Arms may be listed in any order; the line goes through the formats from few bits to many.
    places, low, means, high = zip(*sorted(drawn), strict=True)
    reach = [
        [mean - end for mean, end in zip(means, low, strict=True)],
        [end - mean for mean, end in zip(means, high, strict=True)],
    ]

    look = {"linewidth": 2, "marker": "o"}
    if not shifted:
        look = {"linewidth": 1, "linestyle": "--", "marker": "x"}
    colour = _style.batch_shade(study, size)
    panel.errorbar(places, means, yerr=reach, color=colour, markersize=4, elinewidth=0.8, **look)


# ---- the waterfall

_BETTER = "#0072b2"
_WORSE = "#d55e00"
_NOISE = "#bbbbbb"
_FIRST = "#7f7f7f"
_ABOUT_WATERFALL = (
    "Each bar goes from the mean of the arm before to the arm's own, over the final seeds: blue "
    "for a gain, orange for a loss, grey if seed noise could explain it. The text beside it is the "
    "gain over the arm before and, in brackets, the 95 % Welch interval of the difference of the "
    "means; blue and orange bars have intervals without 0. Error bars are standard deviations over "
    "seeds."
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
    end = high + 0.04 * (high - low)

    figure, axes = _page.new_figure(_style.WIDTH, 1.4 + 0.45 * len(steps))
    bars = zip(steps, means, stds, [start, *means], strict=False)
    beside = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8}
    for place, (step, mean, std, before) in enumerate(bars):
        row = len(steps) - 1 - place
        axes.barh(row, mean - before, left=before, height=0.6, color=_colour(step))
        axes.errorbar(mean, row, xerr=std, color="#222222", capsize=3, linewidth=1)
        axes.text(1.02, row, _gain(step, metric), **beside)

    names = [_style.label(step.arm, _style.TICK_LETTERS) for step in reversed(steps)]
    axes.set_yticks(range(len(steps)), names, fontsize=9)
    axes.set_xlim(start, min(end, 100.5) if metric.scale == "percent" else end)
    axes.set_xlabel(_style.label(f"test {metric.label}"))
    size = study.waterfall.global_batch_size
    _style.title(axes, f"What each step adds at batch {size}", 11, None)

    alt = "Test score at the largest batch as one ingredient after the other is added"
    drawn = _style.picture(figure, folder / "waterfall.png", alt)
    return _page.Section("Ablation", [_ABOUT_WATERFALL], pictures=[drawn])


def _colour(step: WaterfallStep) -> str:
    if step.gain is None:
        return _FIRST
    if not step.told_apart:
        return _NOISE
    return _BETTER if step.gain > 0 else _WORSE


def _gain(step: WaterfallStep, metric: Metric) -> str:
    if step.gain is None:
        return metric.show(step.mean)
    gain = f"{_signed(step.gain)}{'' if metric.scale == 'percent' else '%'}"
    if step.gain_low is None or step.gain_high is None:
        return gain
    return f"{gain}\n[{_signed(step.gain_low)}, {_signed(step.gain_high)}]"


def _signed(gain: float) -> str:
    return f"{round(gain, 2) + 0.0:+.2f}"
