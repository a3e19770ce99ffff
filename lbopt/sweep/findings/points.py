"""What was measured in one cell of a study: its search, its final runs, and what was probed in them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lbopt.sweep.findings.metric import Metric, Row, mean, spread
from lbopt.sweep.findings.probes import probed
from lbopt.sweep.trials import FINAL

FACTORS = ("learning_rate", "warmup", "weight_decay")
_NEAR_THE_END = 0.1
_LEARNED = 0.05


class CellRows(NamedTuple):
    """The finished trials of a cell.

    Attributes:
      search: those that choose.
      final: those that are tested.
    """

    search: list[Row]
    final: list[Row]


Index = Mapping[tuple[str, int], CellRows]


def index_rows(rows: Iterable[Row]) -> dict[tuple[str, int], CellRows]:
    """Sort rows of `results.jsonl` into their cells, (arm, batch size), in one pass."""
    cells: dict[tuple[str, int], CellRows] = {}
    for row in rows:
        cell = cells.setdefault((row["arm"], row["global_batch_size"]), CellRows([], []))
        (cell.final if row["phase"] == FINAL else cell.search).append(row)
    return cells


def measure_point(
    config: Mapping[str, Any], size: int, cell: CellRows, metric: Metric
) -> dict[str, Any]:
    """Return the numbers of a cell that has final trials, as JSON data.

    Args:
      config: the study's config as JSON data.
      size: global batch size.
      cell: its rows.
      metric: what the study is judged by.

    Returns:
      `{"global_batch_size", "steps", "warmup_steps", "learning_rate", "weight_decay", "learning_rate_factor", "warmup_factor",
      "weight_decay_factor", "at_edge_of_grid" (the learning rate), "warmup_at_edge", "weight_decay_at_edge" (see `at_edge`),
      "seeds", "diverged" (of the seeds), "divergence_step" (the earliest), "learned" (see `learned`),
      "SPLIT_loss_mean" and "SPLIT_accuracy_mean" for the three splits, "validation_METRIC_mean", "test_METRIC_mean" with "_std",
      "_min" and "_max", "search_trials", "search_diverged", "search_full_runs" (their lengths, in runs of the whole length),
      "distance_mean", "diffusion" ({"log_r2", "power_r2", "exponent", "seeds"}), "target" ({"reached" (of the seeds),
      "steps_median", "examples_median", "steps_run"}), "search" (see `candidates`)}` and what `lbopt.sweep.findings.probes.probed`
      returns.
      Accuracies are in [0, 1]; means are over the final seeds. Null is what was not measured, not reached or not finite; so are
      the mean losses and accuracies where a seed diverged, but in "validation_METRIC_mean" and "test_METRIC_*" it counts as
      the worst there is (accuracy 0).
    """
    final = cell.final
    first = final[0]
    factors = {f"{name}_factor": first[f"{name}_factor"] for name in FACTORS}
    shared = {
        name: first[name] for name in ("steps", "warmup_steps", "learning_rate", "weight_decay")
    }
    tried = candidates(cell.search, metric)
    return {
        "global_batch_size": size,
        **shared,
        **factors,
        **_edges(search_of(config, first["arm"]), first, cut_warmups(tried)),
        "seeds": len(final),
        **_divergence(final),
        "learned": learned(final),
        **_accuracies(final, metric),
        **_search_totals(cell.search),
        "distance_mean": mean(row.get("distance") for row in final),
        "diffusion": _diffusion(final),
        "target": _target(final) if config["train"].get("target_metric") else None,
        **probed(final),
        "search": tried,
    }


def search_of(config: Mapping[str, Any], arm: str) -> Mapping[str, Any]:
    """Return how an arm's candidates were searched: its own way, or the study's.

    Args:
      config: the study's config as JSON data.
      arm: its name.

    Returns:
      A `SearchConfig` as JSON data.
    """
    (own,) = (one.get("search") for one in config["arms"] if one["name"] == arm)
    return own or config["search"]


def learned(final: Sequence[Row]) -> bool | None:
    """Return whether the training loss of the last epoch is below that of the first step, and of equal odds for all outputs, by a twentieth.

    Batches differ by a few hundredths. A net whose gradients are all rounded to zero stays where it began, or is left by its weight decay
    with equal odds, whose loss is log(outputs). Losses are means over the seeds.

    Args:
      final: the final rows of a cell.

    Returns:
      None where a seed has no such losses, as those that diverged.
    """
    curves = [(row.get("curve") or {}).get("train_loss") for row in final]
    first = mean(curve[0] if curve else None for curve in curves)
    last = mean(row["last_epoch_loss"] for row in final)
    if first is None or last is None:
        return None
    outputs = final[0].get("outputs") or 0  # lines of an earlier version do not say
    return last < (1 - _LEARNED) * (min(first, math.log(outputs)) if outputs > 1 else first)


def _edges(search: Mapping[str, Any], chosen: Row, cut: Collection[float]) -> dict[str, bool]:
    """Return which of the chosen factors lie at an edge; a factor of nothing is nowhere, and nothing lies beyond a warmup that is cut."""
    warms = chosen["warmup_steps"] > 0 and chosen["warmup_factor"] not in cut
    return {
        "at_edge_of_grid": at_edge(search, chosen["learning_rate_factor"]),
        "warmup_at_edge": warms and at_edge(search, chosen["warmup_factor"], "warmup"),
        "weight_decay_at_edge": (
            chosen["weight_decay"] > 0
            and at_edge(search, chosen["weight_decay_factor"], "weight_decay")
        ),
    }


def cut_warmups(tried: Iterable[Mapping[str, Any]]) -> set[float]:
    """Return the factors whose warmups would outlast the run, and so end one step before it.

    Args:
      tried: a cell's candidates, see `candidates`.

    >>> tried = [{"warmup_factor": factor, "warmup_steps": steps, "fidelity": 1.0} for factor, steps in [(1, 8), (4, 32), (16, 39)]]
    >>> cut_warmups(tried)
    {16}
    """
    full = [one for one in tried if one["fidelity"] == 1 and one["warmup_factor"] > 0]
    own = max((one["warmup_steps"] / one["warmup_factor"] for one in full), default=0.0)
    return {
        one["warmup_factor"]
        for one in full
        if one["warmup_steps"] < 0.99 * own * one["warmup_factor"]
    }


def at_edge(search: Mapping[str, Any], factor: float, name: str = "learning_rate") -> bool:
    """Return whether a factor lies where the search ends, so that a wider one might choose another.

    Of a grid these are its ends, but 0 is none, as nothing lies beyond; of a range everything within a tenth of its
    logarithmic length from an end.

    Args:
      search: a `SearchConfig` as JSON data.
      factor: one that was tried.
      name: of what, "learning_rate", "warmup" or "weight_decay".

    Returns:
      Whether it does; False where a single factor was tried.

    >>> at_edge({"method": "halton", "learning_rate_range": [0.1, 10.0]}, 7.0)
    True
    """
    if search["method"] == "grid":
        grid = search[f"{name}_factors"]
        return factor > 0 and len(grid) > 1 and factor in (grid[0], grid[-1])
    if not min(factor, *search[f"{name}_range"]) > 0:
        return False
    low, high = (math.log(end) for end in search[f"{name}_range"])
    return (
        low < high
        and not _NEAR_THE_END < (math.log(factor) - low) / (high - low) < 1 - _NEAR_THE_END
    )


def candidates(search: Iterable[Row], metric: Metric) -> list[dict[str, Any]]:
    """Return what was tried: one entry per candidate and fidelity, with its mean over the search seeds.

    Args:
      search: rows of a cell's search trials.
      metric: what the study is judged by.

    Returns:
      Entries `{"learning_rate_factor", "warmup_factor", "weight_decay_factor", "warmup_steps", "fidelity", "trials",
      "diverged", "validation_accuracy_mean"}`, ascending in the factors and then the fidelity. The last field is in [0, 1], a
      trial that diverged counting 0; for language models it is `validation_perplexity_mean`, null if one diverged.
    """
    groups: dict[tuple[float, ...], list[Row]] = {}
    for row in search:
        groups.setdefault(
            (*(row[f"{name}_factor"] for name in FACTORS), row["fidelity"]), []
        ).append(row)
    return [
        {
            **dict(zip((*(f"{name}_factor" for name in FACTORS), "fidelity"), key, strict=True)),
            "warmup_steps": group[0]["warmup_steps"],
            "trials": len(group),
            "diverged": sum(row["diverged"] for row in group),
            f"validation_{metric.name}_mean": spread(metric, metric.scores(group, "validation"))[
                "mean"
            ],
        }
        for key, group in sorted(groups.items())
    ]


def is_chosen(point: Mapping[str, Any], candidate: Mapping[str, Any]) -> bool:
    """Return whether a candidate is the one that the final trials ran.

    Args:
      point: from `measure_point`.
      candidate: from `candidates`.
    """
    return all(point[f"{name}_factor"] == candidate[f"{name}_factor"] for name in FACTORS)


def _divergence(final: Sequence[Row]) -> dict[str, Any]:
    steps = [row["divergence_step"] for row in final if row.get("divergence_step") is not None]
    return {
        "diverged": sum(row["diverged"] for row in final),
        "divergence_step": min(steps, default=None),
    }


def _accuracies(final: Sequence[Row], metric: Metric) -> dict[str, Any]:
    """Return means of losses and accuracies over the seeds, and the spread of what the study is judged by.

    The accuracy of a model whose outputs are not numbers is that of always naming the first class: it does not count.
    """
    means = {
        f"{split}_{name}_mean": mean(
            None if row["diverged"] else row.get(f"{split}_{name}") for row in final
        )
        for split in ("train", "validation", "test")
        for name in ("loss", "accuracy")
    }
    judged = spread(metric, metric.scores(final, "test"))
    means[f"validation_{metric.name}_mean"] = spread(metric, metric.scores(final, "validation"))[
        "mean"
    ]
    return means | {f"test_{metric.name}_{name}": value for name, value in judged.items()}


def _search_totals(search: Sequence[Row]) -> dict[str, Any]:
    return {
        "search_trials": len(search),
        "search_diverged": sum(row["diverged"] for row in search),
        "search_full_runs": round(math.fsum(row["fidelity"] for row in search), 9),
    }


def _target(final: Sequence[Row]) -> dict[str, Any]:
    """Return the median steps and examples to the target; a seed that never reached it counts as the slowest."""
    steps, examples = (
        statistics.median(math.inf if row[name] is None else row[name] for row in final)
        for name in ("steps_to_target", "examples_to_target")
    )
    return {
        "reached": sum(row["steps_to_target"] is not None for row in final),
        "steps_median": steps if math.isfinite(steps) else None,
        "examples_median": examples if math.isfinite(examples) else None,
        "steps_run": max(row["steps_run"] for row in final),
    }


def _diffusion(final: Sequence[Row]) -> dict[str, Any] | None:
    """Return the means over the seeds of the fits of the distance from the start."""
    fits = [row["diffusion"] for row in final if row.get("diffusion")]
    means = {
        "log_r2": mean(fit["log"]["r2"] for fit in fits),
        "power_r2": mean(fit["power"]["r2"] for fit in fits),
        "exponent": mean(fit["power"]["exponent"] for fit in fits),
    }
    return None if None in means.values() else {**means, "seeds": len(fits)}
