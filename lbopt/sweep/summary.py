"""What a study found, from its rows alone."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lbopt.sweep.trials import FINAL, SEARCH

Row = Mapping[str, Any]


def summarize(config: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Return the summary of a study, complete or not.

    Args:
      config: the study's config as JSON data.
      rows: of `results.jsonl`, in any order.

    Returns:
      `{"name", "complete", "num_trials", "limit_points", "arms": [{"arm", "limit", "limit_is_largest", "points":
      [{"global_batch_size", "learning_rate", ..., "test_accuracy_mean", ...}]}], "findings": [sentence, ...]}`.
    """
    expected = len(config["learning_rate_factors"]) * len(config["search_seeds"]) + len(config["final_seeds"])
    arms = [_arm(config, arm["name"], rows) for arm in config["arms"]]
    total = expected * len(config["arms"]) * len(config["global_batch_sizes"])
    summary = {
        "name": config["name"],
        "complete": len(rows) == total,
        "num_trials": len(rows),
        "limit_points": config["limit_points"],
        "arms": arms,
    }
    return {**summary, "findings": _findings(config, arms, len(rows), total)}


def _arm(config: Mapping[str, Any], arm: str, rows: Sequence[Row]) -> dict[str, Any]:
    points = [point for size in config["global_batch_sizes"] if (point := _point(config, arm, size, rows)) is not None]
    means = {point["global_batch_size"]: point["test_accuracy_mean"] for point in points}
    # Up to the first gap only: the limit of an unfinished study starts at its smallest batch or not at all.
    sizes = list(itertools.takewhile(means.__contains__, config["global_batch_sizes"]))
    limit = find_limit([(size, means[size]) for size in sizes], config["limit_points"])
    return {"arm": arm, "limit": limit, "limit_is_largest": limit == config["global_batch_sizes"][-1], "points": points}


def _point(config: Mapping[str, Any], arm: str, size: int, rows: Sequence[Row]) -> dict[str, Any] | None:
    here = [row for row in rows if (row["arm"], row["global_batch_size"]) == (arm, size)]
    final = [row for row in here if row["phase"] == FINAL]
    if not final:
        return None
    accuracies = [row["test_accuracy"] for row in final]
    factors = config["learning_rate_factors"]
    chosen = final[0]["learning_rate_factor"]
    return {
        "global_batch_size": size,
        "steps": final[0]["steps"],
        "warmup_steps": final[0]["warmup_steps"],
        "learning_rate": final[0]["learning_rate"],
        "learning_rate_factor": chosen,
        "at_edge_of_grid": len(factors) > 1 and chosen in (factors[0], factors[-1]),
        "seeds": len(final),
        "diverged": sum(row["diverged"] for row in final),
        "validation_accuracy_mean": statistics.fmean(row["validation_accuracy"] for row in final),
        "test_accuracy_mean": statistics.fmean(accuracies),
        "test_accuracy_std": statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0,
        "test_accuracy_min": min(accuracies),
        "test_accuracy_max": max(accuracies),
        "search": [
            {"learning_rate_factor": factor, "validation_accuracy_mean": statistics.fmean(found)}
            for factor in factors
            if (
                found := [
                    row["validation_accuracy"]
                    for row in here
                    if row["phase"] == SEARCH and row["learning_rate_factor"] == factor
                ]
            )
        ],
    }


def find_limit(points: Sequence[tuple[int, float]], limit_points: float) -> int | None:
    """Return the largest batch up to which accuracy stays within so many percentage points of the smallest batch's.

    Args:
      points: (batch size, accuracy in [0, 1]), ascending in batch size.
      limit_points: percentage points.

    Returns:
      The batch size, None if there are no points.

    >>> find_limit([(16, 0.98), (64, 0.975), (256, 0.95), (1024, 0.98)], limit_points=1.0)
    64
    """
    limit = None
    for size, accuracy in points:
        if 100 * (points[0][1] - accuracy) > limit_points + 1e-9:
            break
        limit = size
    return limit


def _findings(config: Mapping[str, Any], arms: Sequence[Mapping[str, Any]], found: int, total: int) -> list[str]:
    """Say in sentences what the numbers say, whether or not anybody hoped for it."""
    sentences = []
    if found < total:
        sentences.append(f"The study is not complete: {found} of {total} trials are finished.")
    measured = [arm for arm in arms if arm["points"]]
    if not measured:
        return sentences
    for arm in measured:
        sentences.append(_limit_sentence(arm, config["limit_points"]))
    largest = config["global_batch_sizes"][-1]
    there = [
        (point, arm["arm"]) for arm in measured for point in arm["points"] if point["global_batch_size"] == largest
    ]
    if len(there) > 1:
        sentences.append(_largest_sentence(there, largest))
    if found == total:
        sentences.append(_hypothesis_sentence(config, measured))
    sentences.append(_transfer_sentence(measured))
    edges = [
        f"{arm['arm']} at {point['global_batch_size']}"
        for arm in measured
        for point in arm["points"]
        if point["at_edge_of_grid"]
    ]
    if edges:
        sentences.append(
            f"The best learning rate lies at the edge of the grid for {', '.join(edges)}: a wider search might raise these."
        )
    return sentences


def _limit_sentence(arm: Mapping[str, Any], limit_points: float) -> str:
    if arm["limit"] is None:
        return f"{arm['arm']} has no result at the smallest batch yet."
    first = arm["points"][0]
    start = f"{arm['arm']} ({_percent(first)} at batch {first['global_batch_size']})"
    if arm["limit_is_largest"]:
        return f"{start} stays within {limit_points:g} point{'s' * (limit_points != 1)} up to the largest batch, {arm['limit']}: its limit was not reached."
    following = [point for point in arm["points"] if point["global_batch_size"] > arm["limit"]]
    if not following:
        return f"{start} stays within {limit_points:g} point{'s' * (limit_points != 1)} at every batch measured so far, up to {arm['limit']}."
    beyond = following[0]
    return f"{start} reaches its limit at batch {arm['limit']}; at {beyond['global_batch_size']} it has {_percent(beyond)}."


def _largest_sentence(there: Sequence[tuple[Mapping[str, Any], str]], largest: int) -> str:
    ranked = sorted(there, key=lambda pair: -pair[0]["test_accuracy_mean"])
    order = ", ".join(f"{name} {_percent(point)}" for point, name in ranked)
    (best, best_name), (second, second_name) = ranked[:2]
    overlap = best["test_accuracy_min"] <= second["test_accuracy_max"]
    verdict = (
        f"the seeds of {best_name} and {second_name} overlap"
        if overlap
        else f"every seed of {best_name} is above every seed of {second_name}"
    )
    return f"At batch {largest}: {order}; {verdict}."


def _hypothesis_sentence(config: Mapping[str, Any], measured: Sequence[Mapping[str, Any]]) -> str:
    """Hold the claim of the LEGW and LAMB papers against the limits."""
    layerwise = {
        arm["name"]
        for arm in config["arms"]
        if arm["optimizer"]["name"] in ("lamb", "lars") and arm["schedule"]["warmup_rule"] == "legw"
    }
    ours = [arm for arm in measured if arm["arm"] in layerwise and arm["limit"]]
    others = [arm for arm in measured if arm["arm"] not in layerwise and arm["limit"]]
    if not ours or not others:
        return "The study does not compare layerwise optimizers under LEGW with others."
    best_other = max(arm["limit"] for arm in others)
    if best_other == config["global_batch_sizes"][-1]:
        return f"Whether layerwise adaptation with LEGW goes further cannot be told: another arm reached the largest batch, {best_other}, too."
    ahead = [arm["arm"] for arm in ours if arm["limit"] > best_other]
    level = [arm["arm"] for arm in ours if arm["limit"] == best_other]
    behind = [arm["arm"] for arm in ours if arm["limit"] < best_other]
    claim = "That layerwise adaptation with LEGW holds small-batch accuracy to a larger batch than the other arms"
    verdict = f"{claim} (at most {best_other}) {'held' if ahead else 'did not hold'} here"
    parts = [
        f"{_join(names)} {how}"
        for names, how in ((ahead, "went further"), (level, "went as far"), (behind, "fell short"))
        if names
    ]
    return f"{verdict}: {', '.join(parts)}."


def _transfer_sentence(measured: Sequence[Mapping[str, Any]]) -> str:
    """Say how far each scaling rule was from the rate that validation chose: one that transfers stays put."""
    spans = []
    for arm in measured:
        factors = [point["learning_rate_factor"] for point in arm["points"]]
        spans.append(f"{min(factors):g} to {max(factors):g} for {arm['arm']}")
    return f"Over the batch sizes, the chosen learning rate was this many times the one the scaling rule gives: {', '.join(spans)}."


def _join(names: Sequence[str]) -> str:
    return " and ".join(names)


def _percent(point: Mapping[str, Any]) -> str:
    return f"{100 * point['test_accuracy_mean']:.2f}%"
