"""What was probed in the course of a run: the local Lipschitz constant, and the trust ratio of every layer."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from lbopt.report import page
from lbopt.sweep.findings.points import average, average_with
from lbopt.sweep.report.figures import style
from lbopt.sweep.report.figures.style import Study

_MOST_NAMED = 8
Curves = dict[int, list[tuple[float, float]]]


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
    for (left, right), arm in zip(grid, arms, strict=True):
        for point in arm["points"]:
            size = point["global_batch_size"]
            curve = curves[arm["arm"]].get(size, [])
            factor = _per_step(study, point)
            left.plot([step for step, _ in curve], [y for _, y in curve], color=study.shade(size), linewidth=1.3)
            right.plot(
                [factor * step for step, _ in curve], [y for _, y in curve], color=study.shade(size), linewidth=1.3
            )
        for panel, name in ((left, "steps"), (right, horizontal)):
            style.log_ticks(panel, "x")
            style.log_ticks(panel, "y")
            panel.set_title(f"{arm['arm']}, over {name}", fontsize=9, loc="left")
    style.batch_legend(figure, study, study.sizes)
    figure.supylabel("Lipschitz constant along the gradient", fontsize=9)
    png = page.save_figure(figure, study.workdir / "lipschitz.png")
    alt = "Local Lipschitz constant along the gradient over steps and over epochs, a row of panels for each arm"
    notes = [_ABOUT, *style.left_out(len(arms), len(probed), "arms")]
    return page.Section("Curvature along the gradient", notes, pictures=[page.Picture(png, alt, wide=True)])


_ABOUT = (
    "|g^T H g| / |g|^2, the mean over the final seeds. LEGW's explanation is that its peak stays near the same step when the batch grows "
    "(left: peaks one above the other), so that the learning rate has to stay low for more epochs (right)."
)


def _curves(study: Study, arm: Mapping[str, Any]) -> Curves:
    found: Curves = {}
    for point in arm["points"]:
        size = point["global_batch_size"]
        curve = average(_probes(study, arm, size), "lipschitz")
        positive = [(float(step), value) for step, value in curve if value > 0]
        if positive:
            found[size] = positive
    return found


def _per_step(study: Study, point: Mapping[str, Any]) -> float:
    train = study.config["train"]
    return point["global_batch_size"] if train.get("num_steps") else train["num_epochs"] / point["steps"]


def _probes(study: Study, arm: Mapping[str, Any], size: int) -> list[Mapping[str, Any]]:
    cell = study.cells.get((arm["arm"], size))
    return [row["probes"] for row in cell.final if row.get("probes")] if cell else []


# ---- trust ratios


def trust_ratios(study: Study) -> page.Section | None:
    """Draw the trust ratio of every layer over the steps, at the smallest and the largest batch of arms that have them.

    Args:
      study: what is drawn.

    Returns:
      A section with `trust_ratios.png`; None if no arm has them, or if nothing was probed.
    """
    layerwise = [arm for arm in study.arms if _layers(study, arm)]
    arms = layerwise[: style.MOST_PANEL_ROWS]
    if not arms:
        return None
    figure, grid = style.panels(len(arms), 2, sharey="row")
    layers = max((_layers(study, arm) for arm in arms), key=len)
    for row, arm in zip(grid, arms, strict=True):
        sizes = [point["global_batch_size"] for point in arm["points"]]
        for panel, size in zip(row, (sizes[0], sizes[-1]), strict=True):
            for place, (_, curve) in enumerate(_ratios(study, arm, size).items()):
                panel.plot(*zip(*curve, strict=True), color=style.shade(place, len(layers)), linewidth=1.2)
            style.log_ticks(panel, "x")
            style.log_ticks(panel, "y")
            panel.set_title(f"{arm['arm']}, batch {size}", fontsize=9, loc="left")
    if len(layers) <= _MOST_NAMED:
        style.line_legend(figure, [(layer, style.shade(place, len(layers))) for place, layer in enumerate(layers)])
    style.below(grid, "optimizer step")
    figure.supylabel("trust ratio", fontsize=9)
    png = page.save_figure(figure, study.workdir / "trust_ratios.png")
    alt = (
        "Trust ratio of every layer over the steps, at the smallest and the largest batch, a row of panels for each arm"
    )
    about = "The factor by which the layer's learning rate is multiplied, the mean over the final seeds; from the first layer (dark) to the last (bright)."
    notes = [about, *style.left_out(len(arms), len(layerwise), "arms")]
    return page.Section("Trust ratios", notes, pictures=[page.Picture(png, alt, wide=True)])


def _layers(study: Study, arm: Mapping[str, Any]) -> list[str]:
    """Return the layers of an arm that have a trust ratio at its smallest batch."""
    return list(_ratios(study, arm, arm["points"][0]["global_batch_size"]))


def _ratios(study: Study, arm: Mapping[str, Any], size: int) -> dict[str, list[tuple[int, float]]]:
    probes = _probes(study, arm, size)
    names = list(dict.fromkeys(name for probe in probes for name in probe.get("trust_ratio") or {}))
    curves = {name: average_with(probes, functools.partial(_ratios_of, name)) for name in names}
    return {name: positive for name, curve in curves.items() if (positive := [(t, y) for t, y in curve if y > 0])}


def _ratios_of(layer: str, probe: Mapping[str, Any]) -> list[float | None]:
    return (probe.get("trust_ratio") or {}).get(layer) or []
