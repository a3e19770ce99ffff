"""Accuracy against batch size, and the limit of every arm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lbopt.report import page
from lbopt.sweep.findings.limits import has_limits
from lbopt.sweep.report.figures import style
from lbopt.sweep.report.figures.style import Study

FIGURE = "accuracy_vs_batch_size.png"
_ZOOM = 6
_FEW, _NAME_INCHES = 8, 0.2
"""So many names leave the figure room; each further one takes so much below it."""


def section(study: Study) -> page.Section:
    """Draw the figure of the study: the measure on the test split against the batch size.

    Args:
      study: what is drawn, with one tested cell at least.

    Returns:
      A section with `FIGURE` and, where the limits lie in a small part of it, `accuracy_near_the_top.png`.
    """
    name = study.metric.name
    seeds = len(study.config["final_seeds"])
    mark = "a ring marks the limit" if has_limits(study.config) else "every run stops at the target"
    caption = f"Mean over {seeds} seeds; the band goes from the worst to the best of them, {mark}. The length is {_length(study)}."
    pictures = [
        page.Picture(
            _draw(study, FIGURE),
            f"Test {name} against global batch size, a line for each arm",
            caption,
        )
    ]
    near = _near_the_top(study)
    if near is not None:
        close = _draw(study, "accuracy_near_the_top.png", near)
        pictures.append(
            page.Picture(
                close,
                f"The same test {name}, near its best",
                "The same, where the limits are decided.",
            )
        )
    return page.Section(f"Test {name} against batch size", pictures=pictures)


def _length(study: Study) -> str:
    return f"{'' if has_limits(study.config) else 'at most '}{style.length_text(study.config)}"


def _near_the_top(study: Study) -> tuple[float, float] | None:
    """Return the range of accuracies in which limits are decided, if it would be a small part of the figure."""
    if study.metric.name != "accuracy":
        return None
    means = [
        [study.metric.shown(point["test_accuracy_mean"]) for point in arm["points"]]
        for arm in study.arms
    ]
    best, worst = max(map(max, means)), min(map(min, means))
    height = _ZOOM * study.config["limit_points"]
    inside = max(sum(mean > best - height for mean in arm) for arm in means)
    wanted = inside > 1 and best - worst > 3 * height
    return (best - height, best + 0.15 * height) if wanted else None


def _draw(study: Study, file: str, near: tuple[float, float] | None = None) -> str:
    figure, axes = page.new_figure(style.WIDTH, 4.6 + _NAME_INCHES * max(0, len(study.arms) - _FEW))
    metric = study.metric
    for arm in study.arms:
        look, points = study.look(arm), arm["points"]
        sizes = [point["global_batch_size"] for point in points]
        low, mean, high = (
            [metric.shown(point[f"test_{metric.name}_{name}"]) for point in points]
            for name in ("min", "mean", "max")
        )
        axes.fill_between(sizes, low, high, color=look["color"], alpha=0.15, linewidth=0)
        axes.plot(sizes, mean, **look, label=_label(arm))
        _ring(axes, arm, dict(zip(sizes, mean, strict=True)), look["color"])
    style.batch_axis(axes, study.sizes)
    if metric.name == "perplexity":
        style.log_ticks(axes, "y")
    if near is not None:
        axes.set_ylim(*near)
    axes.set_ylabel(f"test {metric.label}")
    whole = style.label(f"{study.config['name']}: {_length(study)}", 60)
    axes.set_title(
        whole if near is None else f"Near the best test {metric.name}", fontsize=11, loc="left"
    )
    style.legend_below(figure, axes)
    return page.save_figure(figure, study.workdir / file)


def _ring(axes: Any, arm: Mapping[str, Any], means: Mapping[int, float], colour: str) -> None:
    if (
        arm["limit"] is not None
        and not arm["limit_is_largest"]
        and math.isfinite(means[arm["limit"]])
    ):
        ring = {
            "marker": "o",
            "markersize": 12,
            "markerfacecolor": "none",
            "markeredgecolor": colour,
        }
        axes.plot(
            [arm["limit"]], [means[arm["limit"]]], linestyle="none", markeredgewidth=1.5, **ring
        )


def _label(arm: Mapping[str, Any]) -> str:
    told = (
        f" (limit {'at least ' if arm['limit_is_largest'] else ''}{arm['limit']})"
        if arm["limit"] is not None
        else ""
    )
    return style.label(arm["arm"] + told, style.LEGEND_LETTERS)


def limits(study: Study) -> page.Section | None:
    """Draw the limit of every arm with its interval over seeds.

    Args:
      study: what is drawn.

    Returns:
      A section with `limits.png` and a table of what fails beyond; None if no arm has a limit.
    """
    arms = [arm for arm in study.arms if arm["limit"] is not None]
    if not arms:
        return None
    figure, axes = page.new_figure(style.WIDTH, 1.3 + 0.32 * len(arms))
    for place, arm in enumerate(reversed(arms)):
        look = study.look(arm)
        axes.plot(
            arm["limit_interval"],
            [place, place],
            color=look["color"],
            linewidth=3,
            alpha=0.4,
            solid_capstyle="butt",
        )
        axes.plot([arm["limit"]], [place], **look | {"markersize": 8})
        if arm["limit_is_largest"]:
            axes.annotate(
                "   not reached",
                (arm["limit"], place),
                fontsize=8,
                va="center",
                ha="left",
                annotation_clip=False,
            )
    axes.set_yticks(
        range(len(arms)),
        [style.label(arm["arm"], style.TICK_LETTERS) for arm in reversed(arms)],
        fontsize=9,
    )
    axes.set_ylim(-0.6, len(arms) - 0.4)
    style.batch_axis(axes, study.sizes)
    # Of the whole figure: beside long names the axes are too narrow for it.
    told = (
        f"Largest batch within {study.metric.amount(study.config['limit_points'])} of the smallest"
    )
    figure.suptitle(told, x=0.02, ha="left", fontsize=11)
    caption = (
        "The bar is the 95 % interval over resampled seeds; its ends are batch sizes of the study."
    )
    picture = page.Picture(
        page.save_figure(figure, study.workdir / "limits.png"),
        "The limit of every arm and its interval over seeds",
        caption,
    )
    unit = "points" if study.metric.name == "accuracy" else "nats"
    lost = f"train lost, {unit}", f"test lost, {unit}"
    header = ("arm", "limit", "95 % interval", "first batch past it", "fails to", *lost)
    return page.Section(
        "The limit of every arm",
        pictures=[picture],
        header=header,
        rows=[_limit_row(arm) for arm in arms],
    )


def _limit_row(arm: Mapping[str, Any]) -> list[str]:
    low, high = arm["limit_interval"]
    failed = arm["failure"]
    lost = [_lost(failed, split) for split in ("train", "test")] if failed else ["", ""]
    past = [str(failed["global_batch_size"]), failed["kind"] or "not told"] if failed else ["", ""]
    limit = f"{'>= ' if arm['limit_is_largest'] else ''}{arm['limit']}"
    return [arm["arm"], limit, f"{low} to {high}", *past, *lost]


def _lost(failed: Mapping[str, Any], split: str) -> str:
    value = failed[f"{split}_lost"]
    if value is None:
        return "diverged" if failed["diverged"] else "not told"
    return f"{value:.3g}"
