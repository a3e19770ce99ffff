"""Claim of Seesaw and of other batch schedules: the same score in fewer sequential steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lbopt.report.study._study import ArmResults, Study, comparable
from lbopt.report.study._within import stay_within
from lbopt.report.study._words import Claim, judged, say

_NAME = "growing_batch_keeps_score_{}"
_WHAT = "a batch that grows ({}) stays within {} of the {} of a constant batch, in fewer steps"
_STEPS = """from batch {{ size }} on, {{ arm | name }} takes {{ steps }} steps and
    {{ constant | name }} {{ all }}: {{ "%.0f" % saved }} % fewer"""


def growing_batches_keep_the_score(study: Study) -> list[Claim]:
    """Judge for each arm with a batch schedule whether it scores as the same arm without one.

    See `stay_within`; the number of steps is stated beside.

    Returns:
      A claim for each such arm, if an arm of the study differs from it in the batch schedule alone.

    References:
      Seesaw, arXiv 2510.14717; Merrill et al., Critical Batch Size Revisited, arXiv 2505.23971.
    """
    claims: list[Claim] = []
    for group in comparable(study.measured):
        for arm in group:
            constant = next((one for one in group if _differ_in_growth(arm, one)), None)
            if constant is not None:
                claims.append(_judge(study, arm, constant, [claim.claim for claim in claims]))
    return claims


def _differ_in_growth(arm: ArmResults, other: ArmResults) -> bool:
    """Return whether an arm is another one with a batch schedule, its own or the study's."""
    constant = dataclasses.replace(arm.train, batch_schedule=None)
    is_alike = constant == other.train and arm.search == other.search
    return arm.train.batch_schedule is not None and is_alike


def _judge(study: Study, arm: ArmResults, constant: ArmResults, before: Sequence[str]) -> Claim:
    """Judge one arm; its claim is named after the kind of schedule, and numbered if that is taken.

    Args:
      study: The study.
      arm: The arm.
      constant: The arm without a batch schedule.
      before: Names of the claims so far.
    """
    growing = arm.train.batch_schedule
    assert growing is not None
    verdict, evidence = stay_within(study, constant, [arm], "the constant batch")
    metric = study.metric
    what = _WHAT.format(growing.kind, metric.amount(study.config.limit_points), metric.text)
    pairs = [
        (cell, other) for cell in arm.cells if (other := constant.cell(cell.global_batch_size))
    ]
    steps = []
    if pairs:
        cell, other = pairs[0]
        took = cell.first.steps
        whole = other.first.steps
        told = {"size": cell.global_batch_size, "steps": f"{took:,.0f}", "all": f"{whole:,.0f}"}
        saved = 100 * (1 - took / whole)
        steps.append(say(_STEPS, arm=arm.name, constant=constant.name, saved=saved, **told))
    name = _NAME.format(growing.kind)
    taken = sum(other.startswith(name) for other in before)
    return judged(f"{name}_{taken + 1}" if taken else name, verdict, what, *steps, *evidence)
