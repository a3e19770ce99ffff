"""Figure of the critical batch against the examples to easier targets of the same runs."""

from __future__ import annotations

import pathlib

from lbopt.report import _axes, _page
from lbopt.report.study import _style
from lbopt.report.study._claim_growth import exponent_text
from lbopt.report.study._critical_growth import Milestone
from lbopt.report.study._critical_measures import interval_words
from lbopt.report.study._study import Study
from lbopt.report.study._words import number

_ABOUT = (
    "The critical batch of easier targets: the scores that the smallest batch has after 1/8, 1/4 "
    "and 1/2 of the examples that it takes to the study's target. The same runs serve for all: "
    "their learning rates were chosen for the last target, and a rate that decays was not yet low "
    "at the others. Steps are interpolated between evaluations. The exponent p is that of critical "
    "batch ~ examples^p, with its 95 % interval by a bootstrap over the seeds. Only batch sizes "
    "that reached the study's target count."
)
_HEADER = ("arm", "exponent p", "target", "examples", "critical batch", "95 % interval")


def growth(study: Study, folder: pathlib.Path) -> _page.Section | None:
    """Draw the critical batch against the examples; None if no arm has a growth."""
    grown = [(arm, arm.growth) for arm in study.measured if arm.growth]
    if not grown:
        return None
    figure, axes = _page.new_figure(_style.WIDTH, 4.2)
    for arm, found in grown:
        examples = [one.examples for one in found.milestones]
        sizes = [one.critical_batch.critical_batch_size for one in found.milestones]
        name = _style.label(arm.name, _style.LEGEND_LETTERS)
        axes.plot(examples, sizes, **_style.look(arm), label=name)
    _axes.log_ticks(axes, "x", "y")
    axes.set_xlabel("examples to the target at the smallest batch")
    axes.set_ylabel("critical batch, examples")
    _page.tidy(axes)
    _style.title(axes, "Critical batch of easier and harder targets", 11, None)
    _style.legend_below(figure, axes)

    alt = "Critical batch against the examples to the target, a line for each arm"
    return _page.Section(
        "Growth of the critical batch",
        [_ABOUT],
        pictures=[_style.picture(figure, folder / "critical_growth.png", alt)],
        header=_HEADER,
        rows=[
            [arm.name, exponent_text(found), *_row(one)]
            for arm, found in grown
            for one in found.milestones
        ],
        colours=_style.colours(arm for arm, _ in grown),
    )


def _row(one: Milestone) -> list[str]:
    fit = one.critical_batch
    return [
        number(one.value, 4),
        number(one.examples, 4),
        number(fit.critical_batch_size, 3),
        interval_words(fit.intervals.critical_batch_size) if fit.intervals else "",
    ]
