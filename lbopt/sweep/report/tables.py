"""The tables of a study: on the page, on the terminal, and every trial as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from lbopt.sweep.findings.metric import ACCURACY, PERPLEXITY, Metric, Row

_COLUMNS = (
    ("phase", "phase"),
    ("arm", "arm"),
    ("batch", "global_batch_size"),
    ("fidelity", "fidelity"),
    ("learning rate", "learning_rate"),
    ("warmup steps", "warmup_steps"),
    ("weight decay", "weight_decay"),
    ("seed", "seed"),
    ("steps run", "steps_run"),
)


def results_table(arms: Sequence[Mapping[str, Any]], metric: Metric) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table with everything: one row for each cell that was tested.

    Args:
      arms: of a summary, with one tested cell at least.
      metric: what the study is judged by.

    Returns:
      Text throughout; accuracies in percent, "" for what was not measured. Columns in which all is "" are left out.
    """
    rows = [_point_row(arm, point, metric) for arm in arms for point in arm["points"]]
    # A column that no cell has anything in was not measured in this study.
    kept = [name for name in rows[0] if any(row[name] for row in rows)]
    return kept, [[row[name] for name in kept] for row in rows]


def _point_row(arm: Mapping[str, Any], point: Mapping[str, Any], metric: Metric) -> dict[str, str]:
    edge = " (edge)" if point["at_edge_of_grid"] else ""
    return {
        "arm": arm["arm"],
        "batch": str(point["global_batch_size"]),
        **_scores(point, metric),
        "limit": "" if arm["limit"] is None else f"{'>= ' * arm['limit_is_largest']}{arm['limit']}",
        "diverged": f"{point['diverged']}/{point['seeds']}",
        "at step": _number(point["divergence_step"]),
        "steps": str(point["steps"]),
        "learning rate": f"{point['learning_rate']:.4g}",
        "x scaled": f"{point['learning_rate_factor']:.3g}{edge}",
        "warmup steps": f"{point['warmup_steps']:.4g}",
        "x warmup": f"{point['warmup_factor']:.3g}",
        "x decay": f"{point['weight_decay_factor']:.3g}",
        "search trials": str(point["search_trials"]),
        "of them diverged": str(point["search_diverged"] or ""),
        "noise scale": _number(point["noise_scale"]),
        "distance": _number(point["distance_mean"]),
        "exponent": _number(point["diffusion"] and point["diffusion"]["exponent"]),
        "steps to target": _number(point["target"] and point["target"]["steps_median"]),
    }


def _scores(point: Mapping[str, Any], metric: Metric) -> dict[str, str]:
    """Return the measure on the test split with its spread over seeds, then the other splits and the losses."""
    names = {"test %": "mean", "std": "std", "min": "min", "max": "max"}
    show, judged = _percent, names
    if metric is PERPLEXITY:
        show, judged = (
            _number,
            {"test perplexity" if title == "test %" else title: name for title, name in names.items()},
        )
    others = {f"{split} %": _percent(point[f"{split}_accuracy_mean"]) for split in ("train", "validation", "test")}
    losses = {f"{split} loss": _number(point[f"{split}_loss_mean"]) for split in ("train", "test")}
    return {title: show(point[f"test_{metric.name}_{name}"]) for title, name in judged.items()} | others | losses


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


# ---- every trial


def trials_table(rows: Sequence[Row], metric: Metric) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table of all trials, ascending in arm name and batch size, search before final.

    Args:
      rows: of `results.jsonl`.
      metric: what the study is judged by.

    Returns:
      Text throughout; accuracies in [0, 1], "" for what a trial does not have. The last column is the step at which it
      diverged, "yes" if none is known, and "" if it did not.
    """
    scores = [f"{split}_{metric.name}" for split in ("train", "validation", "test")]
    header = [title for title, _ in _COLUMNS] + [name.replace("_", " ") for name in scores] + ["diverged at"]
    ordered = sorted(rows, key=lambda row: (row["arm"], row["global_batch_size"], row["phase"] == "final"))
    return header, [_trial_row(row, scores) for row in ordered]


def _trial_row(row: Row, scores: Sequence[str]) -> list[str]:
    told = [row.get(name) for _, name in _COLUMNS] + [row.get(name) for name in scores]
    diverged = (row.get("divergence_step") or "yes") if row["diverged"] else ""
    return [_cell(value) for value in told] + [str(diverged)]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def trials_csv(rows: Sequence[Row]) -> str:
    """Return every trial as CSV: one line each, all fields that are one number or word.

    Args:
      rows: of `results.jsonl`.

    Returns:
      A line of the fields' names, as they are first met, and then the rows in their order; what a row does not have is empty.
    """
    nested = {name for row in rows for name, value in row.items() if isinstance(value, dict | list)}
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in nested]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


# ---- the terminal


def terminal_table(summary: Mapping[str, Any]) -> str:
    """Return the measure on the test split per arm and batch size, and the limits, as text.

    Args:
      summary: from `summarize`, with an arm at least.

    Returns:
      Lines without a last newline; accuracies in percent, "div." for a perplexity that is not finite, blanks where an arm was
      not tested.
    """
    metric = PERPLEXITY if summary["metric"] == "perplexity" else ACCURACY
    sizes = sorted({point["global_batch_size"] for arm in summary["arms"] for point in arm["points"]})
    width = max(len(arm["arm"]) for arm in summary["arms"])
    lines = [
        f"test {metric.label} (mean over seeds)".ljust(width),
        "batch".ljust(width) + "".join(f"{size:>8}" for size in sizes) + "   limit",
    ]
    for arm in summary["arms"]:
        values = {
            point["global_batch_size"]: _in_terminal(metric.shown(point[f"test_{metric.name}_mean"]))
            for point in arm["points"]
        }
        limit = "-" if arm["limit"] is None else f"{'>=' * arm['limit_is_largest']}{arm['limit']}"
        lines.append(arm["arm"].ljust(width) + "".join(values.get(size, " " * 8) for size in sizes) + f"{limit:>8}")
    return "\n".join(lines)


def _in_terminal(value: float) -> str:
    return f"{'div.':>8}" if value != value else f"{value:8.2f}"
