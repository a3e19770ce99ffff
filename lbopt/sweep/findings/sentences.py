"""What a study found, in sentences made from its numbers, whether or not anybody hoped for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lbopt.sweep.findings.largest import at_largest
from lbopt.sweep.findings.limits import has_limits, of_seeds, why_no_limit
from lbopt.sweep.findings.metric import Metric
from lbopt.sweep.findings.names import arm_name
from lbopt.sweep.findings.points import Index
from lbopt.sweep.findings.searches import at_edges, chosen_rates, kept_warmup, same_search

Points = Sequence[Mapping[str, Any]]
Arms = Sequence[Mapping[str, Any]]


def sentences(
    config: Mapping[str, Any], summary: Mapping[str, Any], index: Index, metric: Metric
) -> list[str]:
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
        *at_largest(config, measured, index, metric),
        *(claim["sentence"] for claim in summary["claims"]),
        *kept_warmup(config, measured, metric),
        *_target(config, measured),
        *_waterfall(summary["waterfall"], metric),
        same_search(config, measured),
        chosen_rates(measured),
        *at_edges(measured),
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
        return f"{arm_name(arm)} has no limit: {why_no_limit(arm)}."
    start = f"{arm_name(arm)} ({_shown(first, metric)} at batch {first['global_batch_size']})"
    if arm["limit_is_largest"]:
        return f"{start} stays within {near} up to the largest batch, {arm['limit']}: its limit was not reached{_interval(arm)}."
    if arm["failure"] is None:
        return f"{start} stays within {near} at every batch measured so far, up to {arm['limit']}."
    beyond = next(
        p for p in arm["points"] if p["global_batch_size"] == arm["failure"]["global_batch_size"]
    )
    there = f"at {beyond['global_batch_size']} it has {_shown(beyond, metric)} and {_failure(arm['failure'], metric)}"
    return f"{start} reaches its limit at batch {arm['limit']}{_interval(arm)}; {there}."


def _interval(arm: Mapping[str, Any]) -> str:
    low, high = arm["limit_interval"]
    return f" (95 % interval over seeds {low} to {high})" if low < high else ""


def _failure(failed: Mapping[str, Any], metric: Metric) -> str:
    """Say what failed at the first batch past the limit."""
    train, test = failed["train_lost"], failed["test_lost"]
    if failed["kind"] is None:
        return "whether training failed too cannot be told, as training has no finite score at both batch sizes"
    if train is None or test is None:
        return f"fails to {failed['kind']}: training diverged{of_seeds(failed)}"
    if failed["train_share"] is None:
        return f"fails to {failed['kind']}: its mean test loss did not rise, its training loss did{'' if train > 0 else ' not either'}"
    if metric.name == "accuracy":
        return f"fails to {failed['kind']}: test accuracy lost {test:.2f} points, training accuracy {train + 0.0:.2f}"
    return f"fails to {failed['kind']}: the test loss rose by {test:.3f}, the training loss by {train:.3f}"


# ---- target, waterfall


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
        if (
            sizes := [
                p["global_batch_size"] for p in arm["points"] if p["target"]["steps_median"] is None
            ]
        )
    ]
    found = (
        [f"To the target need, by the fit of steps against batch: {'; '.join(costs)}."]
        if costs
        else []
    )
    return found + (
        [f"The median run did not reach the target: {'; '.join(missed)}."] if missed else []
    )


def _waterfall(waterfall: Mapping[str, Any] | None, metric: Metric) -> list[str]:
    if waterfall is None:
        return []
    first, *others = waterfall["steps"]
    gains = ", ".join(f"{arm_name(step)} {round(step['gain'], 2) + 0.0:+.2f}" for step in others)
    unit = "points" if metric.name == "accuracy" else "percent"
    start = f"At batch {waterfall['global_batch_size']}, from {arm_name(first)} with {metric.show(first['mean'])}, in {unit}: {gains}"
    return ["; ".join([start, *_doubts(others)]) + "."]


def _doubts(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say which gains are not told apart from seed noise, each held against its own 95 % interval."""
    noise, unknown = (
        [arm_name(step) for step in steps if step["told_apart"] is kind] for kind in (False, None)
    )
    doubts = {"not told apart from seed noise": noise, "cannot be told from these seeds": unknown}
    found = [f"{what}: {', '.join(names)}" for what, names in doubts.items() if names]
    found[:0] = ["each is told apart from seed noise"] if not found else []
    return (
        found
        if len(unknown) == len(steps)
        else [f"{found[0]} (95 % interval of each gain)", *found[1:]]
    )


def _shown(point: Mapping[str, Any], metric: Metric) -> str:
    return metric.show(point[f"test_{metric.name}_mean"])
