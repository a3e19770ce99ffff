"""Figures of scores: against batch size, limits, training beside test."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Any

from lbopt.report import _page
from lbopt.report._colours import PAPER
from lbopt.report.study import _style
from lbopt.report.study._arm_limit import (
    interval_text,
    limit_text,
    limit_with_interval,
    on_scores,
    why_unknown,
)
from lbopt.report.study._limit import CannotTell, Limit
from lbopt.report.study._metric import ACCURACY, PERPLEXITY, Metric, metric_named, middle_half
from lbopt.report.study._study import ArmResults, Failure, Study
from lbopt.report.study._words import count

FIGURE = "accuracy_vs_batch_size.png"
_OF_OTHERS = "score_vs_batch_size.png"
"""The same figure of a metric other than accuracy and perplexity."""
_FEW = 8
"""Number of names for which the figure's height suffices."""
_NAME_INCHES = 0.2
"""Additional height of the figure for each further name, in inches."""


# ---- test score against batch size


def scores(study: Study, folder: pathlib.Path) -> _page.Section:
    """Draw the test score against the batch size."""
    name = study.metric.text
    seeds = len(study.config.final_seeds)
    mark = "a ring marks the limit" if study.has_limits else "every run stops at the target"
    caption = (
        f"Mean over {count(seeds, 'seed')}; the band holds the middle half of them, {mark}. A run "
        f"takes {_length(study)}."
    )
    alt = f"Test {name} against global batch size, a line for each arm"
    file = FIGURE if study.metric in (ACCURACY, PERPLEXITY) else _OF_OTHERS
    picture = _style.picture(_draw(study), folder / file, alt, caption)
    return _page.Section(f"Test {name} against batch size", pictures=[picture])


def _length(study: Study) -> str:
    return f"{'' if study.has_limits else 'at most '}{_style.length_text(study.config)}"


def _draw(study: Study) -> Any:
    metric = study.metric
    arms = study.measured
    height = 4.4 + _NAME_INCHES * max(0, len(arms) - _FEW)
    figure, axes = _page.new_figure(_style.WIDTH, height)

    draw_lines(axes, study, metric.shown)
    _style.batch_axis(axes, study.sizes)
    axes.set_ylabel(_style.label(f"test {metric.label}"))
    _style.score_axis(axes, metric)
    draw_rings(axes, study, metric.shown)

    _style.title(axes, f"{study.config.name}: {_length(study)}", 11, 60)
    ends = [(arm, metric.shown(arm.cells[-1].test.mean)) for arm in arms]
    if not _style.end_labels(axes, study, ends):
        _style.legend_below(figure, axes)
    return figure


def draw_lines(axes: Any, study: Study, shown: Callable[[float | None], float]) -> None:
    """Draw the mean test scores of every arm, and the middle half of its seeds.

    Args:
      axes: matplotlib axes.
      study: The study.
      shown: Returns the height of a score; NaN leaves a gap.
    """
    for arm in study.measured:
        look = _style.look(arm)
        sizes = [cell.global_batch_size for cell in arm.cells]
        means = [shown(cell.test.mean) for cell in arm.cells]
        halves = [map(shown, middle_half(cell.scores)) for cell in arm.cells]
        low, high = zip(*halves, strict=True)
        axes.fill_between(sizes, low, high, color=look["color"], alpha=0.15, linewidth=0)
        axes.plot(sizes, means, **look, label=_label(arm))


def draw_rings(axes: Any, study: Study, shown: Callable[[float | None], float]) -> None:
    """Draw a ring at every limit, where the fit of its arm crosses the threshold."""
    for arm in study.measured:
        if isinstance(arm.limit, Limit):
            height = shown(on_scores(study.metric, arm.limit.fit.threshold))
            _style.ring(axes, arm.limit.global_batch_size, height, _style.look(arm)["color"])


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
        draw_limit(axes, place, arm)
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
        colours=_style.colours(arms),
    )


def draw_limit(axes: Any, place: int, arm: ArmResults, hollow: bool = False) -> None:
    """Draw the limit of an arm and its interval at a height of the axes."""
    limit = arm.limit
    fill = {"markerfacecolor": "none"} if hollow else {}
    look = _style.look(arm, markersize=8, linestyle="none", **fill)
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
_SCORED = (
    "the whole training set, or a fixed random part of one that is much larger than the validation "
    "set"
)


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
    about = _ABOUT_TRAINING.format(_SCORED) + _OF_CLASSIFIERS * (metric is ACCURACY) + "."
    return _page.Section(
        "Failure to optimise or to generalise",
        [about, *_style.left_out(len(arms), len(study.measured), "arms")],
        pictures=[_style.picture(figure, folder / "train_and_test.png", alt, wide=True)],
    )


def _draw_training(panel: Any, study: Study, arm: ArmResults, metric: Metric) -> None:
    look = _style.look(arm, markersize=3.5)
    sizes = [cell.global_batch_size for cell in arm.cells]
    for split, dashes, fill in (("train", "-", look["color"]), ("test", "--", PAPER)):
        means = [cell.mean_of(split, metric) for cell in arm.cells]
        heights = [metric.shown(mean) for mean in means]
        line = {**look, "linestyle": dashes, "markerfacecolor": fill, "label": split}
        panel.plot(sizes, heights, **line)
    if arm.failure:
        past = arm.failure.global_batch_size
        panel.axvline(past, color=_style.GREY, linestyle=":", linewidth=1.2)
    _style.batch_axis(panel, study.sizes, small=True)
