"""Claim: layerwise adaptation holds small-batch quality to a larger batch.

LAMB and LARS with the warmup of LEGW (linear-epoch gradual warmup) are compared with other arms.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

import numpy as np

from lbopt.report.study._arm_limit import (
    range_text,
    resampled,
    small_batch_score,
    small_batches,
    unknown_limits,
)
from lbopt.report.study._limit import CannotTell, Limit, NotReached
from lbopt.report.study._power import POWER
from lbopt.report.study._study import ArmResults, Study, comparable
from lbopt.report.study._words import HELD, NOT_HELD, UNKNOWN, Claim, judged, say

_SURE = 0.95
_ENDS = (0.025, 0.975)
_THAN = {"": "the other arms", "_than_linear_scaling": "the arms with linear scaling"}
_OURS = ("lamb", "lars")
_WHAT = "{} with LEGW holds small-batch {} to a larger batch than {}"
ONLY = "compared are only arms with the same data, model, loss and budget of the search"
_WORSE = """{{ arm | name }} {{ outcome }}, as its {{ text }} over small batches is {{ lost }}
    worse than that of {{ other | name }}"""
_SIDES = """
    {%- for arms, interval in sides %}
    {%- if loop.first %}the {{ "largest " if arms | length > 1 }}limit of
    {%- else %}, that of{% endif %} {{ arms | map("name") | listed }} is {{ interval }}
    {%- endfor %} (95 % intervals)"""
_SHARES = """in the bootstrap the first of the two is larger in {{ "%.1f" % (100 * further) }} % of
    the resamples"""
_BEYOND = """in {{ "%.1f" % (100 * beyond) }} % of them both lie beyond the largest batch, and which
    is larger is not known"""
_MORE = """limits that differ by a factor of 2 are told apart with power {{ power }} by some
    {{ needed }} seeds or more, and there are {{ seeds }}"""
_ENOUGH = """limits that differ by a factor of 2 are told apart with power {{ power }} by these
    seeds"""
_NOBODY = "no arm holds it beyond the small batches, of up to {{ small }}"


def layerwise_legw_goes_further(study: Study) -> list[Claim]:
    """Judge the claims of the LEGW, LAMB and LARS papers by the limits; see `compare_fairly`.

    LAMB and LARS with LEGW's warmup and square-root scaling are each compared with all other arms
    but each other, and again with those other arms that have linear scaling.

    Returns:
      A claim for each of the two optimizers, each group of comparable arms that has both sides, and
      each of the two comparisons.
    """
    groups = comparable(study.arms, same_budget=True)
    found: list[Claim] = []
    for optimizer, (ending, than) in itertools.product(_OURS, _THAN.items()):
        sides = [_sides(group, optimizer, linear_only=bool(ending)) for group in groups]
        for place, (ours, theirs) in enumerate([one for one in sides if all(one)]):
            verdict, evidence = compare_fairly(study, ours, theirs)
            name = f"{optimizer}_legw_goes_further{ending}{f'_{place + 1}' * (place > 0)}"
            what = _WHAT.format(optimizer.upper(), study.metric.text, than)
            found.append(judged(name, verdict, what, *evidence, ONLY * (len(groups) > 1)))
    return found


def _sides(
    group: Sequence[ArmResults], optimizer: str, linear_only: bool
) -> tuple[list[ArmResults], list[ArmResults]]:
    """Return our arms and the other arms; no other arms if the claim would be made twice."""
    layerwise = [arm for arm in group if _is_layerwise(arm)]
    ours = [arm for arm in layerwise if arm.config.optimizer.name == optimizer]
    others = [arm for arm in group if arm not in layerwise]
    if not linear_only:
        return ours, others
    linear = [arm for arm in others if arm.config.schedule.scaling_rule == "linear"]
    return ours, [] if len(linear) == len(others) else linear


def _is_layerwise(arm: ArmResults) -> bool:
    schedule = arm.config.schedule
    rules = schedule.warmup_rule, schedule.scaling_rule
    return arm.config.optimizer.name in _OURS and rules == ("legw", "sqrt")


def compare_fairly(
    study: Study, ours: Sequence[ArmResults], theirs: Sequence[ArmResults]
) -> tuple[str, list[str]]:
    """Judge whether our largest limit is larger than theirs, by `compare_limits`.

    A limit is relative to an arm's own score over small batches, so a large one is worth little
    from a low start. Arms of ours that are worse there than the best of theirs by more than the
    study's `limit_points` are left out. If the claim does not hold then, arms of theirs that are
    worse than the best of ours are left out too. A side without an arm that is as good cannot win,
    but it can lose.

    Returns:
      The verdict, and the clauses it rests on.
    """
    kept, clauses = _as_good(study, ours, theirs)
    verdict, evidence = compare_limits(study, kept or ours, theirs)
    if verdict == HELD and kept:
        return verdict, [*evidence, *clauses]

    rivals, worse = _as_good(study, theirs, ours)
    if worse and rivals:
        verdict, evidence = compare_limits(study, kept or ours, rivals)
    # Arms that start from a worse score cannot win, but they can lose.
    is_unfair = not kept if verdict == HELD else not rivals
    return UNKNOWN if is_unfair else verdict, [*evidence, *clauses, *worse]


def _as_good(
    study: Study, arms: Sequence[ArmResults], others: Sequence[ArmResults]
) -> tuple[list[ArmResults], list[str]]:
    """Return the arms that are as good over small batches as others; clauses on those that are not.

    An arm without a fit is kept: `compare_limits` says what is unknown about it.
    """
    metric = study.metric
    levels = [
        (level, arm.name) for arm in others if (level := small_batch_score(study, arm)) is not None
    ]
    if not levels:
        return list(arms), []
    best, other = min(levels, key=lambda pair: metric.badness(pair[0]))

    lost = [
        0.0 if (level := small_batch_score(study, arm)) is None else metric.worse_by(best, level)
        for arm in arms
    ]
    pairs = list(zip(arms, lost, strict=True))
    kept = [arm for arm, loss in pairs if loss <= study.config.limit_points]
    outcome = "is left out" if kept else "cannot win"
    words = {"outcome": outcome, "text": metric.text, "other": other}
    return kept, [
        say(_WORSE, arm=arm.name, lost=metric.amount(loss), **words)
        for arm, loss in pairs
        if arm not in kept
    ]


def compare_limits(
    study: Study, ours: Sequence[ArmResults], theirs: Sequence[ArmResults]
) -> tuple[str, list[str]]:
    """Judge whether our largest limit is larger than theirs.

    In every bootstrap resample the largest limit of each side counts. It is larger if it is in 95 %
    of the resamples or more, and not if it is in 5 % or less; there, resamples in which both lie
    beyond the study's largest batch count as ours. Otherwise it cannot be told; nor can it if every
    arm's score falls among the small batches already. Arms without a fit do not count.

    Returns:
      The verdict, and the clauses it rests on.
    """
    unknown = unknown_limits(study, [*ours, *theirs])
    sides = [[arm for arm in side if arm.limit and arm.limit.fit] for side in (ours, theirs)]
    if not all(sides):
        return UNKNOWN, unknown
    if all(_falls_at_once(arm) for side in sides for arm in side):
        return UNKNOWN, [say(_NOBODY, small=small_batches(study)[-1])]

    first, second = (np.max([resampled(study, arm) for arm in side], axis=0) for side in sides)
    further = float(np.mean(first > second))
    beyond = float(np.mean(np.isinf(first) & np.isinf(second)))
    verdict = HELD if further >= _SURE else NOT_HELD if further + beyond <= 1 - _SURE else UNKNOWN
    # A limit that was not reached may lie beyond any other.
    if verdict == HELD and any(isinstance(arm.limit, NotReached) for arm in sides[1]):
        verdict = UNKNOWN

    intervals = [
        ([arm.name for arm in side], _interval(study, side, limits))
        for side, limits in zip(sides, (first, second), strict=True)
    ]
    return verdict, [
        say(_SIDES, sides=intervals),
        say(_SHARES, further=further),
        say(_BEYOND, beyond=beyond) if beyond else "",
        _needed_seeds(study, first, second) if verdict == UNKNOWN else "",
        *unknown,
    ]


def _needed_seeds(study: Study, first: np.ndarray, second: np.ndarray) -> str:
    """Return how many seeds tell limits apart that differ by a factor of two, as a clause.

    It follows from the width of the interval of their ratio, whatever that is, for a logarithm that
    is normal. The noise of test examples, which no seed removes, is counted as that of seeds. ""
    where an end is not finite.
    """
    with np.errstate(invalid="ignore"):
        ratios = np.log2(first) - np.log2(second)
    known = np.where(np.isnan(ratios), np.inf, ratios)
    low, high = np.quantile(known, _ENDS, method="inverted_cdf")
    if not np.isfinite([low, high]).all():
        return ""
    seeds = len(study.config.final_seeds)
    quantile = statistics.NormalDist().inv_cdf
    error = (high - low) / (2 * quantile(_ENDS[1]))
    needed = math.ceil(seeds * (error * (quantile(_SURE) + quantile(POWER))) ** 2)
    if needed <= seeds:
        return say(_ENOUGH, power=POWER)
    return say(_MORE, needed=needed, seeds=seeds, power=POWER)


def _interval(study: Study, side: Sequence[ArmResults], limits: np.ndarray) -> str:
    if all(_falls_at_once(arm) for arm in side):
        return f"{small_batches(study)[-1]} at most"
    # The limit of a single arm has an interval with less bias.
    own = side[0].limit
    if len(side) == 1 and isinstance(own, Limit):
        return range_text(own.low, own.high, study.sizes[-1])
    low, high = np.quantile(limits, _ENDS, method="inverted_cdf")
    return range_text(float(low), float(high), study.sizes[-1])


def _falls_at_once(arm: ArmResults) -> bool:
    return isinstance(arm.limit, CannotTell) and arm.limit.reason == "no_plateau"
