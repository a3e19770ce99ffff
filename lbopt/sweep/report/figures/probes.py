"""What was probed in the course of a run: the local Lipschitz constant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lbopt.report import page
from lbopt.sweep.report.figures import style
from lbopt.sweep.report.figures.curves import Curve, mean_curve, positive, series_of
from lbopt.sweep.report.figures.style import Study


def lipschitz(study: Study) -> page.Section | None:
    """Draw the local Lipschitz constant along the gradient over steps and over epochs.

    Where the length of a run is given in steps, examples seen stand for epochs.

    Args:
      study: what is drawn.

    Returns:
      A section with `lipschitz.png`; None if nothing was probed.
    """
    curves = {arm["arm"]: _curves(study, arm) for arm in study.arms}
    probed = [arm for arm in study.arms if curves[arm["arm"]]]
    arms = probed[: style.MOST_PANEL_ROWS]
    if not arms:
        return None
    figure, grid = style.panels(len(arms), 2, sharex="col")
    horizontal = "examples seen" if study.config["train"].get("num_steps") else "epochs"
    for row, arm in zip(grid, arms, strict=True):
        _draw_lipschitz(row, study, arm, curves[arm["arm"]], horizontal)
    style.batch_legend(figure, study, study.sizes)
    for column, name in zip(zip(*grid, strict=True), ("optimizer step", horizontal), strict=True):
        style.below([[panel] for panel in column], name)
    figure.supylabel("Lipschitz constant along the gradient", fontsize=9)
    png = page.save_figure(figure, study.workdir / "lipschitz.png")
    alt = "Local Lipschitz constant along the gradient over steps and over epochs, a row of panels for each arm"
    notes = [_ABOUT, *style.left_out(len(arms), len(probed), "arms")]
    return page.Section(
        "Curvature along the gradient", notes, pictures=[page.Picture(png, alt, wide=True)]
    )


_LINE = {"linewidth": 1.3, "marker": "o", "markersize": 2}
_ABOUT = (
    "|g^T H g| / |g|^2, the mean over the final seeds, as far as all of them went. LEGW's explanation is that its peak stays near the same step when the batch grows "
    "(left: peaks one above the other), so that the learning rate has to stay low for more epochs (right)."
)


def _curves(study: Study, arm: Mapping[str, Any]) -> dict[int, Curve]:
    sizes = [point["global_batch_size"] for point in arm["points"]]
    found = {
        size: positive(mean_curve(series_of(study, arm, size, "probes"), "lipschitz"))
        for size in sizes
    }
    return {size: curve for size, curve in found.items() if curve}


def _draw_lipschitz(
    row: Sequence[Any],
    study: Study,
    arm: Mapping[str, Any],
    curves: Mapping[int, Curve],
    horizontal: str,
) -> None:
    for point in arm["points"]:
        size, per_step = point["global_batch_size"], _per_step(study, point)
        for panel, factor in zip(row, (1.0, per_step), strict=True):
            scaled = [(factor * step, value) for step, value in curves.get(size, [])]
            panel.plot(
                *(zip(*scaled, strict=True) if scaled else ((), ())),
                **_LINE,
                color=study.shade(size),
            )
    for panel, name in zip(row, ("steps", horizontal), strict=True):
        for axis in "xy":
            style.log_ticks(panel, axis)
        panel.set_title(
            style.label(f"{arm['arm']}, over {name}", style.TITLE_LETTERS), fontsize=9, loc="left"
        )


def _per_step(study: Study, point: Mapping[str, Any]) -> float:
    train = study.config["train"]
    return (
        point["global_batch_size"]
        if train.get("num_steps")
        else train["num_epochs"] / point["steps"]
    )
