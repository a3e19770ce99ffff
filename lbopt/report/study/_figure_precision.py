"""Figure of the test score over the bits in which replicas send gradients."""

from __future__ import annotations

import pathlib
from typing import Any

from lbopt.report import _page
from lbopt.report.study import _style
from lbopt.report.study._claim_precision import FULL, ArmFormat, arm_format
from lbopt.report.study._metric import ACCURACY, middle_half
from lbopt.report.study._study import Study

_NEAR = 6
"""Height of the panel near the best, in tolerances of the limit."""


def precision(study: Study, folder: pathlib.Path) -> _page.Section | None:
    """Draw the test score over the bits of `aps` aggregators; None unless arms differ in them."""
    found = {arm.name: form for arm in study.measured if (form := arm_format(arm.train.aggregator))}
    forms = sorted({one.bits for one in found.values()}, key=lambda bits: (sum(bits), bits))
    if len([bits for bits in forms if bits != FULL]) < 2:
        return None

    near = study.metric is ACCURACY
    metric = study.metric
    figure, grid = _style.panels(1 + near, 1, 2.3)
    for panel in (row[0] for row in grid):
        for size in study.sizes:
            for shifted in (True, False):
                _line(panel, study, found, forms, size, shifted)
        names = [f"{1 + sum(bits)}\ne{bits[0]}m{bits[1]}" for bits in forms]
        panel.set_xticks(range(len(forms)), names)
        panel.set_ylabel(_style.label(f"test {metric.label}"), fontsize=8.5)

    # Formats with few bits fail by tens of points, beside which the others look alike.
    if near:
        best = max(metric.shown(cell.test.mean) for arm in study.measured for cell in arm.cells)
        grid[1][0].set_ylim(best - _NEAR * study.config.limit_points, best + 0.3)
    _style.below(grid, "bits of the format (exponent, mantissa)")
    _style.batch_legend(figure, study, "without a shift")

    caption = (
        "Means over the final seeds; the bars hold the middle half of them. "
        "Solid: each layer is shifted by a power of two (APS)."
        + " Below: the same, near the best."
        * near
    )
    alt = "Test score over the bits in which gradients are reduced, a line for each batch size"
    drawn = _style.picture(figure, folder / "precision.png", alt, caption)
    return _page.Section("How many bits it takes", pictures=[drawn])


def _line(
    panel: Any,
    study: Study,
    found: dict[str, ArmFormat],
    forms: list[tuple[int, int]],
    size: int,
    shifted: bool,
) -> None:
    """Draw the arms at one batch size, with or without a shift."""
    drawn = []
    for arm in study.measured:
        form = found.get(arm.name)
        cell = arm.cell(size)
        if form and cell and form.shifted is not (not shifted):
            low, high = map(study.metric.shown, middle_half(cell.scores))
            mean = study.metric.shown(cell.test.mean)
            drawn.append((forms.index(form.bits), low, mean, high))
    if not drawn:
        return

    # Arms may be listed in any order; the line goes through the formats from few bits to many.
    places, least, means, most = zip(*sorted(drawn), strict=True)
    reach = [
        [max(0.0, mean - end) for mean, end in zip(means, least, strict=True)],
        [max(0.0, end - mean) for mean, end in zip(means, most, strict=True)],
    ]

    look = {"linewidth": 2, "marker": "o"}
    if not shifted:
        look = {"linewidth": 1, "linestyle": "--", "marker": "x"}
    colour = _style.batch_shade(study, size)
    panel.errorbar(places, means, yerr=reach, color=colour, markersize=4, elinewidth=0.8, **look)
