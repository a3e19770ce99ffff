"""What is said of the search: whether it was the same for all, where its choice lies, what the rules would have cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lbopt.sweep.findings.metric import Metric
from lbopt.sweep.findings.names import arm_name, grouped, listed
from lbopt.sweep.findings.points import search_of

Arms = Sequence[Mapping[str, Any]]
_EDGES = {
    "at_edge_of_grid": "learning rate",
    "warmup_at_edge": "warmup",
    "weight_decay_at_edge": "weight decay",
}


def kept_warmup(config: Mapping[str, Any], measured: Arms, metric: Metric) -> list[str]:
    """Say what keeping the rule's own warmup would have cost on validation; a grid tries it at every learning rate.

    Args:
      config: the study's config as JSON data.
      measured: arms of a summary that have a tested cell.
      metric: what the study is judged by.

    Returns:
      One sentence; none where no grid of warmups was tried, or where candidates were chosen by their steps to a target.
    """
    if config["train"].get("target_metric"):
        return []
    parts = []
    for arm in measured:
        search = search_of(config, arm["arm"])
        if search["method"] != "grid" or not {1.0} < set(search["warmup_factors"]):
            continue
        losses = [
            (_kept_loss(point, metric), point["global_batch_size"]) for point in arm["points"]
        ]
        parts += _kept_part(
            arm_name(arm), [(loss, size) for loss, size in losses if loss is not None], metric
        )
    kept = f"Had every arm kept its own rule's warmup, the best validation {metric.name} of the search would have been worse by"
    return [f"{kept}: {', '.join(parts)}."] if parts else []


def _kept_part(name: str, found: Sequence[tuple[float, int]], metric: Metric) -> list[str]:
    """Say the worst loss of an arm, and where it had diverged instead."""
    finite = [pair for pair in found if math.isfinite(pair[0])]
    broken = [str(size) for loss, size in found if not math.isfinite(loss)]
    words = []
    if finite:
        worst, size = max(finite)
        words.append(f"up to {metric.amount(worst)}" + (f" (at batch {size})" if worst > 0 else ""))
    if broken:
        words.append(f"diverged at batch {listed(broken)}")
    return [f"{name} {' and '.join(words)}"] if words else []


def _kept_loss(point: Mapping[str, Any], metric: Metric) -> float | None:
    """Return by how much the best candidate with warmup factor 1 was worse than the best of all, at full length.

    Infinite where all of the former diverged in a language model; None where none was tried, or where all of all diverged.
    """
    name = f"validation_{metric.name}_mean"
    full = [one for one in point["search"] if one["fidelity"] == 1]
    scores = [one[name] for one in full if one[name] is not None]
    kept = [one[name] for one in full if one["warmup_factor"] == 1]
    if not kept or not scores:
        return None
    pick = max if metric.name == "accuracy" else min
    finite = [score for score in kept if score is not None]
    return metric.worse_by(pick(scores), pick(finite)) if finite else math.inf


def same_search(config: Mapping[str, Any], measured: Arms) -> str:
    """Say whether every arm got the same search: its configs, and the trials counted from the rows.

    Args:
      config: the study's config as JSON data.
      measured: arms of a summary that have a tested cell.
    """
    trials = {arm["arm"]: {point["search_trials"] for point in arm["points"]} for arm in measured}
    lengths = {point["search_full_runs"] for arm in measured for point in arm["points"]}
    counts = set().union(*trials.values())
    differ = _fields_that_differ([search_of(config, arm["arm"]) for arm in measured])
    if len(counts) == len(lengths) == 1:
        (count,), (length,) = counts, lengths
        full = f" ({length:.3g} runs of full length)" if length != count else ""
        each = f"{count} trial{'s' * (count != 1)} at each batch size{full}"
        if not differ:
            return f"Every arm got the same search: {each}."
        return f"The arms did not get the same search: as many, {each}, but of other candidates ({', '.join(differ)} differ{'s' * (len(differ) == 1)})."
    spans = grouped((_span(found), name) for name, found in trials.items())
    runs = f"from {min(lengths):.3g} to {max(lengths):.3g} runs of full length"
    return f"The arms did not get the same search: trials at each batch size were {spans}; they are worth {runs}."


def _fields_that_differ(searches: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for search in searches for name in search)
    return [
        name
        for name in names
        if any(search.get(name) != searches[0].get(name) for search in searches)
    ]


def _span(counts: set[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def chosen_rates(measured: Arms) -> str:
    """Say how far each scaling rule was from the rate that validation chose: one that transfers stays put.

    Args:
      measured: arms of a summary that have a tested cell.
    """
    spans = []
    for arm in measured:
        factors = [point["learning_rate_factor"] for point in arm["points"]]
        low, high = f"{min(factors):.3g}", f"{max(factors):.3g}"
        spans.append((low if low == high else f"{low} to {high}", arm["arm"]))
    return f"Over the batch sizes, the chosen learning rate was this many times the one the scaling rule gives: {grouped(spans)}."


def at_edges(measured: Arms) -> list[str]:
    """Say which factors were chosen at an edge of what was searched, and where.

    Args:
      measured: arms of a summary that have a tested cell.

    Returns:
      A sentence for each factor that was.
    """
    return [
        f"The best {what} lies at the edge of the search for {'; '.join(edges)}: a wider one might do better."
        for key, what in _EDGES.items()
        if (edges := _edges(measured, key))
    ]


def _edges(measured: Arms, key: str) -> list[str]:
    return [
        f"{arm_name(arm)} at {', '.join(str(point['global_batch_size']) for point in found)}"
        for arm in measured
        if (found := [point for point in arm["points"] if point[key]])
    ]
