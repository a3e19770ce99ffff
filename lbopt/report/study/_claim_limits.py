"""Claim: layerwise adaptation under LEGW holds small-batch quality to a larger batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lbopt.report.study import _limits
from lbopt.report.study._model import Arm, Study, comparable
from lbopt.report.study._words import HELD, NOT_HELD, UNKNOWN, Claim, judged, say

_SURE = 0.95
_THAN = {"": "the other arms", "_than_linear_scaling": "the arms with linear scaling"}
_WHAT = "layerwise adaptation with LEGW holds small-batch {} to a larger batch than {}"
_ONLY = "compared are only arms with the same data, model and loss"
_SIDES = """
    {%- for arms, limit, low, high in sides %}
    {%- if arms | length > 1 %}the best of {% endif %}{{ arms | map("name") | listed }} holds it up
    to {{ "the largest batch" if limit == largest else "batch" }} {{ limit }}
    (95 % interval {{ low }} to {{ high }}){{ ", " if not loop.last }}
    {%- endfor %}"""
_SHARES = """in a bootstrap over seeds, the limit of the former is larger in
    {{ "%.1f" % (100 * further) }} % of the resamples and equal in {{ "%.1f" % (100 * equal) }} %"""
_BEYOND = """in {{ "%.1f" % (100 * beyond) }} % of them both reach the largest batch, and how far
    they go is not known"""
_NOBODY = """no arm got past the smallest batch; every limit lies between {{ sizes[0] }} and
    {{ sizes[1] }}"""


def layerwise_legw_goes_further(study: Study) -> list[Claim]:
    """Hold the claim of the LEGW and LAMB papers against the limits.

    LAMB and LARS with LEGW's warmup and square-root scaling are held against all other arms, and
    once more against those of them with linear scaling. In every bootstrap resample of the seeds
    the largest limit of each side counts. The claim holds if ours is larger in 95 % or more. It
    does not if that is so in 5 % or less, where resamples in which both reach the study's largest
    batch count as ours, as nothing tells what lies beyond. Otherwise it cannot be told; nor can it
    where no arm got past the smallest batch.

    Returns:
      A claim for each group of comparable arms that has both sides, and for each of the two
      comparisons.
    """
    groups = comparable(study.arms)
    found: list[Claim] = []
    for ending, than in _THAN.items():
        sides = [_sides(group, linear_only=bool(ending)) for group in groups]
        for place, (ours, theirs) in enumerate([one for one in sides if all(one)]):
            verdict, evidence = _judge(study, ours, theirs)
            name = f"layerwise_legw_goes_further{ending}{f'_{place + 1}' * (place > 0)}"
            what = _WHAT.format(study.metric.name, than)
            found.append(judged(name, verdict, what, *evidence, _ONLY * (len(groups) > 1)))
    return found


def _sides(group: Sequence[Arm], linear_only: bool) -> tuple[list[Arm], list[Arm]]:
    """Return our arms and the others; none of these if the claim would be made twice."""
    ours = [arm for arm in group if _is_ours(arm)]
    others = [arm for arm in group if not _is_ours(arm)]
    if not linear_only:
        return ours, others
    linear = [arm for arm in others if arm.config.schedule.scaling_rule == "linear"]
    return ours, [] if len(linear) == len(others) else linear


def _is_ours(arm: Arm) -> bool:
    schedule = arm.config.schedule
    rules = schedule.warmup_rule, schedule.scaling_rule
    return arm.config.optimizer.name in ("lamb", "lars") and rules == ("legw", "sqrt")


def _judge(study: Study, ours: Sequence[Arm], theirs: Sequence[Arm]) -> tuple[str, list[str]]:
    """Return the verdict and the clauses it rests on."""
    sizes = study.sizes
    without = _limits.without_limit([*ours, *theirs])
    limits = [[arm.limit for arm in side if arm.limit] for side in (ours, theirs)]
    if not all(limits):
        return UNKNOWN, without
    if len(sizes) > 1 and all(one.batch_size == sizes[0] for side in limits for one in side):
        return UNKNOWN, [say(_NOBODY, sizes=sizes), *without]

    first, second = (np.max([one.draws for one in side], axis=0) for side in limits)
    further, equal = float(np.mean(first > second)), float(np.mean(first == second))
    beyond = float(np.mean((first == sizes[-1]) & (second == sizes[-1])))
    verdict = HELD if further >= _SURE else NOT_HELD if further + beyond <= 1 - _SURE else UNKNOWN
    if verdict == HELD and any(one.is_largest for one in limits[1]):
        verdict = UNKNOWN

    said = [
        (
            [arm.name for arm in side if arm.limit],
            max(one.batch_size for one in found),
            *_limits.quantiles(draws),
        )
        for side, found, draws in zip((ours, theirs), limits, (first, second), strict=True)
    ]
    return verdict, [
        say(_SIDES, sides=said, largest=sizes[-1]),
        say(_SHARES, further=further, equal=equal),
        say(_BEYOND, beyond=beyond) if beyond else "",
        *without,
    ]
