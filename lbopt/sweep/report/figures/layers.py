"""What was probed of every layer or module in the course of a run: its trust ratio, and how far the halves of a batch disagree."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from lbopt.report import page
from lbopt.sweep.report.figures import style
from lbopt.sweep.report.figures.curves import Curve, mean_curve, positive, series_of
from lbopt.sweep.report.figures.style import Study

_MOST_NAMED = 8
_LINE = {"linewidth": 1.3, "marker": "o", "markersize": 2}


class _Kind(NamedTuple):
    """A number that every layer or module has: its field in the probes, and what is said of it."""

    field: str
    file: str
    title: str
    axis: str
    about: str


_TRUST_RATIO = _Kind(
    "trust_ratio",
    "trust_ratios.png",
    "Trust ratios",
    "trust ratio",
    "The factor by which the layer's learning rate is multiplied, the mean over the final seeds; the layers in the order of their names, from dark to bright.",
)
_OF_EACH = (
    "1 - cosine of the gradients of two half batches, of each {0} alone, the mean over the final seeds: 0 where they agree, 1 where they are unrelated. "
    "AGVM slows down what is above its anchor. The {0}s are in the order of their names, from dark to bright."
)
_PHI_MODULES = _Kind(
    "phi_modules", "phi_modules.png", "phi of the modules", "phi", _OF_EACH.format("module")
)
_PHI_LAYERS = _Kind(
    "phi_layers", "phi_layers.png", "phi of the layers", "phi", _OF_EACH.format("layer")
)


def trust_ratios(study: Study) -> page.Section | None:
    """Draw the trust ratio of every layer over the steps, at the smallest and the largest batch of arms that have them.

    Args:
      study: what is drawn.

    Returns:
      A section with `trust_ratios.png`; None if no arm has them, or if nothing was probed.
    """
    return _section(study, _TRUST_RATIO)


def phis(study: Study) -> page.Section | None:
    """Draw phi of every module over the steps, or of every layer where the study names no modules.

    Args:
      study: what is drawn.

    Returns:
      A section with `phi_modules.png` or `phi_layers.png`; None if nothing was probed.
    """
    return _section(study, _PHI_MODULES) or _section(study, _PHI_LAYERS)


def _section(study: Study, kind: _Kind) -> page.Section | None:
    having = [arm for arm in study.arms if _layers(study, kind, arm)]
    arms = having[: style.MOST_PANEL_ROWS]
    if not arms:
        return None
    figure, grid = style.panels(len(arms), 2, sharey="row")
    layers = max((_layers(study, kind, arm) for arm in arms), key=len)
    for row, arm in zip(grid, arms, strict=True):
        sizes = [point["global_batch_size"] for point in arm["points"]]
        for panel, size in zip(row, (sizes[0], sizes[-1]), strict=True):
            for place, curve in enumerate(_curves(study, kind, arm, size).values()):
                panel.plot(
                    *zip(*curve, strict=True), **_LINE, color=style.shade(place, len(layers))
                )
            style.log_ticks(panel, "x")
            style.log_ticks(panel, "y")
            panel.set_title(
                style.label(f"{arm['arm']}, batch {size}", style.TITLE_LETTERS),
                fontsize=9,
                loc="left",
            )
    if len(layers) <= _MOST_NAMED:
        style.line_legend(
            figure, [(layer, style.shade(place, len(layers))) for place, layer in enumerate(layers)]
        )
    style.below(grid, "optimizer step")
    figure.supylabel(kind.axis, fontsize=9)
    png = page.save_figure(figure, study.workdir / kind.file)
    alt = f"{kind.title} over the steps, at the smallest and the largest batch, a row of panels for each arm"
    notes = [kind.about, *style.left_out(len(arms), len(having), "arms")]
    return page.Section(kind.title, notes, pictures=[page.Picture(png, alt, wide=True)])


def _layers(study: Study, kind: _Kind, arm: Mapping[str, Any]) -> list[str]:
    """Return the layers of an arm that have such a number at its smallest batch."""
    return list(_curves(study, kind, arm, arm["points"][0]["global_batch_size"]))


def _curves(study: Study, kind: _Kind, arm: Mapping[str, Any], size: int) -> dict[str, Curve]:
    probes = series_of(study, arm, size, "probes")
    names = list(dict.fromkeys(name for probe in probes for name in probe.get(kind.field) or {}))
    curves = {
        name: positive(mean_curve(probes, functools.partial(_column, kind, name))) for name in names
    }
    return {name: curve for name, curve in curves.items() if curve}


def _column(kind: _Kind, layer: str, probe: Mapping[str, Any]) -> list[float | None]:
    return (probe.get(kind.field) or {}).get(layer) or []
