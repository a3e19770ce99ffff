"""What was measured in the course of a cell's runs, as one curve: the mean over its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lbopt.sweep.findings.probes import by_step
from lbopt.sweep.report.figures.style import Study

Curve = list[tuple[int, float]]
Column = Callable[[Mapping[str, Any]], Sequence[float | None]]


def mean_curve(series: Iterable[Mapping[str, Any]], column: str | Column) -> Curve:
    """Return the mean over seeds at the steps at which every one of them has a number, ascending in the step.

    Runs that stop at a target or diverge differ in length: a mean over those that are left would jump where one ends.

    Args:
      series: `{"step": [...], ...}` of every seed; None in a column is no number.
      column: its name, or what takes it out of a seed's series; a seed whose column is empty or missing does not count.

    Returns:
      (step, mean).

    >>> mean_curve([{"step": [1, 2, 3], "x": [1.0, 2.0, 9.0]}, {"step": [1, 2], "x": [3.0, 4.0]}], "x")
    [(1, 2.0), (2, 3.0)]
    """
    columns = [
        (one["step"], (one.get(column) or ()) if isinstance(column, str) else column(one))
        for one in series
    ]
    kept = [{"step": steps, "value": values} for steps, values in columns if values]
    found = by_step(kept, lambda one: one["value"])
    return [
        (step, statistics.fmean(values))
        for step, values in found.items()
        if len(values) == len(kept)
    ]


def positive(curve: Iterable[tuple[int, float]]) -> Curve:
    """Return the part of a curve that a logarithmic axis can show."""
    return [(step, value) for step, value in curve if value > 0]


def series_of(
    study: Study, arm: Mapping[str, Any], size: int, name: str
) -> list[Mapping[str, Any]]:
    """Return the "curve" or the "probes" of every final run of a cell that has them.

    Args:
      study: what is drawn.
      arm: of the summary.
      size: global batch size.
      name: of the field of `results.jsonl`.
    """
    cell = study.cells.get((arm["arm"], size))
    return [row[name] for row in cell.final if row.get(name)] if cell else []
