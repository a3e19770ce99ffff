"""Claims of the matrix optimizers: they use larger batches than Adam."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lbopt.report.study._claim_limits import compare_limits
from lbopt.report.study._critical_batch import resample_critical_batches
from lbopt.report.study._study import ArmResults, Study, comparable
from lbopt.report.study._words import HELD, NOT_HELD, UNKNOWN, Claim, judged, listed, say

FAMILIES = {
    "muon": ("muon", "muonh", "muown", "normuon", "muloco"),
    "soap": ("soap", "soaph", "shampoo"),
}
"""Optimizers that a claim is about, by the name that the claim has."""
_ADAM = ("adam", "adamw", "optax.adam", "optax.adamw")
_SURE = 0.95
_FURTHER = "{} holds small-batch {} to a larger batch than Adam"
_LARGER = "{} has a larger critical batch than Adam"
_ONLY = "compared are only arms with the same data, model and loss"
_FITS = """the critical batch of {{ pairs | listed }}; in the bootstrap the largest of
    {{ ours | map("name") | listed }} is larger than that of {{ theirs | map("name") | listed }} in
    {{ "%.1f" % (100 * larger) }} % of the resamples"""
_NO_FIT = "{{ arms | map('name') | listed }} {{ 'has' if arms | length == 1 else 'have' }} no fit"


def matrix_optimizers_use_larger_batches(study: Study) -> list[Claim]:
    """Judge whether Muon, and SOAP or Shampoo, use larger batches than Adam.

    In a study with limits these are compared, as for LAMB and LARS (see `compare_limits`). In one
    of steps to a target the fitted critical batches are: in every bootstrap resample of the seeds
    the largest of each side counts. The claim holds if ours is larger in 95 % of the resamples or
    more, and does not if in 5 % or less. A resample without a fit counts against the verdict, each
    time.

    Returns:
      A claim for each family of `FAMILIES` and each group of comparable arms with both sides.

    References:
      Shah et al., arXiv 2505.02222 (Muon); Vyas et al., arXiv 2409.11321 (SOAP).
    """
    found: list[Claim] = []
    groups = comparable(study.measured)
    for family, names in FAMILIES.items():
        place = 0
        for group in groups:
            ours = [arm for arm in group if arm.config.optimizer.name in names]
            theirs = [arm for arm in group if arm.config.optimizer.name in _ADAM]
            if not ours or not theirs:
                continue
            place += 1
            found += _claims(study, family, place, ours, theirs, _ONLY * (len(groups) > 1))
    return found


def _claims(
    study: Study,
    family: str,
    place: int,
    ours: Sequence[ArmResults],
    theirs: Sequence[ArmResults],
    only: str,
) -> list[Claim]:
    who = listed(dict.fromkeys(arm.config.optimizer.name for arm in ours), "or")
    ending = f"_{place}" * (place > 1)
    found = []
    if study.has_limits and not study.config.waterfall:
        verdict, evidence = compare_limits(study, ours, theirs)
        what = _FURTHER.format(who, study.metric.text)
        found.append(judged(f"{family}_goes_further{ending}", verdict, what, *evidence, only))
    if study.has_target:
        verdict, evidence = _compare_critical(ours, theirs)
        name = f"{family}_has_larger_critical_batch{ending}"
        found.append(judged(name, verdict, _LARGER.format(who), *evidence, only))
    return found


def _compare_critical(
    ours: Sequence[ArmResults], theirs: Sequence[ArmResults]
) -> tuple[str, list[str]]:
    """Return the verdict and the clauses it rests on."""
    missing = [arm.name for arm in (*ours, *theirs) if arm.critical_batch is None]
    told = [say(_NO_FIT, arms=missing)] if missing else []
    sides = [[arm for arm in side if arm.critical_batch] for side in (ours, theirs)]
    # An arm without a fit may have any critical batch.
    if missing or not all(sides):
        return UNKNOWN, told

    # What is not known is the worst for the verdict in question: against "held" ours is small.
    against, towards = (
        _larger(sides[0], sides[1], ours_unknown, theirs_unknown)
        for ours_unknown, theirs_unknown in ((0.0, np.inf), (np.inf, 0.0))
    )
    verdict = HELD if against >= _SURE else NOT_HELD if towards <= 1 - _SURE else UNKNOWN
    pairs = [
        f"{arm.name} is {arm.critical_batch.critical_batch_size:,.0f}"
        for side in sides
        for arm in side
        if arm.critical_batch
    ]
    names = [[arm.name for arm in side] for side in sides]
    return verdict, [say(_FITS, pairs=pairs, ours=names[0], theirs=names[1], larger=against)]


def _larger(
    ours: Sequence[ArmResults],
    theirs: Sequence[ArmResults],
    ours_unknown: float,
    theirs_unknown: float,
) -> float:
    """Return the share of resamples in which the largest critical batch of ours is the larger."""
    first = np.max([_resampled(arm, ours_unknown) for arm in ours], axis=0)
    second = np.max([_resampled(arm, theirs_unknown) for arm in theirs], axis=0)
    return float(np.mean(first > second))


def _resampled(arm: ArmResults, unknown: float) -> np.ndarray:
    cells = [cell.steps_of_seeds for cell in arm.cells]
    drawn = resample_critical_batches(cells, seed=(2, arm.place))
    return np.where(drawn.unknown, unknown, drawn.critical_batch_size)
