"""How many bits the sums of gradients need: the measure against the format in which replicas send them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lbopt.report import page
from lbopt.sweep.report.figures import style
from lbopt.sweep.report.figures.style import Study

_WHOLE = (8, 23)
_NEAR = 6
"""Times the limit that the second panel shows below the best."""


class _Point(NamedTuple):
    """An arm's format: (exponent bits, mantissa bits), and whether it is shifted; fp32 is both."""

    form: tuple[int, int]
    shifted: bool | None


def section(study: Study) -> page.Section | None:
    """Draw test accuracy or perplexity over the bits of the format, a line for each batch size, with and without a shift.

    Args:
      study: what is drawn.

    Returns:
      A section with `precision.png`; None unless arms differ in the format of an `aps` aggregator.
    """
    found = {
        arm["arm"]: point
        for arm in study.arms
        if (point := _point(study.config, arm["arm"])) is not None
    }
    forms = sorted({point.form for point in found.values()}, key=lambda form: (sum(form), form))
    if len({form for form in forms if form != _WHOLE}) < 2:
        return None
    near = study.metric.name == "accuracy"
    figure, grid = style.panels(1 + near, 1, 2.3)
    for panel in (row[0] for row in grid):
        for size in study.sizes:
            for shifted in (True, False):
                _line(panel, study, found, forms, size, shifted)
        panel.set_xticks(
            range(len(forms)), [f"{1 + sum(form)}\ne{form[0]}m{form[1]}" for form in forms]
        )
        panel.set_ylabel(f"test {study.metric.label}", fontsize=8.5)
    if near:
        best = max(
            study.metric.shown(_mean(study, point)) for arm in study.arms for point in arm["points"]
        )
        grid[1][0].set_ylim(best - _NEAR * study.config["limit_points"], best + 0.3)
    style.below(grid, "bits of the format (exponent, mantissa)")
    style.batch_legend(figure, study, study.sizes, "without a shift")
    png = page.save_figure(figure, study.workdir / "precision.png")
    alt = "Test score over the number of bits in which gradients are reduced, a line for each batch size"
    caption = "Means over the final seeds; the bars go from the worst to the best. Solid: each layer is shifted by a power of two (APS)."
    if near:
        caption += " Below: the same, near the best."
    return page.Section("How many bits it takes", pictures=[page.Picture(png, alt, caption)])


def _point(config: Mapping[str, Any], name: str) -> _Point | None:
    arm = next(one for one in config["arms"] if one["name"] == name)
    aggregator = arm.get("aggregator") or config["train"].get("aggregator") or {}
    if aggregator.get("name") == "mean":
        return _Point(_WHOLE, None)
    if aggregator.get("name") != "aps":
        return None
    return _Point((aggregator["exponent_bits"], aggregator["mantissa_bits"]), aggregator["shift"])


def _mean(study: Study, point: Mapping[str, Any]) -> float:
    return point[f"test_{study.metric.name}_mean"]


def _line(
    panel: Any,
    study: Study,
    found: Mapping[str, _Point],
    forms: list[tuple[int, int]],
    size: int,
    shifted: bool,
) -> None:
    drawn = []
    for arm in study.arms:
        at = found.get(arm["arm"])
        if at is None or at.shifted == (not shifted):
            continue
        for point in arm["points"]:
            if point["global_batch_size"] == size:
                ends = [
                    study.metric.shown(point[f"test_{study.metric.name}_{end}"])
                    for end in ("min", "max")
                ]
                drawn.append((forms.index(at.form), study.metric.shown(_mean(study, point)), *ends))
    if drawn:
        places, means, low, high = zip(*sorted(drawn), strict=True)
        reach = [
            [m - end for m, end in zip(means, low, strict=True)],
            [end - m for m, end in zip(means, high, strict=True)],
        ]
        look = (
            {"linewidth": 2, "marker": "o"}
            if shifted
            else {"linewidth": 1, "linestyle": "--", "marker": "x"}
        )
        panel.errorbar(
            places, means, yerr=reach, color=study.shade(size), markersize=4, elinewidth=0.8, **look
        )
