"""The tables of a study: on the page, on the terminal, and every trial as CSV."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lbopt.shown import printable, spreadsheet_cell
from lbopt.sweep.findings.metric import ACCURACY, PERPLEXITY, Metric, Row
from lbopt.sweep.findings.points import Index, cut_warmups
from lbopt.sweep.findings.probes import by_step

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


def results_table(
    arms: Sequence[Mapping[str, Any]], metric: Metric, cells: Index
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table with everything: one row for each cell that was tested.

    Args:
      arms: of a summary, with one tested cell at least.
      metric: what the study is judged by.
      cells: rows of `results.jsonl`, by (arm, batch size).

    Returns:
      Text throughout; accuracies in percent, "" for what was not measured. Columns in which all is "" are left out.
    """
    rows = [
        _point_row(arm, point, metric)
        | _probed(point, cells[arm["arm"], point["global_batch_size"]].final)
        for arm in arms
        for point in arm["points"]
    ]
    # A column that no cell has anything in was not measured in this study.
    kept = [name for name in rows[0] if any(row[name] for row in rows)]
    return kept, [[row[name] for name in kept] for row in rows]


def _point_row(arm: Mapping[str, Any], point: Mapping[str, Any], metric: Metric) -> dict[str, str]:
    edges = {"rate": "at_edge_of_grid", "warmup": "warmup_at_edge", "decay": "weight_decay_at_edge"}
    edge = {name: " (edge)" if point[field] else "" for name, field in edges.items()}
    if point["warmup_factor"] in cut_warmups(point["search"]):
        edge["warmup"] = " (cut)"
    return {
        "arm": arm["arm"],
        "batch": str(point["global_batch_size"]),
        **_scores(point, metric),
        "limit": "" if arm["limit"] is None else f"{'>= ' * arm['limit_is_largest']}{arm['limit']}",
        "fails to": _failure(arm, point),
        "diverged": f"{point['diverged']}/{point['seeds']}",
        "at step": _number(point["divergence_step"]),
        "steps": str(point["steps"]),
        "learning rate": f"{point['learning_rate']:.4g}",
        "x scaled": f"{point['learning_rate_factor']:.3g}{edge['rate']}",
        "warmup steps": f"{point['warmup_steps']:.4g}",
        "x warmup": f"{point['warmup_factor']:.3g}{edge['warmup']}",
        "weight decay": f"{point['weight_decay']:.4g}",
        "x decay": f"{point['weight_decay_factor']:.3g}{edge['decay']}",
        "search trials": str(point["search_trials"]),
        "of them diverged": str(point["search_diverged"] or ""),
        "distance": _number(point["distance_mean"]),
        "exponent": _number(point["diffusion"] and point["diffusion"]["exponent"]),
        "R^2 of log t": _number(point["diffusion"] and point["diffusion"]["log_r2"]),
        "R^2 of t^p": _number(point["diffusion"] and point["diffusion"]["power_r2"]),
        "steps to target": _number(point["target"] and point["target"]["steps_median"]),
        "critical batch": _number(
            arm["critical_batch"] and arm["critical_batch"]["critical_batch_size"]
        ),
    }


def _failure(arm: Mapping[str, Any], point: Mapping[str, Any]) -> str:
    """Return how an arm fails, in the row of the first batch past its limit."""
    failed = arm["failure"]
    past = failed and failed["global_batch_size"] == point["global_batch_size"]
    return (failed["kind"] or "not told") if failed and past else ""


def _probed(point: Mapping[str, Any], final: Sequence[Row]) -> dict[str, str]:
    """Return what was probed in the final runs of a cell."""
    probes = [row["probes"] for row in final if row.get("probes")]
    step = point["lipschitz_peak_step"]
    at_peak = by_step(probes, lambda one: one.get("lipschitz") or ()).get(step, [])
    last = [
        phis[-1]
        for one in probes
        if (phis := [phi for phi in one.get("phi") or () if phi is not None])
    ]
    noise = (
        ""
        if point["noise_scale_over_steps"] is None
        else _number(point["noise_scale"]) or "infinite"
    )
    return {
        "noise scale": noise,
        "Lipschitz peak": _number(statistics.fmean(at_peak)) if at_peak else "",
        "at its step": _number(step),
        "mean phi": _number(point["phi_mean"]),
        "last phi": _number(statistics.fmean(last)) if last else "",
    }


def _scores(point: Mapping[str, Any], metric: Metric) -> dict[str, str]:
    """Return the measure on the test split with its spread over seeds, then the other splits and the losses."""
    names = {"test %": "mean", "std": "std", "min": "min", "max": "max"}
    show, judged = _percent, names
    if metric is PERPLEXITY:
        show, judged = (
            _number,
            {
                "test perplexity" if title == "test %" else title: name
                for title, name in names.items()
            },
        )
    others = {
        f"{split} %": _percent(point[f"{split}_accuracy_mean"])
        for split in ("train", "validation", "test")
    }
    losses = {f"{split} loss": _number(point[f"{split}_loss_mean"]) for split in ("train", "test")}
    return (
        {title: show(point[f"test_{metric.name}_{name}"]) for title, name in judged.items()}
        | others
        | losses
    )


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
      diverged, "yes" if none is known, and "" if it did not. Of a split whose loss is not finite no score is shown: the accuracy
      of outputs that are not numbers says nothing.
    """
    scores = [f"{split}_{metric.name}" for split in ("train", "validation", "test")]
    header = (
        [title for title, _ in _COLUMNS]
        + [name.replace("_", " ") for name in scores]
        + ["diverged at"]
    )
    ordered = sorted(
        rows, key=lambda row: (row["arm"], row["global_batch_size"], row["phase"] == "final")
    )
    return header, [_trial_row(row, scores) for row in ordered]


def _trial_row(row: Row, scores: Sequence[str]) -> list[str]:
    told = [row.get(name) for _, name in _COLUMNS]
    told += [
        None if row.get(f"{name.split('_')[0]}_loss") is None else row.get(name) for name in scores
    ]
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
      Text that a spreadsheet would take for a formula has an apostrophe before it.
    """
    nested = {name for row in rows for name, value in row.items() if isinstance(value, dict | list)}
    names = [
        name for name in dict.fromkeys(name for row in rows for name in row) if name not in nested
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(spreadsheet_cell, names))
    for row in rows:
        values = (row.get(name) for name in names)
        writer.writerow(
            spreadsheet_cell(value) if isinstance(value, str) else value for value in values
        )
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
    sizes = sorted(
        {point["global_batch_size"] for arm in summary["arms"] for point in arm["points"]}
    )
    names = [printable(arm["arm"]) for arm in summary["arms"]]
    width = max(map(len, names))
    lines = [
        f"test {metric.label} (mean over seeds)".ljust(width),
        "batch".ljust(width) + "".join(f"{size:>8}" for size in sizes) + "   limit",
    ]
    for name, arm in zip(names, summary["arms"], strict=True):
        values = {
            point["global_batch_size"]: _in_terminal(
                metric.shown(point[f"test_{metric.name}_mean"])
            )
            for point in arm["points"]
        }
        limit = "-" if arm["limit"] is None else f"{'>=' * arm['limit_is_largest']}{arm['limit']}"
        lines.append(
            name.ljust(width) + "".join(values.get(size, " " * 8) for size in sizes) + f"{limit:>8}"
        )
    return "\n".join(lines)


def _in_terminal(value: float) -> str:
    return f"{'div.':>8}" if value != value else f"{value:8.2f}"
