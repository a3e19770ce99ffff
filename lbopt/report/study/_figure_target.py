"""Figure of the steps and examples to a target against batch size, with ideal scaling."""

from __future__ import annotations

import math
import pathlib
from typing import Any

from lbopt.report import _axes, _page
from lbopt.report.study import _style
from lbopt.report.study._limit import REFERENCE_FACTOR
from lbopt.report.study._steps_to_target import EXCESS
from lbopt.report.study._study import ArmResults, CellResults, Study
from lbopt.report.study._target_words import perfect_text, saving_text
from lbopt.report.study._words import number

_ABOUT = (
    "Medians over the final seeds, with 95 % bootstrap intervals over the seeds; a run that never "
    "reached the target on validation counts as the slowest. Grey lines are ideal scaling: twice "
    "the batch, half the steps. Open markers at the full length of the run are medians that did "
    "not reach the target. Scaling counts as perfect up to the batch at which "
    f"the examples are {100 * EXCESS:g} % more than those of batches up to {REFERENCE_FACTOR:g} "
    "times the smallest, by an isotonic fit with a bootstrap over seeds. The last saving is the "
    "exponent a of steps ~ batch^-a between the two largest batches, 1 if scaling is perfect and 0 "
    "if nothing is saved. The critical batch B_c comes from the fit steps = S_min (1 + B_c / B) to "
    "the medians."
)
_HEADER = (
    "arm",
    "reached at",
    "not reached at",
    "perfect scaling",
    "last saving",
    "S_min",
    "E_min",
    "critical batch",
    "R^2",
)


def target(study: Study, folder: pathlib.Path) -> _page.Section | None:
    """Draw the median steps and examples to the target, with a table of the fits."""
    if not study.has_target:
        return None

    figure, grid = _page.new_panels(2, 1, _style.WIDTH, 7.0, sharex=True)
    (steps,), (examples,) = grid
    for arm in study.measured:
        draw_steps(steps, study, arm)
        medians = [
            _height(cell.target.examples_median if cell.target else None) for cell in arm.cells
        ]
        examples.plot(_sizes(arm.cells), medians, **_style.look(arm))

    for axes, name in ((steps, "steps"), (examples, "examples")):
        _axes.log_ticks(axes, "y")
        axes.set_ylabel(f"median {name} to the target")
        _page.tidy(axes)
        _style.batch_axis(axes, study.sizes)
    steps.set_xlabel("")

    _style.title(steps, f"Steps to {goal_text(study)}", 11, None)
    found = [
        (arm, _height(cell.target.steps_median if cell.target else None))
        for arm in study.measured
        for cell in arm.cells[-1:]
    ]
    if not _style.end_labels(steps, study, found):
        _style.legend_below(figure, steps)

    alt = "Median steps to the target against batch size with ideal scaling, and examples below"
    return _page.Section(
        "Steps to the target",
        [_ABOUT],
        pictures=[_style.picture(figure, folder / "steps_to_target.png", alt)],
        header=_HEADER,
        rows=[_row(arm) for arm in study.measured],
        colours=_style.colours(study.measured),
    )


def goal_text(study: Study) -> str:
    """Return the target of a study in words."""
    train = study.config.train
    return f"{train.target_metric.replace('eval/', 'validation ')} {train.target_value:g}"


def _sizes(cells: tuple[CellResults, ...] | list[CellResults]) -> list[int]:
    return [cell.global_batch_size for cell in cells]


def _height(median: float | None) -> float:
    """Return a median to plot; NaN, a gap in the line, if the target was not reached."""
    return math.nan if median is None else median


def draw_steps(axes: Any, study: Study, arm: ArmResults) -> None:
    """Draw the median steps of an arm to the target, and ideal scaling from its first one."""
    medians = [_height(cell.target.steps_median if cell.target else None) for cell in arm.cells]
    name = _style.label(arm.name, _style.LEGEND_LETTERS)
    axes.plot(_sizes(arm.cells), medians, **_style.look(arm), label=name)
    for point in arm.scaling.points if arm.scaling else ():
        if math.isfinite(point.high):
            bar = {"color": _style.look(arm)["color"], "linewidth": 1}
            axes.vlines(point.global_batch_size, point.low, point.high, **bar)

    missed = [cell for cell in arm.cells if cell.global_batch_size in arm.missed_sizes]
    hollow = _style.look(arm, markersize=7, markerfacecolor="none", linestyle="none")
    axes.plot(_sizes(missed), [cell.first.steps for cell in missed], **hollow)

    reached = [pair for pair in zip(_sizes(arm.cells), medians, strict=True) if pair[1] > 0]
    if reached and not arm.grows:
        size, first = reached[0]
        larger = [other for other in study.sizes if other >= size]
        ideal = [first * size / other for other in larger]
        axes.plot(larger, ideal, color=_style.GREY, linewidth=1, linestyle="--", zorder=1)


def _row(arm: ArmResults) -> list[str]:
    missed = arm.missed_sizes
    reached = [size for size in _sizes(arm.cells) if size not in missed]
    found = [arm.name, *(", ".join(map(str, sizes)) or "none" for sizes in (reached, missed))]
    scaling = arm.scaling
    found.append(perfect_text(scaling) if scaling else "")
    found.append(saving_text(scaling.savings[-1]) if scaling and scaling.savings else "")
    fit = arm.critical_batch
    if fit is None:
        return [*found, "", "", "not told", ""]
    numbers = (fit.min_steps, fit.min_examples, fit.critical_batch_size, fit.r2)
    return [*found, *(number(value, 4) for value in numbers)]
