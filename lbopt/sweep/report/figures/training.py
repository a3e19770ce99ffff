"""Training against test: a failure to optimise looks unlike a failure to generalise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lbopt.report import page
from lbopt.sweep.findings.limits import has_limits
from lbopt.sweep.report.figures import style
from lbopt.sweep.report.figures.style import Study


def section(study: Study) -> page.Section | None:
    """Draw accuracy and loss on both splits, a row of panels for each arm.

    Args:
      study: what is drawn.

    Returns:
      A section with `train_and_test.png`; None if runs stop at a target.
    """
    if not has_limits(study.config):
        return None
    arms = study.arms[: style.MOST_PANEL_ROWS]
    figure, grid = style.panels(len(arms), 2, sharex=True, sharey="col")
    for (left, right), arm in zip(grid, arms, strict=True):
        _draw(left, study, arm, "accuracy", 100.0)
        _draw(right, study, arm, "loss", 1.0)
        style.log_ticks(right, "y")
        left.set_title(
            style.label(f"{arm['arm']}: accuracy, %", style.TITLE_LETTERS), fontsize=9, loc="left"
        )
        right.set_title(f"loss{_verdict(arm)}", fontsize=9, loc="left")
    style.legend_below(figure, grid[0][0], fontsize=8, handlelength=4)
    style.below(grid, "global batch size")
    alt = "Training and test accuracy and loss against batch size, a row of panels for each arm"
    return page.Section(
        "Failure to optimise or to generalise",
        [_about(study.config), *style.left_out(len(arms), len(study.arms), "arms")],
        pictures=[
            page.Picture(
                page.save_figure(figure, study.workdir / "train_and_test.png"), alt, wide=True
            )
        ],
    )


def _about(config: Mapping[str, Any]) -> str:
    part = "the whole training set"
    if config.get("trial_devices", "one") == "all":
        part = "a random part of the training set as large as validation, always the same,"
    return (
        f"Training ({part} at the end of the run, solid) beside test (dashed, hollow markers). The dotted line is the first "
        "batch past the arm's limit: where more than half of what the test lost is lost in training too, the arm fails to "
        "optimise there; otherwise it fails to generalise. A line is broken at a batch at which a seed diverged, for which there is no "
        "mean; a classifier that diverged counts as all wrong in the test accuracy."
    )


def _draw(panel: Any, study: Study, arm: Mapping[str, Any], name: str, factor: float) -> None:
    look = study.look(arm)
    for split, line, fill in (("train", "-", look["color"]), ("test", "--", "white")):
        sizes = [point["global_batch_size"] for point in arm["points"]]
        means = [point[f"{split}_{name}_mean"] for point in arm["points"]]
        heights = [math.nan if mean is None else factor * mean for mean in means]
        panel.plot(
            sizes,
            heights,
            linestyle=line,
            markerfacecolor=fill,
            **look | {"markersize": 3.5},
            label=split,
        )
    if arm["failure"]:
        panel.axvline(
            arm["failure"]["global_batch_size"], color="#999999", linestyle=":", linewidth=1.2
        )
    style.batch_axis(panel, study.sizes, small=True)


def _verdict(arm: Mapping[str, Any]) -> str:
    failed = arm["failure"]
    return (
        f" (fails to {failed['kind']} at {failed['global_batch_size']})"
        if failed and failed["kind"]
        else ""
    )
