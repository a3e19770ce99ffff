"""What a study found, from its rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lbopt.sweep import fits
from lbopt.sweep.findings.claims import judge
from lbopt.sweep.findings.limits import (
    draw_limits,
    failure,
    find_limit,
    measured_in_a_row,
    starts_badly,
)
from lbopt.sweep.findings.metric import Metric, Row, metric_of
from lbopt.sweep.findings.points import CellRows, Index, index_rows, measure_point
from lbopt.sweep.findings.sentences import sentences
from lbopt.sweep.findings.waterfall import measure_waterfall

__all__ = ["find_limit", "summarize"]


def summarize(config: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Return the summary of a study, complete or not.

    Args:
      config: the study's config as JSON data.
      rows: of `results.jsonl`, in any order.

    Returns:
      `{"name", "complete", "num_trials", "cells", "cells_complete", "metric", "limit_points", "arms": [{"arm", "limit",
      "limit_is_largest", "limit_interval", "failure", "critical_batch", "points": [...]}], "waterfall", "claims",
      "findings": [sentence, ...]}`; a point has what `measure_point` returns, and there is one for each batch size with final
      trials. `metric` is "accuracy" or "perplexity", and `limit_points` is in its unit. The limit is a batch size; it and its
      95 % interval, (low, high), are null where a seed of the arm diverged at the study's smallest batch, or the arm has no
      result there, or where runs stop at a target. `failure` is what `lbopt.sweep.findings.limits.failure` returns, `critical_batch` a
      `lbopt.sweep.fits.CriticalBatch` of the median steps to the target, null where none could be fitted, and `waterfall` what
      `measure_waterfall` returns.
    """
    index, metric = index_rows(rows), metric_of(rows)
    measured = [_arm(config, place, index, metric) for place in range(len(config["arms"]))]
    arms = [arm for arm, _ in measured]
    done = sum(_is_complete(config, index.get((arm["name"], size))) for arm, size in _cells(config))
    summary: dict[str, Any] = {
        "name": config["name"],
        "complete": done == len(_cells(config)),
        "num_trials": len(rows),
        "cells": len(_cells(config)),
        "cells_complete": done,
        "metric": metric.name,
        "limit_points": config["limit_points"],
        "arms": arms,
        "waterfall": measure_waterfall(config, index, metric),
    }
    draws = {arm["arm"]: limits for arm, limits in measured if limits is not None}
    summary["claims"] = [claim._asdict() for claim in judge(config, summary, metric, draws)]
    return {**summary, "findings": sentences(config, summary, index, metric)}


def _cells(config: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], int]]:
    return [(arm, size) for arm in config["arms"] for size in config["global_batch_sizes"]]


def _is_complete(config: Mapping[str, Any], cell: CellRows | None) -> bool:
    """Return whether a cell was tested with every final seed; how many trials its search takes, no config can tell."""
    return cell is not None and {row["seed"] for row in cell.final} >= set(config["final_seeds"])


def _arm(
    config: Mapping[str, Any], place: int, index: Index, metric: Metric
) -> tuple[dict[str, Any], np.ndarray | None]:
    """Return an arm of the summary, and its limit over resampled seeds, None if it has none."""
    arm = config["arms"][place]["name"]
    sizes = [
        size
        for size in config["global_batch_sizes"]
        if (arm, size) in index and index[arm, size].final
    ]
    points = [measure_point(config, size, index[arm, size], metric) for size in sizes]
    scores = {size: metric.scores(index[arm, size].final, "test") for size in sizes}
    # Up to the first gap only: the limit of an unfinished study starts at its smallest batch or not at all.
    row = [] if starts_badly(points) else measured_in_a_row(config, sizes)
    measured = [(size, scores[size]) for size in row]
    limit = find_limit(
        [(size, metric.centre(values)) for size, values in measured], config["limit_points"], metric
    )
    draws = None if limit is None else draw_limits(measured, config["limit_points"], metric, place)
    found = {
        "arm": arm,
        "limit": limit,
        "limit_is_largest": limit == config["global_batch_sizes"][-1],
        "limit_interval": None if draws is None else fits.limit_quantiles(draws),
        "failure": failure(points[: len(measured)], limit, metric),
        "critical_batch": _critical_batch(points),
        "points": points,
    }
    return found, draws


def _critical_batch(points: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Return the fit of the median steps to the target, over the batch sizes at which it was reached."""
    reached = [
        (point["global_batch_size"], point["target"]["steps_median"])
        for point in points
        if point["target"] and point["target"]["steps_median"]
    ]
    fit = fits.fit_critical_batch(*zip(*reached, strict=True)) if reached else None
    return None if fit is None else fit._asdict()
