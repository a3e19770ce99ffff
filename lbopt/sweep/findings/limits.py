"""How far an arm goes, and what fails beyond: optimisation or generalisation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lbopt.sweep import fits
from lbopt.sweep.findings.metric import ACCURACY, Metric
from lbopt.sweep.findings.names import arm_name

_ROUNDING = 1e-9
_MOST = 0.5
OPTIMISE, GENERALISE = "optimise", "generalise"


def find_limit(
    points: Sequence[tuple[int, float]], limit_points: float, metric: Metric = ACCURACY
) -> int | None:
    """Return the largest batch up to which an arm stays within so many points of its result at the smallest batch.

    Args:
      points: (batch size, accuracy in [0, 1] or perplexity), ascending in batch size.
      limit_points: percentage points of accuracy, percent of a perplexity.
      metric: what the study is judged by.

    Returns:
      The batch size, None if there are no points or the first is not finite.

    >>> find_limit([(16, 0.98), (64, 0.975), (256, 0.95), (1024, 0.98)], limit_points=1.0)
    64
    """
    limit = None
    for size, score in points:
        if not metric.worse_by(points[0][1], score) <= limit_points + _ROUNDING:
            break
        limit = size
    return limit


def draw_limits(
    measured: Sequence[tuple[int, Sequence[float]]],
    limit_points: float,
    metric: Metric,
    index: int = 0,
) -> np.ndarray | None:
    """Return the limits of an arm over resampled seeds, None if nothing was measured.

    Args:
      measured: (batch size, score of every seed), ascending, without gaps; scores are accuracies in [0, 1] or perplexities.
      limit_points: as for `find_limit`.
      metric: what the study is judged by.
      index: of the arm in the study, so that the draws of two arms are independent.

    Returns:
      [draws] int, batch sizes of `measured`; see `lbopt.sweep.fits.resample_limits`.
    """
    if not measured:
        return None
    if metric is ACCURACY:
        return fits.resample_limits(measured, limit_points / 100, seed=(0, index))
    losses = [(size, [math.log(score) for score in scores]) for size, scores in measured]
    return fits.resample_limits(
        losses, math.log1p(limit_points / 100), higher_is_better=False, seed=(0, index)
    )


def starts_badly(points: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a seed of an arm diverged at its smallest batch, or none learned, so that there is no result to stay near to.

    One that diverged is enough: the mean of the others would be that of the seeds which went well.

    Args:
      points: of an arm, ascending in batch size, see `measure_point`; the first is its smallest batch.

    Returns:
      Whether one did; False if there are no points.
    """
    return bool(points) and (points[0]["diverged"] > 0 or points[0]["learned"] is False)


def why_no_limit(arm: Mapping[str, Any]) -> str:
    """Say why an arm has no limit, as a clause without the arm's name.

    Args:
      arm: of a summary of a study with limits, whose limit is None and whose smallest batch was tested.
    """
    first = arm["points"][0]
    if not first["diverged"] and first["learned"] is False:
        return f"it did not learn at the smallest batch, {first['global_batch_size']}"
    if not first["diverged"]:
        return f"its score at the smallest batch, {first['global_batch_size']}, is not finite"
    return f"it diverged{of_seeds(first)} at the smallest batch, {first['global_batch_size']}"


def named_without_limit(arms: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the arms that have no limit, each with the reason.

    Args:
      arms: of the summary of a complete study with limits.

    Returns:
      A clause for each.
    """
    return [
        f"{arm_name(arm)} has no limit: {why_no_limit(arm)}" for arm in arms if arm["limit"] is None
    ]


def of_seeds(counted: Mapping[str, Any]) -> str:
    """Say with how many of the seeds training diverged, if not with all.

    >>> of_seeds({"diverged": 1, "seeds": 5}), of_seeds({"diverged": 5, "seeds": 5})
    (' with 1 of 5 seeds', '')
    """
    some = counted["diverged"] < counted["seeds"]
    return f" with {counted['diverged']} of {counted['seeds']} seeds" if some else ""


def has_limits(config: Mapping[str, Any]) -> bool:
    """Return whether runs go on to their end: where they stop at a target, their accuracies are all near that.

    Args:
      config: the study's config as JSON data.
    """
    return not (config["train"].get("target_metric") and config["train"].get("stop_at_target"))


def measured_in_a_row(config: Mapping[str, Any], sizes: Sequence[int]) -> list[int]:
    """Return the measured batch sizes from the study's smallest up to the first gap; none in a study without limits.

    Args:
      config: the study's config as JSON data.
      sizes: batch sizes at which an arm was tested.
    """
    if not has_limits(config):
        return []
    return list(itertools.takewhile(set(sizes).__contains__, config["global_batch_sizes"]))


def failure(
    points: Sequence[Mapping[str, Any]], limit: int | None, metric: Metric
) -> dict[str, Any] | None:
    """Tell a failure to optimise from a failure to generalise, at the first batch past the limit.

    Both losses are from the smallest batch to that one: of accuracy in percentage points; of a language model's mean
    loss, the logarithm of its perplexity. Where more than half of what the test lost is lost in training too, the model
    was not optimised; where less, it was, and did not generalise.

    Args:
      points: of an arm, ascending in batch size, without gaps; see `measure_point`.
      limit: its limit, None if it has none.
      metric: what the study is judged by.

    Returns:
      `{"global_batch_size", "kind" ("optimise", "generalise" or null), "diverged", "seeds", "test_lost", "train_lost",
      "train_share"}`; None if there is no limit, or nothing past it. A loss is null where one of its two means is: so it is
      of training where seeds diverged, and of a language model's test as well. (In testing a diverged classifier counts as all
      wrong.) The share is null as well where the test lost nothing by its mean, and then whether training lost anything
      decides. The kind is null where it cannot be told.
    """
    past = next(
        (point for point in points if limit is not None and point["global_batch_size"] > limit),
        None,
    )
    if past is None:
        return None
    test, train = (_lost(points[0], past, split, metric) for split in ("test", "train"))
    share = train / test if test is not None and train is not None and test > 0 else None
    lost = {"test_lost": test, "train_lost": train, "train_share": share}
    counts = {"diverged": past["diverged"], "seeds": past["seeds"]}
    return {
        "global_batch_size": past["global_batch_size"],
        "kind": _kind(past, train, share),
        **counts,
        **lost,
    }


def _kind(past: Mapping[str, Any], train: float | None, share: float | None) -> str | None:
    """Return what failed; where training means cannot be compared, that training diverged tells it, or nothing does."""
    if train is None:
        return OPTIMISE if past["diverged"] else None
    if share is None:  # the test lost nothing by its mean
        return OPTIMISE if train > 0 else GENERALISE
    return OPTIMISE if share > _MOST else GENERALISE


def _lost(
    first: Mapping[str, Any], past: Mapping[str, Any], split: str, metric: Metric
) -> float | None:
    if metric is ACCURACY:
        before, after = first[f"{split}_accuracy_mean"], past[f"{split}_accuracy_mean"]
        return None if before is None or after is None else 100 * (before - after)
    before, after = first[f"{split}_loss_mean"], past[f"{split}_loss_mean"]
    return None if before is None or after is None or not math.isfinite(after) else after - before
