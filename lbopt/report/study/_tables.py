"""The tables of a study: on the page, on the terminal, and every trial as CSV."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lbopt._shown import printable, spreadsheet_cell
from lbopt.report.study._arm_limit import limit_text
from lbopt.report.study._metric import ACCURACY, PERPLEXITY, Metric
from lbopt.report.study._study import ArmResults, CellResults, Study
from lbopt.report.study._words import number
from lbopt.sweep import FinishedTrial

Table = tuple[list[str], list[list[str]]]
"""Header and lines, text throughout."""


def results_table(study: Study) -> Table:
    """Return the table of all results, with a line for each tested cell.

    Accuracies are in percent. Values that were not measured are "", and empty columns are left out.
    """
    lines = [_line(arm, cell, study.metric) for arm in study.measured for cell in arm.cells]
    kept = [name for name in lines[0] if any(line[name] for line in lines)]
    return kept, [[line[name] for name in kept] for line in lines]


def _line(arm: ArmResults, cell: CellResults, metric: Metric) -> dict[str, str]:
    first = cell.first
    chosen = cell.chosen
    edges = cell.edges
    at_edge = " (edge)"
    warmup = " (cut)" if chosen.warmup in cell.cut_warmups else at_edge * edges.warmup
    failed = arm.failure
    critical = arm.critical_batch
    fit = cell.diffusion
    target = cell.target
    past = failed is not None and failed.global_batch_size == cell.global_batch_size
    diverged = sum(run.diverged for run in cell.search)

    return {
        "arm": arm.name,
        "batch": str(cell.global_batch_size),
        **_scores(cell, metric),
        "limit": limit_text(arm.limit) if arm.limit else "",
        "fails to": (failed.kind or "not told") if failed and past else "",
        "diverged": f"{cell.diverged}/{cell.seeds}",
        "diverged at step": number(cell.divergence_step, 4),
        "steps": f"{first.steps:.0f}",
        "learning rate": number(first.learning_rate, 4),
        "x scaled": f"{chosen.learning_rate:.3g}{at_edge * edges.learning_rate}",
        "warmup steps": number(first.warmup_steps, 4),
        "x warmup": f"{chosen.warmup:.3g}{warmup}",
        "weight decay": number(first.weight_decay, 4),
        "x decay": f"{chosen.weight_decay:.3g}{at_edge * edges.weight_decay}",
        "search trials": str(len(cell.search)),
        "search diverged": str(diverged or ""),
        "distance": number(cell.distance, 4),
        "exponent": number(fit.exponent if fit else None, 4),
        "R^2 of log t": number(fit.log_r2 if fit else None, 4),
        "R^2 of t^p": number(fit.power_r2 if fit else None, 4),
        "steps to target": number(target.steps_median if target else None, 4),
        "critical batch": number(critical.critical_batch_size if critical else None, 4),
        **_probed(cell),
    }


def _scores(cell: CellResults, metric: Metric) -> dict[str, str]:
    """Return the test score with its spread over seeds, then the other splits and the losses."""
    test = cell.test
    means = cell.means
    in_percent = metric.scale == "percent"
    show = _percent if in_percent else lambda value: number(value, 4)
    column = "%" if metric is ACCURACY else metric.text + " %" * in_percent

    judged = {
        f"test {column}": show(test.mean),
        "std": show(test.std),
        "min": show(test.min),
        "max": show(test.max),
    }
    if metric not in (ACCURACY, PERPLEXITY):
        judged[f"train {column}"] = show(cell.mean_of("train", metric))

    return judged | {
        "train %": _percent(means.train_accuracy),
        "validation %": _percent(means.validation_accuracy),
        "test %": _percent(means.test_accuracy),
        "train loss": number(means.train_loss, 4),
        "test loss": number(means.test_loss, 4),
    }


def _probed(cell: CellResults) -> dict[str, str]:
    """Return the probed numbers of the final runs."""
    probes = [run.probes for run in cell.final if run.probes]
    step, peak = max(cell.lipschitz, key=lambda pair: pair[1], default=(None, None))
    phis = [[phi for phi in one.phi or () if phi is not None] for one in probes]
    last = [one[-1] for one in phis if one]
    scale = None if cell.noise is None else cell.noise.scale
    return {
        "noise scale": number(scale, 4).replace("inf", "infinite"),
        "Lipschitz peak": number(peak, 4),
        "peak at step": number(step, 4),
        "mean phi": number(cell.phi, 4),
        "last phi": number(statistics.fmean(last) if last else None, 4),
    }


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f}"


# ---- every trial

_COLUMNS = {
    "phase": "phase",
    "arm": "arm",
    "batch": "global_batch_size",
    "fidelity": "fidelity",
    "learning rate": "learning_rate",
    "warmup steps": "warmup_steps",
    "weight decay": "weight_decay",
    "seed": "seed",
    "steps run": "steps_run",
}


def trials_table(study: Study) -> Table:
    """Return the table of all trials, ascending in arm name and batch size, search before final.

    Accuracies are in [0, 1], other scores as in `results.jsonl` too. If the loss of a split is not
    finite, its score is left out. The last column is the step at which a trial diverged, "yes" if
    the step is not known.
    """
    splits = ("train", "validation", "test")
    scores = [f"{split} {study.metric.text}" for split in splits]

    def line(run: FinishedTrial) -> list[str]:
        told = [getattr(run, field) for field in _COLUMNS.values()]
        for split in splits:
            known = getattr(run, f"{split}_loss") is not None
            told.append(run.score(split, study.metric.name) if known else None)
        diverged = (number(run.divergence_step, 9) or "yes") if run.diverged else ""
        return [*map(_cell, told), diverged]

    ordered = sorted(study.runs, key=lambda run: (run.arm, run.global_batch_size, run.is_final))
    return [*_COLUMNS, *scores, "diverged at"], [line(run) for run in ordered]


def _cell(value: Any) -> str:
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4g}"
    return "" if value is None else f"{value:.0f}" if isinstance(value, float) else str(value)


def trials_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Return every trial as CSV, without curves, fits and probes.

    Args:
      records: Lines of `results.jsonl`.

    Returns:
      A line with the names of all fields, in the order of their first occurrence, then the records
      in their order; missing fields are empty. Text that a spreadsheet would take for a formula has
      an apostrophe before it.
    """
    nested = {
        name
        for record in records
        for name, value in record.items()
        if isinstance(value, dict | list)
    }
    names = [
        name
        for name in dict.fromkeys(name for record in records for name in record)
        if name not in nested
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(spreadsheet_cell, names))
    for record in records:
        values = (record.get(name) for name in names)
        writer.writerow(spreadsheet_cell(one) if isinstance(one, str) else one for one in values)
    return text.getvalue()


# ---- the terminal


def terminal_table(study: Study) -> str:
    """Return scores and limits, or steps to the target, as text without a last newline.

    A study whose runs stop at their target shows median steps and where scaling stops being
    perfect; others show mean test scores, accuracies in percent. "div." is a mean that is not
    finite, "never" a target that the median run did not reach; blank is a cell that was not tested.
    """
    metric = study.metric
    sizes = sorted({cell.global_batch_size for arm in study.arms for cell in arm.cells})
    names = [printable(arm.name) for arm in study.arms]
    width = max(map(len, names))
    what = f"test {metric.label} (mean over seeds)"
    last = "limit"
    if not study.has_limits:
        what = "steps to the target (median over seeds)"
        last = "perfect to"

    table = [
        [_in_terminal(study, cell) if cell else "" for cell in map(arm.cell, sizes)]
        for arm in study.arms
    ]
    column = max(8, 1 + max((len(one) for line in table for one in line), default=0))
    header = "".join(f"{size:>{column}}" for size in sizes)
    lines = [what.ljust(width), f"{'batch'.ljust(width)}{header}  {last:>8}"]
    for name, arm, shown in zip(names, study.arms, table, strict=True):
        estimate = arm.limit if study.has_limits else arm.scaling and arm.scaling.perfect_until
        limit = limit_text(estimate) if estimate else "-"
        numbers = "".join(f"{one:>{column}}" for one in shown)
        lines.append(f"{name.ljust(width)}{numbers}  {limit:>8}")
    return "\n".join(lines)


def _in_terminal(study: Study, cell: CellResults) -> str:
    if study.has_limits:
        return "div." if cell.test.mean is None else study.metric.digits(cell.test.mean)
    steps = cell.target.steps_median if cell.target else None
    return "never" if steps is None else f"{steps:.0f}"
