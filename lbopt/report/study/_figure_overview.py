"""One figure of two studies: scores and limits of the first, steps to a target of the second."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

from lbopt.errors import UserError
from lbopt.report import _axes, _page
from lbopt.report.study import _style
from lbopt.report.study._arm_limit import small_batch_score
from lbopt.report.study._figure_scores import draw_limit, draw_lines, draw_rings
from lbopt.report.study._figure_target import draw_steps, goal_text
from lbopt.report.study._limit import CannotTell, Limit
from lbopt.report.study._metric import Metric
from lbopt.report.study._study import ArmResults, Study

FIGURE = "limits_and_steps.png"
_WIDTH_INCHES = 7.5
_SCORES_INCHES = 3.0
_ARM_INCHES = 0.21
_STEPS_INCHES = 2.6
_MARGIN_INCHES = 1.0


def check_target(study: Study, target: Study) -> None:
    """Refuse a pair of studies that this figure cannot show.

    Args:
      study: Study of limits.
      target: Study with a target.

    Raises:
      UserError: Naming `--target_study`.
    """
    name = target.config.name
    if not study.has_limits:
        fix = f"it goes beneath limits, and {study.config.name} has none; leave it out"
        raise UserError("--target_study", name, fix, code="mismatch")
    if not study.measured:
        fix = f"no batch size of {study.config.name} has a final run yet; run lbopt sweep first"
        raise UserError("--target_study", name, fix, code="missing")
    if not target.has_target:
        fix = "that study has no target; give one whose config sets train.target_metric"
        raise UserError("--target_study", name, fix, code="mismatch")
    if not target.measured:
        fix = "no batch size of that study has a final run yet; run lbopt sweep first"
        raise UserError("--target_study", name, fix, code="missing")


def overview(study: Study, target: Study, folder: pathlib.Path) -> _page.Picture:
    """Draw test scores, limits and steps to a target over one axis of batch sizes."""
    arms = sorted(study.measured, key=_place_of_limit)
    heights = [_SCORES_INCHES, _ARM_INCHES * len(arms) + 0.3, _STEPS_INCHES]
    figure, grid = _page.new_panels(
        3, 1, _WIDTH_INCHES, sum(heights) + _MARGIN_INCHES, height_ratios=heights
    )
    (scores,), (limits,), (steps,) = grid
    sizes = sorted({*study.sizes, *target.sizes})

    _draw_scores(scores, study)
    lower = _lower_starts(study, arms)
    _draw_limits(limits, arms, lower)
    above = {arm.name: arm for arm in study.arms}
    for arm in target.measured:
        alike = above.get(arm.name, arm)
        look = dataclasses.replace(arm, colour=alike.colour, twins=alike.twins)
        draw_steps(steps, target, look)
    _axes.log_ticks(steps, "y")
    steps.set_ylabel("median steps")

    near = study.metric.amount(study.config.limit_points)
    missed = any(arm.missed_sizes for arm in target.measured)
    titles = (
        f"Test {_score_text(study.metric)}, {_style.length_text(study.config)}",
        f"Limit within {near} of small batches, 95 % interval"
        + "; hollow: worse there" * bool(lower),
        f"Steps to {goal_text(target)}; dashed: perfect scaling" + "; hollow: missed" * missed,
    )
    for axes, title in zip((scores, limits, steps), titles, strict=True):
        _page.tidy(axes)
        _style.batch_axis(axes, sizes)
        _style.title(axes, title, 10, None)
    for axes in (scores, limits):
        axes.set_xlabel("")
    if {arm.name for arm in target.measured} - {arm.name for arm in arms}:
        _style.legend_below(figure, steps)
    alt = (
        f"Test {_score_text(study.metric)} against batch size, the limit of each arm with its "
        "interval, and the steps to a target"
    )
    caption = f"Above, {study.config.name}: the middle half of the seeds is shaded, and a ring "
    caption += f"marks the limit. Its mark is hollow for arms that are {near} worse than the best "
    caption += f"over small batches. Below, {target.config.name}, with 95 % intervals; perfect "
    caption += "scaling is twice the batch in half the steps."
    return _style.picture(figure, folder / FIGURE, alt, caption)


def _place_of_limit(arm: ArmResults) -> float:
    """Return the number by which arms are sorted, the smallest limit first."""
    if isinstance(arm.limit, Limit):
        return arm.limit.global_batch_size
    return -math.inf if arm.limit is None or isinstance(arm.limit, CannotTell) else math.inf


def _draw_scores(axes: Any, study: Study) -> None:
    """Draw test scores, an accuracy as the error; the limits are rings."""
    shown = _shown_error if study.metric.is_share else study.metric.shown
    draw_lines(axes, study, shown)
    if study.metric.is_share:
        _axes.log_ticks(axes, "y")
        axes.set_ylabel("test error, %")
    else:
        _style.score_axis(axes, study.metric)
        axes.set_ylabel(_style.label(f"test {study.metric.label}"))
    draw_rings(axes, study, shown)


def _shown_error(accuracy: float | None) -> float:
    return math.nan if accuracy is None else 100 * (1 - accuracy)


def _lower_starts(study: Study, arms: list[ArmResults]) -> set[str]:
    """Return the arms that are worse over small batches than the best, by the study's margin."""
    levels = {
        arm.name: level for arm in arms if (level := small_batch_score(study, arm)) is not None
    }
    metric = study.metric
    best = min(levels.values(), key=metric.badness, default=0.0)
    margin = study.config.limit_points
    return {name for name, level in levels.items() if metric.worse_by(best, level) > margin}


def _draw_limits(axes: Any, arms: list[ArmResults], hollow: set[str]) -> None:
    """Draw the limits, with the names of all arms in their colours."""
    for place, arm in enumerate(arms):
        draw_limit(axes, place, arm, arm.name in hollow)
    axes.set_yticks(range(len(arms)), [_style.label(arm.name) for arm in arms], fontsize=8.5)
    for tick, arm in zip(axes.get_yticklabels(), arms, strict=True):
        tick.set_color(_style.look(arm)["color"])
    axes.set_ylim(-0.6, len(arms) - 0.4)


def _score_text(metric: Metric) -> str:
    return "error" if metric.is_share else metric.text
