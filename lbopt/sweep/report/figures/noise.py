"""What probes of the gradient say: noise scale, disagreement of half batches, curvature, trust ratios."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lbopt.report import page
from lbopt.sweep.report.figures import style
from lbopt.sweep.report.figures.style import Study


def section(study: Study) -> page.Section | None:
    """Draw the gradient noise scale of every arm against batch size, and phi if it was probed.

    Args:
      study: what is drawn.

    Returns:
      A section with `noise_scale.png`, `phi.png` and a table; None if no cell has a noise scale.
    """
    noisy = [arm for arm in study.arms if any(point["noise_scale"] for point in arm["points"])]
    if not noisy:
        return None
    pictures = [page.Picture(_draw_noise(study, noisy), "Gradient noise scale against global batch size", _CAPTION)]
    gauged = [arm for arm in study.arms if any(point["phi_mean"] is not None for point in arm["points"])]
    if gauged:
        pictures.append(page.Picture(_draw_phi(study, gauged), "phi against global batch size", _PHI))
    rows = [row for arm in noisy if (row := _row(arm))]
    return page.Section("Gradient noise and the critical batch", pictures=pictures, header=_HEADER, rows=rows)


_CAPTION = (
    "tr(Sigma) / |G|^2 in examples, the ratio of the means over all probes of all final seeds. Above the dashed line, where the two are equal, the "
    "noise of a batch is larger than its signal. A ring marks the limit."
)
_PHI = "phi = 1 - cosine of the gradients of two half batches, the mean over probes and seeds: 0 where they agree, 1 where they are unrelated."
_HEADER = ("arm", "noise scale at the smallest batch", "at the limit", "limit", "limit / noise scale", "critical batch")


def _draw_noise(study: Study, arms: list[Mapping[str, Any]]) -> str:
    figure, axes = page.new_figure(style.WIDTH, 4.2)
    for arm in arms:
        found = {p["global_batch_size"]: p["noise_scale"] for p in arm["points"] if p["noise_scale"]}
        look = study.look(arm)
        axes.plot(list(found), list(found.values()), **look, label=arm["arm"])
        if arm["limit"] in found and not arm["limit_is_largest"]:
            ring = {"marker": "o", "markersize": 12, "markerfacecolor": "none", "markeredgecolor": look["color"]}
            axes.plot([arm["limit"]], [found[arm["limit"]]], linestyle="none", markeredgewidth=1.5, **ring)
    axes.plot(study.sizes, study.sizes, color="#999999", linestyle="--", linewidth=1, label="noise scale = batch size")
    style.batch_axis(axes, study.sizes)
    style.log_ticks(axes, "y")
    axes.set_ylabel("noise scale, examples")
    axes.set_title("Gradient noise scale", fontsize=11, loc="left")
    style.legend_below(figure, axes)
    return page.save_figure(figure, study.workdir / "noise_scale.png")


def _draw_phi(study: Study, arms: list[Mapping[str, Any]]) -> str:
    figure, axes = page.new_figure(style.WIDTH, 3.6)
    for arm in arms:
        found = {p["global_batch_size"]: p["phi_mean"] for p in arm["points"] if p["phi_mean"] is not None}
        axes.plot(list(found), list(found.values()), **study.look(arm), label=arm["arm"])
    style.batch_axis(axes, study.sizes)
    axes.set_ylabel("phi")
    axes.set_title("Disagreement of two half batches", fontsize=11, loc="left")
    style.legend_below(figure, axes)
    return page.save_figure(figure, study.workdir / "phi.png")


def _row(arm: Mapping[str, Any]) -> list[str] | None:
    first = arm["points"][0]["noise_scale"]
    if not first:
        return None
    limit, critical = arm["limit"], arm["critical_batch"]
    at_limit = [point["noise_scale"] for point in arm["points"] if limit and point["global_batch_size"] == limit]
    bound = ">= " if arm["limit_is_largest"] else ""
    return [
        arm["arm"],
        f"{first:.4g}",
        f"{at_limit[0]:.4g}" if at_limit and at_limit[0] else "",
        f"{bound}{limit}" if limit else "",
        f"{bound}{limit / first:.3g}" if limit else "",
        f"{critical['critical_batch_size']:.4g}" if critical else "",
    ]
