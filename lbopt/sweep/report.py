"""The report of a study: figures, page, summary and a table for the terminal."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from lbopt.errors import UserError
from lbopt.report import page
from lbopt.sweep.results import read_results
from lbopt.sweep.summary import summarize
from lbopt.train import workdir as workdirs

FIGURE = "accuracy_vs_batch_size.png"
_COLOURS = ("#7f7f7f", "#e69f00", "#d55e00", "#56b4e9", "#0072b2", "#009e73", "#cc79a7", "#000000")
_MARKERS = "svD^oPX*"


def write_sweep_report(workdir: pathlib.Path, saved: Mapping[str, Any]) -> tuple[pathlib.Path, dict[str, Any]]:
    """Write summary.json, the figures and report.html; return the page and the summary.

    Args:
      workdir: the study's folder.
      saved: its `config.json`.

    Raises:
      UserError: if no trial is finished yet.
    """
    rows = read_results(workdir)
    if not rows:
        raise UserError(f"--workdir = {str(workdir)!r}: no trial is finished yet; run lbopt sweep first")
    config = saved["config"]
    summary = {**summarize(config, rows), "command": saved.get("command", ""), "versions": saved["versions"]}
    workdirs.write_json(workdir / "summary.json", summary)
    arms = [arm for arm in summary["arms"] if arm["points"]]
    sections = [
        page.Section("Test accuracy against batch size", [_caption(config)], png=_draw_accuracy(workdir, config, arms)),
        page.Section("What was found", summary["findings"]),
        page.Section(
            "Results", header=_HEADER, rows=[_table_row(arm, point) for arm in arms for point in arm["points"]]
        ),
        page.Section(
            "Learning-rate search (mean validation accuracy, %)",
            [_SEARCH_NOTE],
            png=_draw_search(workdir, config, arms),
        ),
        page.Section("Protocol", _protocol(config)),
        page.Section("How it was made", code=page.environment_text(saved, saved.get("command", ""))),
    ]
    file = workdir / "report.html"
    lead = f"How far does the batch size go? {summary['num_trials']} trials{'' if summary['complete'] else ' so far'}."
    page.write_page(file, config["name"], lead, sections)
    return file, summary


def terminal_table(summary: Mapping[str, Any]) -> str:
    """Return test accuracy per arm and batch size, and the limits, as text."""
    sizes = sorted({point["global_batch_size"] for arm in summary["arms"] for point in arm["points"]})
    width = max(len(arm["arm"]) for arm in summary["arms"])
    lines = [
        "test accuracy, % (mean over seeds)".ljust(width),
        "batch".ljust(width) + "".join(f"{size:>8}" for size in sizes) + "   limit",
    ]
    for arm in summary["arms"]:
        values = {point["global_batch_size"]: f"{100 * point['test_accuracy_mean']:8.2f}" for point in arm["points"]}
        limit = f">={arm['limit']}" if arm["limit_is_largest"] else str(arm["limit"])
        lines.append(arm["arm"].ljust(width) + "".join(values.get(size, " " * 8) for size in sizes) + f"{limit:>8}")
    return "\n".join(lines)


_HEADER = (
    "arm",
    "batch",
    "steps",
    "warmup steps",
    "learning rate",
    "x scaled",
    "test %",
    "std",
    "min",
    "max",
    "validation %",
    "diverged",
)
_SEARCH_NOTE = "The horizontal axis is the learning rate divided by the rate that the arm's scaling rule gives; a rule that transfers keeps the peak at the same place."


def _table_row(arm: Mapping[str, Any], point: Mapping[str, Any]) -> list[str]:
    edge = " (edge)" if point["at_edge_of_grid"] else ""
    accuracies = [f"{100 * point[f'test_accuracy_{name}']:.2f}" for name in ("mean", "std", "min", "max")]
    return [
        arm["arm"],
        str(point["global_batch_size"]),
        str(point["steps"]),
        str(point["warmup_steps"]),
        f"{point['learning_rate']:.4g}",
        f"{point['learning_rate_factor']:g}{edge}",
        *accuracies,
        f"{100 * point['validation_accuracy_mean']:.2f}",
        f"{point['diverged']}/{point['seeds']}",
    ]


def _caption(config: Mapping[str, Any]) -> str:
    seeds = len(config["final_seeds"])
    return f"Mean over {seeds} seeds; the band goes from the worst to the best of them. {config['train']['num_epochs']:g} epochs at every batch size."


def _protocol(config: Mapping[str, Any]) -> list[str]:
    factors = ", ".join(f"{factor:g}" for factor in config["learning_rate_factors"])
    return [
        f"Every arm got the same search: at each batch size the learning rates {factors} times the arm's scaled rate, each with seeds {config['search_seeds']}. "
        f"The one with the best mean validation accuracy was run with the fresh seeds {config['final_seeds']}; only those runs were tested, once.",
        f"The limit is the largest batch up to which the mean test accuracy stays within {config['limit_points']:g} percentage point(s) of the same arm's at the smallest batch.",
        "An arm is an optimizer together with its scaling and warmup rule; the study does not tell their shares apart.",
    ]


def _draw_accuracy(workdir: pathlib.Path, config: Mapping[str, Any], arms: Sequence[Mapping[str, Any]]) -> str:
    figure, axes = page.new_figure()
    names = [arm["name"] for arm in config["arms"]]
    for arm in arms:
        colour, marker = _style(names.index(arm["arm"]))
        sizes = [point["global_batch_size"] for point in arm["points"]]
        low, mean, high = (
            [100 * point[f"test_accuracy_{name}"] for point in arm["points"]] for name in ("min", "mean", "max")
        )
        axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(sizes, mean, color=colour, marker=marker, markersize=5, label=_label(arm))
    _batch_axis(axes, config["global_batch_sizes"])
    axes.set_ylabel("test accuracy, %")
    axes.set_title(
        f"{config['name']}: {config['train']['num_epochs']:g} epochs at every batch size", fontsize=11, loc="left"
    )
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    return page.save_figure(figure, workdir / FIGURE)


def _draw_search(workdir: pathlib.Path, config: Mapping[str, Any], arms: Sequence[Mapping[str, Any]]) -> str:
    """Draw one small panel per arm: validation accuracy over learning-rate factor, a line per batch size."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    columns = min(3, len(arms))
    rows = -(-len(arms) // columns)
    figure = Figure((3.2 * columns, 2.6 * rows), dpi=144, layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    sizes = config["global_batch_sizes"]
    for panel in panels:
        panel.set_visible(False)
    for panel, arm in zip(figure.axes, arms, strict=False):
        panel.set_visible(True)
        for point in arm["points"]:
            shade = colormaps["viridis"](sizes.index(point["global_batch_size"]) / max(1, len(sizes) - 1))
            found = [
                (entry["learning_rate_factor"], 100 * entry["validation_accuracy_mean"]) for entry in point["search"]
            ]
            if found:
                panel.plot(
                    *zip(*found, strict=True),
                    color=shade,
                    marker="o",
                    markersize=2.5,
                    linewidth=1,
                    label=str(point["global_batch_size"]),
                )
        panel.set_xscale("log", base=2)
        panel.set_title(arm["arm"], fontsize=9)
        panel.tick_params(labelsize=7, labelbottom=True)
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, title="batch", fontsize=7, title_fontsize=7, loc="outside right upper", frameon=False)
    figure.supxlabel("learning rate / scaled learning rate", fontsize=8)
    return page.save_figure(figure, workdir / "learning_rate_search.png")


def _style(index: int) -> tuple[str, str]:
    return _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]


def _label(arm: Mapping[str, Any]) -> str:
    if arm["limit"] is None:
        return arm["arm"]
    return f"{arm['arm']} (limit {'at least ' if arm['limit_is_largest'] else ''}{arm['limit']})"


def _batch_axis(axes: Any, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("global batch size")
