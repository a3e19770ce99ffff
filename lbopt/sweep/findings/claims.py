"""Claims of papers held against the numbers of a study; each verdict can come out either way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lbopt.sweep.findings.curvature import lipschitz_peak_stays
from lbopt.sweep.findings.diffusion import diffusion_is_logarithmic
from lbopt.sweep.findings.further import Draws, layerwise_legw_goes_further
from lbopt.sweep.findings.groups import settings
from lbopt.sweep.findings.limits import has_limits
from lbopt.sweep.findings.metric import Metric
from lbopt.sweep.findings.predictions import (
    noise_scale_predicts_critical_batch,
    noise_scale_predicts_limit,
)
from lbopt.sweep.findings.transfer import constant_warmup_steps
from lbopt.sweep.findings.verdicts import Arms, Claim


def judge(
    config: Mapping[str, Any], summary: Mapping[str, Any], metric: Metric, draws: Draws
) -> list[Claim]:
    """Return the claims that the study has what it needs to judge; of an unfinished study none.

    Args:
      config: the study's config as JSON data.
      summary: what `lbopt.sweep.findings.summary.summarize` returns, but the claims and findings.
      metric: what the study is judged by.
      draws: name of an arm -> its limit over resampled seeds, [draws] int; without arms that have none.
    """
    if not summary["complete"]:
        return []
    arms = summary["arms"]
    schedules = [(arm, settings(config, arm["arm"])["schedule"]) for arm in arms]
    constant = [
        arm for arm, schedule in schedules if schedule.get("decay", "constant") == "constant"
    ]
    legw = [arm for arm, schedule in schedules if schedule["warmup_rule"] == "legw"]
    found = [
        *_of_limits(config, arms, metric, draws),
        constant_warmup_steps(arms, metric),
        lipschitz_peak_stays(legw),
        noise_scale_predicts_limit(arms, config["global_batch_sizes"])
        if has_limits(config)
        else None,
        noise_scale_predicts_critical_batch(arms),
        diffusion_is_logarithmic(constant, metric, len(arms) - len(constant)),
    ]
    return [claim for claim in found if claim is not None]


def _of_limits(config: Mapping[str, Any], arms: Arms, metric: Metric, draws: Draws) -> list[Claim]:
    """Compare the limits, but not of a waterfall, whose arms differ in more."""
    if config.get("waterfall") or not has_limits(config):
        return []
    return layerwise_legw_goes_further(config, arms, metric, draws)
