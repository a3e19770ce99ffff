"""Gradient noise against batch size and over the steps, and how far the halves of a batch disagree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lbopt.report import page
from lbopt.sweep.report.figures import style
from lbopt.sweep.report.figures.curves import mean_curve, series_of
from lbopt.sweep.report.figures.style import Study


def section(study: Study) -> page.Section | None:
    """Draw the gradient noise scale of every arm against batch size and over the steps, and phi if it was probed.

    Args:
      study: what is drawn.

    Returns:
      A section with `noise_scale.png`, `noise_scale_over_steps.png`, `phi.png` and a table; None if no cell has a noise scale.
    """
    noisy = [
        arm for arm in study.arms if any(point["noise_scale_over_steps"] for point in arm["points"])
    ]
    if not noisy:
        return None
    over_steps = noisy[: 2 * style.MOST_PANEL_ROWS]
    pictures = [
        page.Picture(
            _draw_noise(study, noisy), "Gradient noise scale against global batch size", _CAPTION
        ),
        page.Picture(_draw_over_steps(study, over_steps), _ALT, _OVER_STEPS, wide=True),
    ]
    gauged = [
        arm for arm in study.arms if any(point["phi_mean"] is not None for point in arm["points"])
    ]
    if gauged:
        pictures.append(
            page.Picture(_draw_phi(study, gauged), "phi against global batch size", _PHI)
        )
    notes = style.left_out(len(over_steps), len(noisy), "arms")
    rows = [row for arm in noisy if (row := _row(arm))]
    return page.Section(
        "Gradient noise and the critical batch", notes, pictures=pictures, header=_HEADER, rows=rows
    )


_CAPTION = (
    "tr(Sigma) / |G|^2 in examples: at each probed step pooled over the final seeds, then the median over the steps. Above the dashed line, where the two are "
    "equal, the noise of a batch is larger than its signal. A ring marks the limit; a gap is a noise scale that is not told from infinity."
)
_ALT = "Gradient noise scale over the optimizer steps, a panel for each arm and a colour for each batch size"
_OVER_STEPS = (
    "The same at every probed step that all seeds took: as the gradient shrinks, the noise scale grows. A gap is a step at which the pooled |G|^2 is not positive, "
    "so that the noise scale is not told from infinity."
)
_PHI = "phi = 1 - cosine of the gradients of two half batches, the mean over probes and seeds: 0 where they agree, 1 where they are unrelated."
_HEADER = (
    "arm",
    "noise scale at the smallest batch, examples",
    "over its steps",
    "at the limit",
    "limit",
    "limit / noise scale",
    "critical batch",
)


def _draw_noise(study: Study, arms: Sequence[Mapping[str, Any]]) -> str:
    figure, axes = page.new_figure(style.WIDTH, 4.2)
    for arm in arms:
        found = {p["global_batch_size"]: p["noise_scale"] or math.nan for p in arm["points"]}
        look = study.look(arm)
        axes.plot(
            list(found),
            list(found.values()),
            **look,
            label=style.label(arm["arm"], style.LEGEND_LETTERS),
        )
        if not arm["limit_is_largest"] and math.isfinite(found.get(arm["limit"], math.nan)):
            ring = {
                "marker": "o",
                "markersize": 12,
                "markerfacecolor": "none",
                "markeredgecolor": look["color"],
            }
            axes.plot(
                [arm["limit"]], [found[arm["limit"]]], linestyle="none", markeredgewidth=1.5, **ring
            )
    axes.plot(
        study.sizes,
        study.sizes,
        color="#999999",
        linestyle="--",
        linewidth=1,
        label="noise scale = batch size",
    )
    style.batch_axis(axes, study.sizes)
    style.log_ticks(axes, "y")
    axes.set_ylabel("noise scale, examples")
    axes.set_title("Gradient noise scale", fontsize=11, loc="left")
    style.legend_below(figure, axes)
    return page.save_figure(figure, study.workdir / "noise_scale.png")


def _draw_over_steps(study: Study, arms: Sequence[Mapping[str, Any]]) -> str:
    columns = min(2, len(arms))
    figure, grid = style.panels(-(-len(arms) // columns), columns, sharex=True, sharey=True)
    shown = [panel for row in grid for panel in row]
    for panel in shown[len(arms) :]:
        panel.set_visible(False)
    for panel, arm in zip(shown, arms, strict=False):
        for point in arm["points"]:
            colour = study.shade(point["global_batch_size"])
            panel.plot(
                *_over_steps(study, arm, point),
                color=colour,
                linewidth=1.3,
                marker="o",
                markersize=2.5,
            )
        for axis in "xy":
            style.log_ticks(panel, axis)
        panel.set_title(style.label(arm["arm"], style.TITLE_LETTERS), fontsize=9, loc="left")
    style.batch_legend(figure, study, study.sizes)
    style.below(grid, "optimizer step")
    figure.supylabel("noise scale, examples", fontsize=9)
    return page.save_figure(figure, study.workdir / "noise_scale_over_steps.png")


def _over_steps(
    study: Study, arm: Mapping[str, Any], point: Mapping[str, Any]
) -> tuple[list[int], list[float]]:
    """Return the noise scale at the steps that all seeds of a cell took, NaN where it is infinite."""
    probes = series_of(study, arm, point["global_batch_size"], "probes")
    shared = {step for step, _ in mean_curve(probes, "noise_trace")}
    found = point["noise_scale_over_steps"] or {"step": [], "noise_scale": []}
    kept = [
        pair for pair in zip(found["step"], found["noise_scale"], strict=True) if pair[0] in shared
    ]
    return [step for step, _ in kept], [math.nan if scale is None else scale for _, scale in kept]


def _draw_phi(study: Study, arms: Sequence[Mapping[str, Any]]) -> str:
    figure, axes = page.new_figure(style.WIDTH, 3.6)
    for arm in arms:
        found = {p["global_batch_size"]: p["phi_mean"] for p in arm["points"]}
        heights = [math.nan if phi is None else phi for phi in found.values()]
        axes.plot(
            list(found),
            heights,
            **study.look(arm),
            label=style.label(arm["arm"], style.LEGEND_LETTERS),
        )
    style.batch_axis(axes, study.sizes)
    axes.set_ylabel("phi = 1 - cosine")
    axes.set_title("Disagreement of two half batches", fontsize=11, loc="left")
    style.legend_below(figure, axes)
    return page.save_figure(figure, study.workdir / "phi.png")


def _row(arm: Mapping[str, Any]) -> list[str] | None:
    first = arm["points"][0]
    if first["noise_scale_over_steps"] is None:
        return None
    limit, critical, noise = arm["limit"], arm["critical_batch"], first["noise_scale"]
    at_limit = [point for point in arm["points"] if limit and point["global_batch_size"] == limit]
    bound = ">= " if arm["limit_is_largest"] else ""
    return [
        arm["arm"],
        _examples(noise),
        " to ".join(map(_examples, first["noise_scale_range"])),
        _examples(at_limit[0]["noise_scale"])
        if at_limit and at_limit[0]["noise_scale_over_steps"]
        else "",
        f"{bound}{limit}" if limit else "",
        f"{bound}{limit / noise:.3g}" if limit and noise else "",
        f"{critical['critical_batch_size']:.4g}" if critical else "",
    ]


def _examples(noise_scale: float | None) -> str:
    if noise_scale is None:
        return "infinite"
    return f"{noise_scale:.4g}" if noise_scale < 1000 else f"{noise_scale:,.0f}"
