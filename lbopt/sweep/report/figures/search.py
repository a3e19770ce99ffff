"""What the search tried in every cell, learning rate by learning rate, and what it chose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lbopt.report import page
from lbopt.sweep.findings.metric import Metric
from lbopt.sweep.findings.points import is_chosen, search_of
from lbopt.sweep.report.figures import style
from lbopt.sweep.report.figures.style import Study

_NOTE = (
    "The horizontal axis is the learning rate divided by the rate that the arm's scaling rule gives; a rule that transfers "
    "keeps the peak at the same place. A ring marks what was chosen."
)
Entry = Mapping[str, Any]


def section(study: Study) -> page.Section | None:
    """Draw one small panel per arm: validation over the learning-rate factor, a colour for each batch size.

    Args:
      study: what is drawn; of its candidates those that were run at full length.

    Returns:
      A section with `learning_rate_search.png`; None if no arm tried more than one learning rate.
    """
    searching = [
        arm
        for arm in study.arms
        if any(searched(point, "learning_rate") for point in arm["points"])
    ]
    arms = searching[: 2 * style.MOST_PANEL_ROWS]
    if not arms:
        return None
    figure, grid = style.panels(-(-len(arms) // 2), min(2, len(arms)), sharex=True, sharey=True)
    shown = [panel for row in grid for panel in row]
    for panel in shown[len(arms) :]:
        panel.set_visible(False)
    for panel, arm in zip(shown, arms, strict=False):
        for point in arm["points"]:
            _draw_line(
                panel, study, point, joined=search_of(study.config, arm["arm"])["method"] == "grid"
            )
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.set_title(style.label(arm["arm"], style.TITLE_LETTERS), fontsize=9, loc="left")
    if study.metric.name == "perplexity":
        style.log_ticks(shown[0], "y")
    style.batch_legend(figure, study, study.sizes)
    style.below(grid, "learning rate / scaled learning rate")
    figure.supylabel(f"validation {study.metric.label}", fontsize=9)
    alt = "Mean validation score against learning rate over the scaled rate, a panel for each arm and a colour for each batch size"
    notes = [
        _NOTE,
        *_best_of_the_others(study),
        *_not_searched(len(study.arms) - len(searching)),
        *style.left_out(len(arms), len(searching), "arms"),
    ]
    png = page.save_figure(figure, study.workdir / "learning_rate_search.png")
    return page.Section("Learning-rate search", notes, pictures=[page.Picture(png, alt, wide=True)])


def _not_searched(count: int) -> list[str]:
    return (
        [f"Not drawn: {count} arm{'s' * (count > 1)} of which only one learning rate was tried."]
        if count
        else []
    )


def _best_of_the_others(study: Study) -> list[str]:
    if not any(
        searched(point, name) for point in _points(study) for name in ("warmup", "weight_decay")
    ):
        return []
    return [
        "Warmup or weight decay was searched too: where a learning rate was tried with several, the best of them is drawn."
    ]


def _draw_line(panel: Any, study: Study, point: Entry, joined: bool) -> None:
    full = [one for one in point["search"] if one["fidelity"] == 1]
    best = best_by(full, study.metric, ("learning_rate_factor",))
    found = [
        (one["learning_rate_factor"], study.metric.shown(_score(one, study.metric))) for one in best
    ]
    if not found:
        return
    colour = study.shade(point["global_batch_size"])
    panel.plot(
        *zip(*found, strict=True),
        color=colour,
        marker="o",
        markersize=2.5,
        linewidth=1 if joined else 0,
    )
    chosen = [(x, y) for (x, y), one in zip(found, best, strict=True) if is_chosen(point, one)]
    if chosen:
        panel.plot(*zip(*chosen, strict=True), linestyle="none", marker="o", markersize=7, markerfacecolor="none", markeredgecolor=colour)  # fmt: skip


def _score(entry: Entry, metric: Metric) -> float | None:
    return entry[f"validation_{metric.name}_mean"]


def best_by(entries: Iterable[Entry], metric: Metric, names: Sequence[str]) -> list[Entry]:
    """Return the best candidate for each value of the named factors, ascending in these.

    Args:
      entries: candidates, see `lbopt.sweep.findings.points.candidates`.
      metric: what the study is judged by.
      names: fields of the entries, such as "learning_rate_factor".

    Returns:
      One of the entries for each; of equally good ones the first.
    """
    best: dict[tuple[float, ...], Entry] = {}
    for entry in entries:
        key = tuple(entry[name] for name in names)
        if key not in best or _badness(entry, metric) < _badness(best[key], metric):
            best[key] = entry
    return [best[key] for key in sorted(best)]


def _badness(entry: Entry, metric: Metric) -> float:
    score = _score(entry, metric)
    return float("inf") if score is None else metric.worse_by(1.0, score)


def _points(study: Study) -> list[Entry]:
    return [point for arm in study.arms for point in arm["points"]]


def searched(point: Entry, name: str) -> bool:
    """Return whether a cell's search tried more than one "learning_rate", "warmup" or "weight_decay".

    Args:
      point: of a summary.
      name: one of these three.
    """
    return len({one[f"{name}_factor"] for one in point["search"]}) > 1
