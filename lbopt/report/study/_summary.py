"""summary.json: the numbers of a study as JSON data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from lbopt.report.study._critical_batch import CriticalBatch
from lbopt.report.study._critical_growth import CriticalGrowth
from lbopt.report.study._limit import CannotTell, Limit, LimitEstimate
from lbopt.report.study._metric import Metric
from lbopt.report.study._steps_to_target import Scaling
from lbopt.report.study._study import ArmResults, Candidate, CellResults, Noise, Study
from lbopt.report.study._three_term_law import LawEstimate, NoLaw
from lbopt.report.study._words import Claim


def summary_of(study: Study, claims: Sequence[Claim], findings: Sequence[str]) -> dict[str, Any]:
    """Return the summary as JSON data; null means not measured, not reached or not finite."""
    return {
        "name": study.config.name,
        "complete": study.complete,
        "num_trials": len(study.runs),
        "cells": study.num_cells,
        "cells_complete": study.num_complete,
        "metric": study.metric.name,
        "limit_points": study.config.limit_points,
        "arms": [_arm(arm, study.metric) for arm in study.arms],
        "waterfall": _record(study.waterfall),
        "claims": [dataclasses.asdict(claim) for claim in claims],
        "findings": list(findings),
    }


def _record(value: Any) -> dict[str, Any] | None:
    return None if value is None else dataclasses.asdict(value)


def _arm(arm: ArmResults, metric: Metric) -> dict[str, Any]:
    return {
        "arm": arm.name,
        "limit": arm.limit and _limit(arm.limit),
        "limit_over_examples": arm.limit_over_examples,
        "failure": _record(arm.failure),
        "scaling": arm.scaling and _scaling(arm.scaling),
        "critical_batch": arm.critical_batch and _critical_batch(arm.critical_batch),
        "critical_growth": arm.growth and _growth(arm.growth),
        "three_term_law": arm.law and _law(arm.law),
        "points": [_point(cell, metric) for cell in arm.cells],
    }


def _limit(limit: LimitEstimate) -> dict[str, Any]:
    """Return the limit's outcome and numbers, in examples; null is beyond the largest batch."""
    if isinstance(limit, CannotTell):
        outcome: dict[str, Any] = {"outcome": "cannot_tell", "reason": limit.reason}
    elif isinstance(limit, Limit):
        ends = {"low": limit.low, "high": _finite(limit.high)}
        outcome = {"outcome": "limit", "global_batch_size": limit.global_batch_size, **ends}
    else:
        outcome = {"outcome": "not_reached", "low": _finite(limit.low)}
    return {**outcome, "fit": _record(limit.fit)}


def _scaling(scaling: Scaling) -> dict[str, Any]:
    """Return the steps to the target; null is a median that did not reach it."""
    points, savings = (
        [{name: _finite(value) for name, value in dataclasses.asdict(one).items()} for one in found]
        for found in (scaling.points, scaling.savings)
    )
    until = scaling.perfect_until and _limit(scaling.perfect_until)
    return {"points": points, "savings": savings, "perfect_until": until}


def _critical_batch(critical: CriticalBatch) -> dict[str, Any]:
    """Return the fit and its intervals, pairs whose upper end is null if it is infinite."""
    found = dataclasses.asdict(critical)
    if critical.intervals is not None:
        ends = dataclasses.asdict(critical.intervals)
        found["intervals"] = {name: [_finite(end) for end in pair] for name, pair in ends.items()}
    return found


def _growth(growth: CriticalGrowth) -> dict[str, Any]:
    """Return the milestones, and the exponent with its interval; null ends are infinite."""
    milestones = [
        {
            "share": one.share,
            "value": one.value,
            "examples": one.examples,
            "critical_batch": _critical_batch(one.critical_batch),
        }
        for one in growth.milestones
    ]
    interval = [_finite(end) for end in growth.interval]
    return {"exponent": growth.exponent, "interval": interval, "milestones": milestones}


def _law(law: LawEstimate) -> dict[str, Any]:
    """Return the law's outcome and its numbers, or the reason why there are none."""
    if isinstance(law, NoLaw):
        return {"outcome": "cannot_tell", "reason": law.reason}
    return {"outcome": "law", **dataclasses.asdict(law)}


def _point(cell: CellResults, metric: Metric) -> dict[str, Any]:
    """Return the numbers of a cell; accuracies are in [0, 1], noise scales in examples."""
    chosen = cell.chosen
    first = cell.first
    name = metric.name
    means = {f"{field}_mean": value for field, value in dataclasses.asdict(cell.means).items()}
    spread = {
        f"test_{name}_{field}": value for field, value in dataclasses.asdict(cell.test).items()
    }

    return {
        "global_batch_size": cell.global_batch_size,
        "steps": first.steps,
        "warmup_steps": first.warmup_steps,
        "learning_rate": first.learning_rate,
        "weight_decay": first.weight_decay,
        **_factors(chosen),
        "at_edge_of_grid": cell.edges.learning_rate,
        "warmup_at_edge": cell.edges.warmup,
        "weight_decay_at_edge": cell.edges.weight_decay,
        "seeds": cell.seeds,
        "diverged": cell.diverged,
        "divergence_step": cell.divergence_step,
        "learned": cell.learned,
        **means,
        f"validation_{name}_mean": cell.validation,
        **spread,
        "search_trials": len(cell.search),
        "search_diverged": sum(run.diverged for run in cell.search),
        "search_full_runs": cell.full_runs,
        "search_beyond_edges": cell.num_beyond,
        "distance_mean": cell.distance,
        "diffusion": _record(cell.diffusion),
        "target": _record(cell.target),
        **_noise(cell.noise),
        "lipschitz_peak_step": max(cell.lipschitz, key=lambda pair: pair[1])[0]
        if cell.lipschitz
        else None,
        "lipschitz_first_step": cell.lipschitz[0][0] if cell.lipschitz else None,
        "lipschitz_steps": [step for step, _ in cell.lipschitz],
        "lipschitz_peaks": [dataclasses.asdict(peak) for peak in cell.peaks],
        "phi_mean": cell.phi,
        "search": [_candidate(one, name) for one in cell.candidates],
    }


def _factors(factors: Any) -> dict[str, float]:
    return {f"{name}_factor": value for name, value in factors._asdict().items()}


def _candidate(one: Candidate, name: str) -> dict[str, Any]:
    return {
        **_factors(one.factors),
        "fidelity": one.fidelity,
        "warmup_steps": one.warmup_steps,
        "trials": one.trials,
        "diverged": one.diverged,
        f"validation_{name}_mean": one.score,
    }


def _noise(noise: Noise | None) -> dict[str, Any]:
    if noise is None:
        return dict.fromkeys(("noise_scale", "noise_scale_range", "noise_scale_over_steps"))
    scales = [_finite(scale) for scale in noise.scales]
    return {
        "noise_scale": _finite(noise.scale),
        "noise_scale_range": [_finite(min(noise.scales)), _finite(max(noise.scales))],
        "noise_scale_over_steps": {"step": list(noise.steps), "noise_scale": scales},
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
