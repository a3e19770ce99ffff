"""Claims of papers held against the numbers of a study; each verdict can come out either way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lbopt.sweep.findings.metric import Metric
from lbopt.sweep.findings.names import arm_name
from lbopt.sweep.findings.predictions import (
    diffusion_is_logarithmic,
    noise_scale_predicts_critical_batch,
    noise_scale_predicts_limit,
)
from lbopt.sweep.findings.transfer import constant_warmup_steps, lipschitz_peak_stays
from lbopt.sweep.findings.verdicts import HELD, NOT_HELD, UNKNOWN, Arms, Claim, said


def judge(config: Mapping[str, Any], summary: Mapping[str, Any], metric: Metric) -> list[Claim]:
    """Return the claims that the study has what it needs to judge; of an unfinished study none.

    Args:
      config: the study's config as JSON data.
      summary: what `lbopt.sweep.findings.summary.summarize` returns, but the claims and findings.
      metric: what the study is judged by.
    """
    if not summary["complete"]:
        return []
    arms = summary["arms"]
    constant = [arm for arm in arms if _settings(config, arm)["schedule"].get("decay", "constant") == "constant"]
    further = (
        () if config.get("waterfall") else ((False, ""), (True, "_than_linear_scaling"))
    )  # its arms differ in more
    found = [
        *(_further(config, arms, metric, f"layerwise_legw_goes_further{name}", linear) for linear, name in further),
        constant_warmup_steps(arms, metric),
        lipschitz_peak_stays(arms),
        noise_scale_predicts_limit(arms),
        noise_scale_predicts_critical_batch(arms),
        diffusion_is_logarithmic(constant),  # of a rate that falls the distance grows ever more slowly anyway
    ]
    return [claim for claim in found if claim is not None]


def _further(config: Mapping[str, Any], arms: Arms, metric: Metric, name: str, linear_only: bool) -> Claim | None:
    """Hold the claim of the LEGW and LAMB papers against the limits."""
    ours, others, linear = ([arm for arm in arms if test(_settings(config, arm))] for test in (_ours, _other, _linear))
    if linear_only and linear == others:
        return None  # it would be said twice
    ours, others = ([arm for arm in group if arm["limit"]] for group in (ours, linear if linear_only else others))
    if not ours or not others:
        return None
    than, one = ("the arms with linear scaling", "an arm with linear scaling")
    if not linear_only:
        than, one = ("the other arms", "another arm")
    furthest = max(others, key=lambda arm: (arm["limit"], arm["limit_interval"][1]))
    limit, what = furthest["limit"], "layerwise adaptation with LEGW holds small-batch"
    what = f"{what} {metric.name} to a larger batch than {than} (at most {limit})"
    if furthest["limit_is_largest"]:
        return said(name, UNKNOWN, what, f"{one} reached the largest batch too")
    ahead = [arm for arm in ours if arm["limit"] > limit]
    return said(name, HELD if ahead else NOT_HELD, what, _ranked(ours, limit) + _doubt(ahead, furthest))


def _ranked(ours: Arms, limit: int) -> str:
    groups = {
        "went further": [arm_name(arm) for arm in ours if arm["limit"] > limit],
        "went as far": [arm_name(arm) for arm in ours if arm["limit"] == limit],
        "fell short": [arm_name(arm) for arm in ours if arm["limit"] < limit],
    }
    return ", ".join(f"{' and '.join(names)} {how}" for how, names in groups.items() if names)


def _doubt(ahead: Arms, furthest: Mapping[str, Any]) -> str:
    """Say whether the seeds leave room for another verdict."""
    if not ahead or max(arm["limit_interval"][0] for arm in ahead) > furthest["limit_interval"][1]:
        return ""
    return f"; but the 95 % interval of each reaches down to that of {arm_name(furthest)}"


def _settings(config: Mapping[str, Any], arm: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(one for one in config["arms"] if one["name"] == arm["arm"])


def _ours(arm: Mapping[str, Any]) -> bool:
    return arm["optimizer"]["name"] in ("lamb", "lars") and arm["schedule"]["warmup_rule"] == "legw"


def _other(arm: Mapping[str, Any]) -> bool:
    return not _ours(arm)


def _linear(arm: Mapping[str, Any]) -> bool:
    return _other(arm) and arm["schedule"]["scaling_rule"] == "linear"
