"""Steps and examples to a target against batch size, with ideal scaling and the critical batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lbopt.report import page
from lbopt.sweep.report.figures import style
from lbopt.sweep.report.figures.style import Study


def section(study: Study) -> page.Section | None:
    """Draw the median steps and examples to the target; None for a study without one.

    Args:
      study: what is drawn.

    Returns:
      A section with `steps_to_target.png` and a table of the fits of the critical batch.
    """
    train = study.config["train"]
    if not train.get("target_metric"):
        return None
    figure, grid = page.new_panels(2, 1, style.WIDTH, 7.0, sharex=True)
    (steps,), (examples,) = grid
    for arm in study.arms:
        _draw_steps(steps, study, arm)
        _draw_examples(examples, study, arm)
    for axes, name in ((steps, "steps"), (examples, "examples")):
        style.log_ticks(axes, "y")
        axes.set_ylabel(f"median {name} to the target")
        axes.grid(True, color="#eeeeee")
        axes.spines[["top", "right"]].set_visible(False)
        style.batch_axis(axes, study.sizes)
    steps.set_xlabel("")
    target = f"{train['target_metric'].replace('eval/', 'validation ')} {train['target_value']:g}"
    steps.set_title(f"Steps to {target}", fontsize=11, loc="left")
    style.legend_below(figure, steps)
    alt = "Median steps to the target against global batch size with ideal scaling, and examples below"
    png = page.save_figure(figure, study.workdir / "steps_to_target.png")
    rows = [_row(arm) for arm in study.arms]
    return page.Section(
        "Steps to the target",
        [_ABOUT],
        pictures=[page.Picture(png, alt)],
        header=_HEADER,
        rows=rows,
    )


_ABOUT = (
    "Medians over the final seeds, of evaluations on validation; a run that never reached the target counts as the slowest. "
    "Grey lines are ideal scaling: twice the batch, half the steps. Open markers at the full length of the run are medians that did not reach "
    "the target. The critical batch B_c is of the fit steps = S_min (1 + B_c / B) to the medians."
)
_HEADER = ("arm", "reached at", "not reached at", "S_min", "E_min", "critical batch", "R^2")


def _draw_steps(axes: Any, study: Study, arm: Mapping[str, Any]) -> None:
    look = study.look(arm)
    reached = _reached(arm, "steps_median")
    axes.plot(
        *_columns(_with_gaps(arm, "steps_median")),
        **look,
        label=style.label(arm["arm"], style.LEGEND_LETTERS),
    )
    missed = [
        (point["global_batch_size"], point["steps"])
        for point in arm["points"]
        if point["target"]["steps_median"] is None
    ]
    axes.plot(
        *_columns(missed), **look | {"markersize": 7}, linestyle="none", markerfacecolor="none"
    )
    if reached:
        size, first = reached[0]
        ideal = [(other, first * size / other) for other in study.sizes if other >= size]
        axes.plot(*_columns(ideal), color="#bbbbbb", linewidth=1, linestyle="--", zorder=1)


def _draw_examples(axes: Any, study: Study, arm: Mapping[str, Any]) -> None:
    axes.plot(*_columns(_with_gaps(arm, "examples_median")), **study.look(arm))


def _reached(arm: Mapping[str, Any], name: str) -> list[tuple[int, float]]:
    return [
        (p["global_batch_size"], p["target"][name])
        for p in arm["points"]
        if p["target"][name] is not None
    ]


def _with_gaps(arm: Mapping[str, Any], name: str) -> list[tuple[int, float]]:
    """Return a median for every batch size, NaN where the target was not reached: no line goes on through there."""
    values = [(point["global_batch_size"], point["target"][name]) for point in arm["points"]]
    return [(size, math.nan if value is None else value) for size, value in values]


def _columns(pairs: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _row(arm: Mapping[str, Any]) -> list[str]:
    missed = [
        str(p["global_batch_size"]) for p in arm["points"] if p["target"]["steps_median"] is None
    ]
    reached = [str(size) for size, _ in _reached(arm, "steps_median")]
    fit = arm["critical_batch"]
    names = ("min_steps", "min_examples", "critical_batch_size", "r2")
    numbers = [f"{fit[name]:.4g}" for name in names] if fit else ["", "", "not told", ""]
    return [arm["arm"], ", ".join(reached) or "none", ", ".join(missed) or "none", *numbers]
