"""Claims of the matrix optimizers: they use larger batches than Adam."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lbopt.report.study._claim_limits import ONLY, compare_fairly
from lbopt.report.study._critical_batch import resample_critical_batches
from lbopt.report.study._limit import FEWEST_SEEDS
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
_FITS = """the critical batch of {{ pairs | listed }}; in the bootstrap the largest of
    {{ ours | map("name") | listed }} is larger than that of {{ theirs | map("name") | listed }} in
    {{ "%.1f" % (100 * larger) }} % of the resamples"""
_NO_FIT = "{{ arms | map('name') | listed }} {{ 'has' if arms | length == 1 else 'have' }} no fit"
_MISSED = """the median run of {{ arm.name | name }} missed the target at
    {{ arm.missed_sizes | listed }}, which the fit leaves out"""
_FEW = "a batch size has fewer than {{ fewest }} seeds"


def matrix_optimizers_use_larger_batches(study: Study) -> list[Claim]:
    """Judge whether Muon, and SOAP or Shampoo, use larger batches than Adam.

    In a study with limits these are compared, as for LAMB and LARS (see `compare_fairly`). In a
    study of steps to a target the fitted critical batches are compared: in every bootstrap resample
    of the seeds the largest of each side counts. The claim holds if ours is larger in 95 % of the
    resamples or more, and does not if it is larger or equal in 5 % or less. A resample without a
    fit counts against the verdict, each time. It cannot be told with fewer than three seeds, or if
    the arms of the side that would win missed the target at a batch size.

    Returns:
      A claim for each family of `FAMILIES` and each group of comparable arms with both sides.

    References:
      Shah et al., arXiv 2505.02222 (Muon); Vyas et al., arXiv 2409.11321 (SOAP).
    """
    found: list[Claim] = []
    groups = comparable(study.measured, same_budget=True)
    for family, names in FAMILIES.items():
        place = 0
        for group in groups:
            ours = [arm for arm in group if arm.config.optimizer.name in names]
            theirs = [arm for arm in group if arm.config.optimizer.name in _ADAM]
            if not ours or not theirs:
                continue
            place += 1
            found += _claims(study, family, place, ours, theirs, ONLY * (len(groups) > 1))
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
        verdict, evidence = compare_fairly(study, ours, theirs)
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
    if min(cell.seeds for side in sides for arm in side for cell in arm.cells) < FEWEST_SEEDS:
        return UNKNOWN, [say(_FEW, fewest=FEWEST_SEEDS)]

    # What is not known is the worst for the verdict in question: against "held" ours is small.
    first, second = sides
    larger = float(np.mean(_largest(first, 0.0) > _largest(second, np.inf)))
    at_least = float(np.mean(_largest(first, np.inf) >= _largest(second, 0.0)))
    verdict = HELD if larger >= _SURE else NOT_HELD if at_least <= 1 - _SURE else UNKNOWN
    # The fit leaves out batch sizes at which the target was missed, where an arm scales worse.
    winners = first if verdict == HELD else second if verdict == NOT_HELD else []
    missed = [arm for arm in winners if arm.missed_sizes]
    verdict = UNKNOWN if missed else verdict

    pairs = [
        f"{arm.name} is {arm.critical_batch.critical_batch_size:,.0f}"
        for side in sides
        for arm in side
        if arm.critical_batch
    ]
    names = [[arm.name for arm in side] for side in sides]
    share = at_least if verdict == NOT_HELD else larger
    return verdict, [
        say(_FITS, pairs=pairs, ours=names[0], theirs=names[1], larger=share),
        *(say(_MISSED, arm=arm) for arm in missed),
    ]


def _largest(arms: Sequence[ArmResults], unknown: float) -> np.ndarray:
    """Return the largest critical batch of each resample, `unknown` for an arm without a fit."""
    return np.max([_resampled(arm, unknown) for arm in arms], axis=0)


def _resampled(arm: ArmResults, unknown: float) -> np.ndarray:
    cells = [cell.steps_of_seeds for cell in arm.cells]
    drawn = resample_critical_batches(cells, seed=(2, arm.place))
    return np.where(drawn.unknown, unknown, drawn.critical_batch_size)
