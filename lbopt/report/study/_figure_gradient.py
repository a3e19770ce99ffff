"""Figures of the probes: noise scale, phi, Lipschitz constant and trust ratios."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

import numpy as np

from lbopt.report import _axes, _colours, _page
from lbopt.report.study import _style
from lbopt.report.study._arm_limit import limit_text
from lbopt.report.study._limit import Limit, NotReached
from lbopt.report.study._read import mean_curve, positive
from lbopt.report.study._study import ArmResults, CellResults, Points, Study
from lbopt.report.study._words import number
from lbopt.sweep import Probes


def _probes(cell: CellResults) -> list[Probes]:
    return [run.probes for run in cell.final if run.probes]


# ---- noise

_CAPTION = (
    "tr(Sigma) / |G|^2 in examples: at each probed step pooled over the final seeds, then the "
    "median over the steps. On the dashed line it equals the batch size; above it the noise of a "
    "batch is larger than its signal. A ring marks the limit; a gap is a noise scale that cannot "
    "be told from infinity."
)
_ALT = "Gradient noise scale over the optimizer steps, a panel for each arm"
_OVER_STEPS = (
    "The same at every probed step that all seeds took: as the gradient shrinks, the noise scale "
    "grows. A gap is a step at which the pooled |G|^2 is not positive, so that the noise scale "
    "cannot be told from infinity."
)
_PHI = (
    "phi = 1 - cosine of the gradients of two half batches, the mean over probes and seeds: 0 "
    "where they agree, 1 where they are unrelated."
)
_HEADER = (
    "arm",
    "noise scale at the smallest batch, examples",
    "range over its steps",
    "at the limit",
    "limit",
    "limit / noise scale",
    "critical batch",
)


def noise(study: Study, folder: pathlib.Path) -> _page.Section | None:
    """Draw the noise scale against batch size and over the steps, and phi; None without probes."""
    noisy = [arm for arm in study.measured if any(cell.noise for cell in arm.cells)]
    if not noisy:
        return None

    shown = noisy[: 2 * _style.MOST_PANEL_ROWS]
    against_batch = _draw_noise(study, noisy)
    over_steps = _draw_over_steps(study, shown)
    alt = "Gradient noise scale against global batch size"
    file = folder / "noise_scale.png"
    pictures = [
        _style.picture(against_batch, file, alt, _CAPTION),
        _style.picture(over_steps, folder / "noise_scale_over_steps.png", _ALT, _OVER_STEPS, True),
    ]

    gauged = [arm for arm in study.measured if any(cell.phi is not None for cell in arm.cells)]
    if gauged:
        figure = _draw_phi(study, gauged)
        alt = "phi against global batch size"
        pictures.append(_style.picture(figure, folder / "phi.png", alt, _PHI))

    rows = [_row(arm) for arm in noisy if arm.cells[0].noise]
    header = list(_HEADER)
    if not any(row[-1] for row in rows):  # no critical batch without a target
        header = header[:-1]
        rows = [row[:-1] for row in rows]
    return _page.Section(
        "Gradient noise and the critical batch",
        _style.left_out(len(shown), len(noisy), "arms"),
        pictures=pictures,
        header=header,
        rows=rows,
        colours=_style.colours(noisy),
    )


def _gap(value: float | None) -> float:
    """Return a number to plot; NaN, a gap in the line, if it is None or not finite."""
    return value if value is not None and math.isfinite(value) else math.nan


def _draw_noise(study: Study, arms: list[ArmResults]) -> Any:
    figure, axes = _page.new_figure(_style.WIDTH, 4.2)
    for arm in arms:
        sizes = [cell.global_batch_size for cell in arm.cells]
        scales = [_gap(cell.noise.scale if cell.noise else None) for cell in arm.cells]
        look = _style.look(arm)
        axes.plot(sizes, scales, **look, label=_style.label(arm.name, _style.LEGEND_LETTERS))
        height = _at_limit(arm)
        if isinstance(arm.limit, Limit) and math.isfinite(height):
            _style.ring(axes, arm.limit.global_batch_size, height, look["color"])
    equal = {"color": _style.GREY, "linestyle": "--", "linewidth": 1}
    axes.plot(study.sizes, study.sizes, **equal, label="noise scale = batch size")
    _style.batch_axis(axes, study.sizes)
    _axes.log_ticks(axes, "y")
    axes.set_ylabel("noise scale, examples")
    _style.title(axes, "Gradient noise scale", 11)
    _style.legend_below(figure, axes)
    return figure


def _at_limit(arm: ArmResults) -> float:
    """Return the noise scale at the limit, on the line that the figure draws; NaN in a gap."""
    if not isinstance(arm.limit, Limit):
        return math.nan
    sizes = np.log([cell.global_batch_size for cell in arm.cells])
    scales = [_gap(cell.noise.scale if cell.noise else None) for cell in arm.cells]
    logs = [math.log(scale) if scale > 0 else math.nan for scale in scales]
    return float(np.exp(np.interp(math.log(arm.limit.global_batch_size), sizes, logs)))


def _draw_over_steps(study: Study, arms: list[ArmResults]) -> Any:
    figure, grid, shown = _style.two_columns(len(arms))
    for panel, arm in zip(shown, arms, strict=True):
        for cell in arm.cells:
            colour = _style.batch_shade(study, cell.global_batch_size)
            line = {**_style.PROBED, "markersize": 2.5, "color": colour}
            panel.plot(*_over_steps(cell), **line)
        _axes.log_ticks(panel, "x", "y")
        _style.title(panel, arm.name)
    _style.batch_legend(figure, study)
    _style.below(grid, "optimizer step")
    figure.supylabel("noise scale, examples", fontsize=9)
    return figure


def _over_steps(cell: CellResults) -> tuple[list[int], list[float]]:
    """Return the noise scale at the steps that all seeds took, NaN where it is infinite."""
    shared = {step for step, _ in mean_curve((one.step, one.noise_trace) for one in _probes(cell))}
    if cell.noise is None:
        return [], []
    pairs = zip(cell.noise.steps, cell.noise.scales, strict=True)
    kept = [(step, scale) for step, scale in pairs if step in shared]
    return [step for step, _ in kept], [_gap(scale) for _, scale in kept]


def _draw_phi(study: Study, arms: list[ArmResults]) -> Any:
    figure, axes = _page.new_figure(_style.WIDTH, 3.6)
    for arm in arms:
        sizes = [cell.global_batch_size for cell in arm.cells]
        name = _style.label(arm.name, _style.LEGEND_LETTERS)
        axes.plot(sizes, [_gap(cell.phi) for cell in arm.cells], **_style.look(arm), label=name)
    _style.batch_axis(axes, study.sizes)
    axes.set_ylabel("phi = 1 - cosine")
    _style.title(axes, "Disagreement of two half batches", 11, None)
    if not _style.end_labels(axes, study, [(arm, _gap(arm.cells[-1].phi)) for arm in arms]):
        _style.legend_below(figure, axes)
    return figure


def _row(arm: ArmResults) -> list[str]:
    found = arm.cells[0].noise
    limit = arm.limit
    critical = arm.critical_batch
    assert found is not None
    at_limit = _at_limit(arm)

    # A limit beyond the largest batch gives a lower bound of the ratio.
    ratio = ""
    if math.isfinite(found.scale) and found.scale:
        if isinstance(limit, Limit):
            ratio = f"{limit.global_batch_size / found.scale:.3g}"
        elif isinstance(limit, NotReached):
            ratio = f"> {limit.fit.global_batch_sizes[-1] / found.scale:.3g}"

    return [
        arm.name,
        _examples(found.scale),
        f"{_examples(min(found.scales))} to {_examples(max(found.scales))}",
        _examples(at_limit) if math.isfinite(at_limit) else "",
        limit_text(limit) if limit else "",
        ratio,
        number(critical.critical_batch_size if critical else None, 4),
    ]


def _examples(noise_scale: float) -> str:
    if math.isinf(noise_scale):
        return "infinite"
    return f"{noise_scale:.4g}" if noise_scale < 1000 else f"{noise_scale:,.0f}"


# ---- curvature

_ABOUT_LIPSCHITZ = (
    "|g^T H g| / |g|^2, the mean over the final seeds, up to the last step that all of them took. "
    "By the explanation of LEGW (linear-epoch gradual warmup), the peak stays near the same step "
    "as the batch grows (left: peaks one above the other), so that the learning rate has to stay "
    "low for more epochs (right)."
)


def lipschitz(study: Study, folder: pathlib.Path) -> _page.Section | None:
    """Draw the Lipschitz constant along the gradient over steps and epochs; None without probes.

    If the length of a run is given in steps, the second axis is examples seen.
    """
    curves = {arm.name: _lipschitz_curves(arm) for arm in study.measured}
    having = [arm for arm in study.measured if any(curves[arm.name].values())]
    arms = having[: _style.MOST_PANEL_ROWS]
    if not arms:
        return None

    train = study.config.train
    horizontal = "examples seen" if train.num_steps else "epochs"
    figure, grid = _style.panels(len(arms), 2, sharex="col")
    for (left, right), arm in zip(grid, arms, strict=True):
        for cell in arm.cells:
            size = cell.global_batch_size
            curve = curves[arm.name][cell.global_batch_size]
            colour = _style.batch_shade(study, size)
            # The same curve twice: LEGW predicts peaks at one step (left), not at one epoch.
            per_step = size if train.num_steps else (train.num_epochs or 0.0) / cell.first.steps
            for panel, factor in ((left, 1.0), (right, per_step)):
                steps = [factor * step for step, _ in curve]
                values = [value for _, value in curve]
                panel.plot(steps, values, **_style.PROBED, color=colour)
        for panel, name in ((left, "steps"), (right, horizontal)):
            _axes.log_ticks(panel, "x", "y")
            _style.title(panel, f"{arm.name}, over {name}")

    _style.batch_legend(figure, study)
    _style.below(grid, "optimizer step", horizontal)
    figure.supylabel("Lipschitz constant along the gradient", fontsize=9)

    alt = (
        "Local Lipschitz constant along the gradient over steps and over epochs, "
        "a row of panels for each arm"
    )
    return _page.Section(
        "Curvature along the gradient",
        [_ABOUT_LIPSCHITZ, *_style.left_out(len(arms), len(having), "arms")],
        pictures=[_style.picture(figure, folder / "lipschitz.png", alt, wide=True)],
    )


def _lipschitz_curves(arm: ArmResults) -> dict[int, Points]:
    return {
        cell.global_batch_size: positive(
            mean_curve((one.step, one.lipschitz) for one in _probes(cell))
        )
        for cell in arm.cells
    }


# ---- layers and modules


@dataclasses.dataclass(frozen=True, slots=True)
class _LayerStatistic:
    """A number of every layer or module: its field in `Probes` and its texts on the page."""

    field: str
    file: str
    title: str
    axis: str
    about: str


_TRUST_RATIO = _LayerStatistic(
    "trust_ratio",
    "trust_ratios.png",
    "Trust ratios",
    "trust ratio",
    "The factor by which the layer's learning rate is multiplied, the mean over the final seeds; "
    "the layers in the order of their names, the last one in the strongest colour.",
)
_OF_EACH = (
    "1 - cosine of the gradients of two half batches, for each {0} alone, the mean over the final "
    "seeds: 0 where they agree, 1 where they are unrelated. AGVM (adaptive gradient variance "
    "modulation) slows down a module above its anchor. The {0}s are in the order of their names, "
    "the last one in the strongest colour."
)
_PHIS = [
    _LayerStatistic(
        f"phi_{kind}s", f"phi_{kind}s.png", f"phi of the {kind}s", "phi", _OF_EACH.format(kind)
    )
    for kind in ("module", "layer")
]
_MOST_NAMED = 8


def trust_ratios(study: Study, folder: pathlib.Path) -> _page.Section | None:
    """Draw the trust ratio of every layer over the steps, at the smallest and the largest batch."""
    return _layers(study, folder, _TRUST_RATIO)


def phis(study: Study, folder: pathlib.Path) -> _page.Section | None:
    """Draw phi of every module over the steps, or of every layer without modules."""
    modules, layers = _PHIS
    return _layers(study, folder, modules) or _layers(study, folder, layers)


def _layers(study: Study, folder: pathlib.Path, statistic: _LayerStatistic) -> _page.Section | None:
    curves = {arm.name: _layer_curves(statistic, arm.cells[0]) for arm in study.measured}
    having = [arm for arm in study.measured if curves[arm.name]]
    arms = having[: _style.MOST_PANEL_ROWS]
    if not arms:
        return None

    # Arms may have different networks: the colours are those of the one with most layers.
    layers = max((list(curves[arm.name]) for arm in arms), key=len)
    colours = [_colours.shade(place, len(layers)) for place in range(len(layers))]

    figure, grid = _style.panels(len(arms), 2, sharey="row")
    for row, arm in zip(grid, arms, strict=True):
        for panel, cell in zip(row, (arm.cells[0], arm.cells[-1]), strict=True):
            shown = _layer_curves(statistic, cell).values()
            for place, curve in enumerate(shown):
                line = {**_style.PROBED, "color": _colours.shade(place, len(layers))}
                panel.plot(*zip(*curve, strict=True), **line)
            _axes.log_ticks(panel, "x", "y")
            _style.title(panel, f"{arm.name}, batch {cell.global_batch_size}")

    if len(layers) <= _MOST_NAMED:
        _style.line_legend(figure, zip(layers, colours, strict=True))
    _style.below(grid, "optimizer step")
    figure.supylabel(statistic.axis, fontsize=9)

    alt = (
        f"{statistic.title} over the steps, at the smallest and the largest batch, "
        "a row of panels for each arm"
    )
    notes = [statistic.about, *_style.left_out(len(arms), len(having), "arms")]
    drawn = _style.picture(figure, folder / statistic.file, alt, wide=True)
    return _page.Section(statistic.title, notes, pictures=[drawn])


def _layer_curves(statistic: _LayerStatistic, cell: CellResults) -> dict[str, Points]:
    """Return the mean curve of every layer of a cell that has this number."""
    columns = [(one.step, getattr(one, statistic.field) or {}) for one in _probes(cell)]
    names = dict.fromkeys(name for _, column in columns for name in column)
    curves = {
        name: positive(mean_curve((steps, column.get(name)) for steps, column in columns))
        for name in names
    }
    return {name: curve for name, curve in curves.items() if curve}
