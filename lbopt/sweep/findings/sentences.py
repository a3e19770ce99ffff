"""What a study found, in sentences made from its numbers, whether or not anybody hoped for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lbopt.sweep.findings.differences import welch_interval
from lbopt.sweep.findings.limits import has_limits
from lbopt.sweep.findings.metric import Metric
from lbopt.sweep.findings.names import arm_name, grouped
from lbopt.sweep.findings.points import Index, search_of

Points = Sequence[Mapping[str, Any]]
Arms = Sequence[Mapping[str, Any]]


def sentences(config: Mapping[str, Any], summary: Mapping[str, Any], index: Index, metric: Metric) -> list[str]:
    """Return the findings, one sentence each.

    Args:
      config: the study's config as JSON data.
      summary: what `summarize` returns, but the findings.
      index: rows by cell.
      metric: what the study is judged by.

    Returns:
      How complete the study is, if it is not, then limits, claims, target and search; of a study without a tested cell the first
      only.
    """
    measured = [arm for arm in summary["arms"] if arm["points"]]
    if not measured:
        return _completeness(summary)
    return [
        *_completeness(summary),
        *(_limit_sentence(config, arm, metric) for arm in measured if has_limits(config)),
        *_largest(config, measured, index, metric),
        *(claim["sentence"] for claim in summary["claims"]),
        *_kept_warmup(config, measured, metric),
        *_target(config, measured),
        *_waterfall(summary["waterfall"], metric),
        _budget_sentence(measured),
        _transfer_sentence(measured),
        *_edges(measured),
    ]


def _completeness(summary: Mapping[str, Any]) -> list[str]:
    if summary["complete"]:
        return []
    cells = f"{summary['cells_complete']} of {summary['cells']} cells (arm and batch size) have all their final trials"
    return [f"The study is not complete: {cells}, with {summary['num_trials']} trials so far."]


# ---- limits


def _limit_sentence(config: Mapping[str, Any], arm: Mapping[str, Any], metric: Metric) -> str:
    first, near = arm["points"][0], metric.amount(config["limit_points"])
    if first["global_batch_size"] != config["global_batch_sizes"][0]:
        return f"{arm_name(arm)} has no result at the smallest batch yet."
    if arm["limit"] is None:
        return f"{arm_name(arm)} diverged{_of_seeds(first)} at its smallest batch, {first['global_batch_size']}: it has no limit."
    start = f"{arm_name(arm)} ({_shown(first, metric)} at batch {first['global_batch_size']})"
    if arm["limit_is_largest"]:
        return f"{start} stays within {near} up to the largest batch, {arm['limit']}: its limit was not reached{_interval(arm)}."
    if arm["failure"] is None:
        return f"{start} stays within {near} at every batch measured so far, up to {arm['limit']}."
    beyond = next(p for p in arm["points"] if p["global_batch_size"] == arm["failure"]["global_batch_size"])
    there = f"at {beyond['global_batch_size']} it has {_shown(beyond, metric)} and {_failure(arm['failure'], metric)}"
    return f"{start} reaches its limit at batch {arm['limit']}{_interval(arm)}; {there}."


def _interval(arm: Mapping[str, Any]) -> str:
    low, high = arm["limit_interval"]
    return f" (95 % interval over seeds {low} to {high})" if low < high else ""


def _of_seeds(counted: Mapping[str, Any]) -> str:
    """Say with how many of the seeds training diverged, if not with all."""
    some = counted["diverged"] < counted["seeds"]
    return f" with {counted['diverged']} of {counted['seeds']} seeds" if some else ""


def _failure(failed: Mapping[str, Any], metric: Metric) -> str:
    """Say what failed at the first batch past the limit."""
    train, test = failed["train_lost"], failed["test_lost"]
    if failed["kind"] is None:
        return "whether training failed too cannot be told, as a seed diverged at the smallest batch"
    if train is None or test is None:
        return f"fails to {failed['kind']}: training diverged{_of_seeds(failed)}"
    if failed["train_share"] is None:
        return f"fails to {failed['kind']}: its mean test loss did not rise, its training loss did{'' if train > 0 else ' not either'}"
    if metric.name == "accuracy":
        return f"fails to {failed['kind']}: test accuracy lost {test:.2f} points, training accuracy {train + 0.0:.2f}"
    return f"fails to {failed['kind']}: the test loss rose by {test:.3f}, the training loss by {train:.3f}"


# ---- the largest batch


def _largest(config: Mapping[str, Any], measured: Arms, index: Index, metric: Metric) -> list[str]:
    largest = config["global_batch_sizes"][-1]
    if not has_limits(config):
        return _steps_at(largest, measured)
    there = [
        (arm_name(arm), scores)
        for arm in measured
        if (cell := index.get((arm["arm"], largest))) and (scores := metric.scores(cell.final, "test"))
    ]
    if len(there) < 2:
        return []
    ranked = sorted(there, key=lambda pair: metric.worse_by(1.0, metric.centre(pair[1])))
    order = ", ".join(f"{name} {metric.show(metric.centre(scores))}" for name, scores in ranked)
    return [f"At batch {largest}: {order}; {_difference(ranked[0], ranked[1], metric)}."]


def _steps_at(size: int, measured: Arms) -> list[str]:
    """Say how many steps each arm takes at a batch size, as runs that stop at the target differ in nothing else."""
    there = [(arm, point["target"]["steps_median"]) for arm in measured for point in arm["points"] if point["global_batch_size"] == size]  # fmt: skip
    if len(there) < 2:
        return []
    ranked = sorted(there, key=lambda pair: math.inf if pair[1] is None else pair[1])
    said = ", ".join(f"{arm_name(arm)} {'not reached' if steps is None else f'{steps:,.0f}'}" for arm, steps in ranked)
    return [f"Median steps to the target at batch {size}: {said}."]


def _difference(best: tuple[str, list[float]], second: tuple[str, list[float]], metric: Metric) -> str:
    scale = 100 if metric.name == "accuracy" else 1
    interval = welch_interval(best[1], second[1])
    if interval is None:
        return f"whether {best[0]} and {second[0]} differ cannot be told from these seeds"
    low, high = (scale * end for end in interval)
    unit = "points" if metric.name == "accuracy" else "of perplexity"
    apart = "are told apart" if low > 0 or high < 0 else "are not told apart from seed noise"
    return (
        f"{best[0]} and {second[0]} {apart}, the 95 % interval of their difference is {low:+.2f} to {high:+.2f} {unit}"
    )


# ---- warmup, target, waterfall


def _kept_warmup(config: Mapping[str, Any], measured: Arms, metric: Metric) -> list[str]:
    """Say what keeping the rule's own warmup would have cost on validation; a grid tries it at every learning rate."""
    parts = []
    for arm in measured:
        search = search_of(config, arm["arm"])
        if search["method"] != "grid" or not {1.0} < set(search["warmup_factors"]):
            continue
        losses = [(_kept_loss(point, metric), point["global_batch_size"]) for point in arm["points"]]
        found = [(loss, size) for loss, size in losses if loss is not None]
        if found:
            worst, size = max(found)
            parts.append(f"{arm_name(arm)} up to {metric.amount(worst)}" + (f" (at batch {size})" if worst > 0 else ""))
    kept = f"Had every arm kept its own rule's warmup, the best validation {metric.name} of the search would have been worse by"
    return [f"{kept}: {', '.join(parts)}."] if parts else []


def _kept_loss(point: Mapping[str, Any], metric: Metric) -> float | None:
    """Return by how much the best candidate with warmup factor 1 was worse than the best of all, at full length."""
    name = f"validation_{metric.name}_mean"
    full = [one for one in point["search"] if one["fidelity"] == 1 and one[name] is not None]
    kept = [one[name] for one in full if one["warmup_factor"] == 1]
    if not kept:
        return None
    pick = max if metric.name == "accuracy" else min
    return metric.worse_by(pick(one[name] for one in full), pick(kept))


def _target(config: Mapping[str, Any], measured: Arms) -> list[str]:
    """Say what the target costs, and where it was not reached."""
    if not config["train"].get("target_metric"):
        return []
    fits = [(arm_name(arm), arm["critical_batch"]) for arm in measured if arm["critical_batch"]]
    costs = [
        f"{name} at least {fit['min_steps']:,.0f} steps and {fit['min_examples']:,.0f} examples, so a critical batch of {fit['critical_batch_size']:,.0f}"
        for name, fit in fits
    ]
    missed = [
        f"{arm_name(arm)} at {', '.join(map(str, sizes))}"
        for arm in measured
        if (sizes := [p["global_batch_size"] for p in arm["points"] if p["target"]["steps_median"] is None])
    ]
    found = [f"To the target need, by the fit of steps against batch: {'; '.join(costs)}."] if costs else []
    return found + ([f"The median run did not reach the target: {'; '.join(missed)}."] if missed else [])


def _waterfall(waterfall: Mapping[str, Any] | None, metric: Metric) -> list[str]:
    if waterfall is None:
        return []
    first, *others = waterfall["steps"]
    gains = ", ".join(f"{arm_name(step)} {round(step['gain'], 2) + 0.0:+.2f}" for step in others)
    start = f"At batch {waterfall['global_batch_size']}, from {arm_name(first)} with {metric.show(first['mean'])}, in {metric.unit}s"
    if any(step["told_apart"] is None for step in others):
        return [f"{start.replace('percents', 'percent')}: {gains}; one seed tells nothing of the noise."]
    noise = [arm_name(step) for step in others if not step["told_apart"]]
    doubt = f"; not told apart from seed noise: {', '.join(noise)}" if noise else "; each is more than its seed spread"
    return [f"{start.replace('percents', 'percent')}: {gains}{doubt}."]


# ---- the search


def _budget_sentence(measured: Arms) -> str:
    """Say whether every arm got the same search, counted from the rows."""
    trials = {arm["arm"]: {point["search_trials"] for point in arm["points"]} for arm in measured}
    lengths = {point["search_full_runs"] for arm in measured for point in arm["points"]}
    counts = set().union(*trials.values())
    if len(counts) == len(lengths) == 1:
        (count,), (length,) = counts, lengths
        full = f" ({length:.3g} runs of full length)" if length != count else ""
        return f"Every arm got the same search: {count} trial{'s' * (count != 1)} at each batch size{full}."
    spans = grouped((_span(found), name) for name, found in trials.items())
    runs = f"from {min(lengths):.3g} to {max(lengths):.3g} runs of full length"
    return f"The arms did not get the same search: trials at each batch size were {spans}; they are worth {runs}."


def _span(counts: set[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _transfer_sentence(measured: Arms) -> str:
    """Say how far each scaling rule was from the rate that validation chose: one that transfers stays put."""
    spans = []
    for arm in measured:
        factors = [point["learning_rate_factor"] for point in arm["points"]]
        low, high = f"{min(factors):.3g}", f"{max(factors):.3g}"
        spans.append((low if low == high else f"{low} to {high}", arm["arm"]))
    return f"Over the batch sizes, the chosen learning rate was this many times the one the scaling rule gives: {grouped(spans)}."


def _edges(measured: Arms) -> list[str]:
    edges = [
        f"{arm_name(arm)} at {', '.join(str(point['global_batch_size']) for point in found)}"
        for arm in measured
        if (found := [point for point in arm["points"] if point["at_edge_of_grid"]])
    ]
    if not edges:
        return []
    return [
        f"The best learning rate lies at the edge of the search for {'; '.join(edges)}: a wider one might do better."
    ]


def _shown(point: Mapping[str, Any], metric: Metric) -> str:
    return metric.show(point[f"test_{metric.name}_mean"])
