"""Claim of a rule that scales learning rate and warmup: a larger batch needs no new search."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

from lbopt.config import Arm, SearchConfig
from lbopt.report.study._metric import Metric
from lbopt.report.study._study import ArmResults, CellResults, Study, comparable
from lbopt.report.study._within import stay_within
from lbopt.report.study._words import Claim, count, judged, say

_NAME = "rule_needs_no_search_{}"
_WHAT = "{}, scaled by {} without a search, stays within {} of a search at each batch size"
_COST = """the mean {{ text }} of {{ arm | name }} is, beside that of {{ tuned | name }},
    {{ costs | listed }}"""
_LEGW = "legw"


def rules_need_no_search(study: Study) -> list[Claim]:
    """Judge for each arm that runs as its rule says whether a search would have gained anything.

    Such an arm has a search of its own with a single candidate, the rule itself. It is compared
    with an arm that searches and differs from it in the rules of the learning rate and the warmup
    alone; of several with the one that has the same warmup. See `stay_within`; the mean cost at
    each batch size is stated beside.

    Returns:
      A claim for each such arm, if there is an arm to compare it with.
    """
    claims: list[Claim] = []
    for group in comparable(study.measured):
        for arm in group:
            twins = [one for one in group if _is_searched_twin(arm, one)]
            if twins:
                rule = arm.config.schedule.warmup_rule
                tuned = max(twins, key=lambda one: one.config.schedule.warmup_rule == rule)
                claims.append(_judge(study, arm, tuned, [claim.claim for claim in claims]))
    return claims


def _is_searched_twin(arm: ArmResults, other: ArmResults) -> bool:
    """Return whether an arm runs as its rule says, and the other searches and is alike else."""
    if arm.grows or not _keeps_the_rule(arm.search) or _keeps_the_rule(other.search):
        return False
    mine, theirs = (
        dataclasses.replace(
            one.train,
            schedule=dataclasses.replace(
                one.train.schedule, scaling_rule="sqrt", warmup_rule="epochs"
            ),
        )
        for one in (arm, other)
    )
    return mine == theirs


def _keeps_the_rule(search: SearchConfig) -> bool:
    names = ("learning_rate", "warmup", "weight_decay")
    return search.method == "grid" and all(
        getattr(search, f"{name}_factors") == (1.0,) for name in names
    )


def _judge(study: Study, arm: ArmResults, tuned: ArmResults, before: Sequence[str]) -> Claim:
    """Judge one arm; its claim is named after its rule, and numbered if that is taken."""
    verdict, evidence = stay_within(study, tuned, [arm], "the searched arm")
    metric = study.metric
    rule = rule_of(arm.config)
    what = _WHAT.format(
        arm.config.optimizer.name, _shown(rule), metric.amount(study.config.limit_points)
    )

    costs = []
    for cell in arm.cells:
        best = tuned.cell(cell.global_batch_size)
        if best is not None:
            costs.append(f"{_cost(metric, best, cell)} at batch {cell.global_batch_size}")
    told = [say(_COST, arm=arm.name, costs=costs, text=metric.text, tuned=tuned.name)]

    name = _NAME.format(re.sub(r"\W+", "_", rule))
    taken = sum(re.fullmatch(rf"{name}(_\d+)?", other) is not None for other in before)
    return judged(
        f"{name}_{taken + 1}" if taken else name, verdict, what, *(told if costs else []), *evidence
    )


def _cost(metric: Metric, best: CellResults, kept: CellResults) -> str:
    """Return how the mean of a cell differs from that of another one, as text."""
    broken = sum(cell.diverged for cell in (best, kept))
    means = metric.centre(best.scores), metric.centre(kept.scores)
    if broken or not all(map(math.isfinite, means)):
        return f"not to be compared ({count(broken, 'seed')} diverged)"
    lost = metric.worse_by(*means)
    if lost == 0:
        return "the same"
    return f"{metric.amount(abs(lost))} {'worse' if lost > 0 else 'better'}"


def rule_of(arm: Arm) -> str:
    """Return the rule of an arm as one word: its scaling rule, or "legw" for LEGW's two rules.

    >>> from lbopt.config import Arm, ScheduleConfig
    >>> rule_of(Arm("a", schedule=ScheduleConfig(scaling_rule="sqrt", warmup_rule="legw")))
    'legw'
    >>> rule_of(Arm("a", schedule=ScheduleConfig(scaling_rule="linear", warmup_rule="epochs")))
    'linear'
    """
    schedule = arm.schedule
    rules = (schedule.scaling_rule, schedule.warmup_rule)
    return _LEGW if rules == ("sqrt", _LEGW) else schedule.scaling_rule


def _shown(rule: str) -> str:
    return "LEGW" if rule == _LEGW else f"the rule {rule}"
