"""Claim: the gradient noise scale predicts how far the batch size can grow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from lbopt.report._agreement import WITHIN, disagrees
from lbopt.report.study._arm_limit import small_batches, unknown_limits
from lbopt.report.study._limit import CannotTell, Limit
from lbopt.report.study._statistics import RankTest, rank_test
from lbopt.report.study._study import ArmResults, Noise, Study
from lbopt.report.study._words import HELD, NOT_HELD, UNKNOWN, Claim, judged, quoted, say

_AGREES = 0.5
_CHANCE = 0.1
_FEWEST = 3
_WHAT = (
    "the gradient noise scale (tr(Sigma) / |G|^2 at the smallest batch, the median over the probes "
    "of a run) predicts the {}"
)
_FEW = """it takes {{ fewest }} arms to judge by, and there {{ "is" if judged == 1 else "are" }}
    {{ judged or "none" }}"""
_FACTOR = """it is within a factor of {{ factor | number }} of the {{ thing }} for {{ within }} of
    {{ judged }} arms"""
_RANKS = """the rank correlation is {{ "%.2f" % test.correlation }} (one-sided p
    {{ "%.2f" % test.p }} over all orders)"""
_BOUNDED = """{{ arms | length | count("arm") }} left out, as each may be a hit or a miss:
    {{ arms | join(", ") }}"""
_INFINITE = """{{ arms | length | count("arm") }} left out, as the noise scale cannot be told from
    infinity: {{ arms | listed }}"""


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """The noise scale of an arm beside the measured batch size that it predicts.

    Attributes:
      arm: Name, as in running text.
      noise_scale: Noise scale at its smallest batch, in examples; may be infinite.
      least: Measured batch size, or its lower bound.
      most: Measured batch size, or its upper bound; infinite if there is none.
    """

    arm: str
    noise_scale: float
    least: float
    most: float

    @property
    def exact(self) -> bool:
        """Whether the batch size is known, not only its bounds."""
        return self.least == self.most

    @property
    def missed(self) -> bool:
        """Whether the prediction is off by more than `WITHIN` for every size between the bounds."""
        return disagrees(self.noise_scale, self.least, self.most)

    @property
    def judged(self) -> bool:
        """Whether the prediction is known to be a hit or a miss."""
        return math.isfinite(self.noise_scale) and (self.exact or self.missed)

    @property
    def bounds(self) -> str:
        """The bounds of the batch size as a clause."""
        if math.isinf(self.most):
            return f"{self.arm} held up to the largest batch, {self.least:.0f}"
        return f"the limit of {self.arm} lies between {self.least:.0f} and {self.most:.0f}"


def noise_scale_predicts_limit(study: Study) -> Claim | None:
    """Judge whether the gradient noise scale predicts the limit; see `judge`.

    A limit that was not reached is the largest batch or more. The limit of an arm whose score falls
    among the small batches lies between the smallest and the largest of them. An arm with such
    bounds is a miss if all limits between them are off by more than a factor of 4; otherwise it is
    left out.

    Returns:
      The claim; None if no arm has a noise scale, or the study has no limits.
    """
    if not study.has_limits:
        return None
    noisy = [(arm, arm.cells[0].noise) for arm in study.measured if arm.cells[0].noise]
    bounded = [(arm, noise, _bounds(study, arm)) for arm, noise in noisy]
    found = [
        Prediction(quoted(arm.name), noise.scale, *bounds)
        for arm, noise, bounds in bounded
        if bounds and noise
    ]
    unknown = unknown_limits(study, [arm for arm, _, bounds in bounded if not bounds])
    scales = [noise for _, noise in noisy if noise]
    return judge("noise_scale_predicts_limit", "limit", found, scales, unknown)


def _bounds(study: Study, arm: ArmResults) -> tuple[float, float] | None:
    """Return the batch sizes between which the limit lies; None if they are not known."""
    if isinstance(arm.limit, Limit):
        return arm.limit.global_batch_size, arm.limit.global_batch_size
    if isinstance(arm.limit, CannotTell):
        small = small_batches(study)
        return (small[0], small[-1]) if arm.limit.reason == "no_plateau" else None
    return study.sizes[-1], math.inf


def noise_scale_predicts_critical_batch(study: Study) -> Claim | None:
    """Judge whether the noise scale predicts the critical batch of the target; see `judge`.

    Returns:
      The claim; None if no arm has both a critical batch and a noise scale.
    """
    noisy = [
        (arm.name, arm.critical_batch.critical_batch_size, arm.cells[0].noise)
        for arm in study.measured
        if arm.critical_batch and arm.cells[0].noise
    ]
    found = [
        Prediction(quoted(name), noise.scale, batch, batch) for name, batch, noise in noisy if noise
    ]
    scales = [noise for _, _, noise in noisy if noise]
    return judge("noise_scale_predicts_critical_batch", "critical batch", found, scales, [])


def judge(
    name: str,
    thing: str,
    found: Sequence[Prediction],
    scales: Sequence[Noise],
    without: Sequence[str],
) -> Claim | None:
    """Judge predictions of batch sizes by the noise scale at the smallest batch.

    The claim does not hold if the prediction is off by more than a factor of 4 for most arms. It
    holds if most predictions are within that factor and the ranks agree: their correlation is above
    0.5, and at most one in ten random orders reaches it. With three arms, or many ties, no order is
    that rare, and the factor alone decides. With fewer than three arms the claim cannot be told.

    Args:
      name: Name of the claim.
      thing: The predicted batch size, in words.
      found: The prediction of every arm with both a noise scale and a measured batch size.
      scales: The known noise scales of the arms.
      without: Clauses that name arms without a measured batch size.

    References:
      McCandlish et al., An Empirical Model of Large-Batch Training, arXiv 1812.06162v1,
      abstract: the noise scale predicts the largest useful batch size.
    """
    if not scales:
        return None
    hits = [one for one in found if one.judged]
    missed = sum(one.missed for one in hits)
    within = len(hits) - missed
    what = _WHAT.format(thing)
    notes = [_range(scales), *_left_out(found), *without]
    if len(hits) < _FEWEST:
        few = say(_FEW, fewest=_FEWEST, judged=len(hits))
        return judged(name, UNKNOWN, what, few, *_ratios(thing, hits), *notes)

    # With few arms or many ties even perfect agreement of the ranks is likely by chance.
    ranks = rank_test([(one.noise_scale, one.least) for one in hits if one.exact])
    if ranks is not None and ranks.least_p > _CHANCE:
        ranks = None
    verdict = HELD if within > missed and _agree(ranks) else UNKNOWN
    verdict = NOT_HELD if missed > within else verdict

    factor = say(_FACTOR, factor=WITHIN, thing=thing, within=within, judged=len(hits))
    ranks_text = "whether the ranks agree cannot be told from so few arms with different limits"
    ranks_text = ranks_text if ranks is None else say(_RANKS, test=ranks)
    return judged(name, verdict, what, factor, *_ratios(thing, hits), ranks_text, *notes)


def _agree(ranks: RankTest | None) -> bool:
    """Return whether the ranks agree with the prediction or cannot contradict it."""
    return ranks is None or (ranks.correlation > _AGREES and ranks.p <= _CHANCE)


def _range(scales: Sequence[Noise]) -> str:
    """Return the range of the noise scale over the runs at the smallest batch, as a clause."""
    least = min(min(noise.scales) for noise in scales)
    most = max(max(noise.scales) for noise in scales)
    if math.isinf(least):
        return "at no probe of a run can the noise scale be told from infinity"
    end = "infinity" if math.isinf(most) else _amount(most)
    return f"over the run the noise scale goes from {_amount(least)} to {end}"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratios(thing: str, hits: Sequence[Prediction]) -> list[str]:
    """Return the ratios of the predictions, and the misses with known bounds only, as clauses."""
    ratios = sorted(one.least / one.noise_scale for one in hits if one.exact and one.noise_scale)
    ends = list(dict.fromkeys(f"{ratio:.3g}" for ratio in ratios[:1] + ratios[-1:]))
    exact = [f"the {thing} is {' to '.join(ends)} times the noise scale"] if ends else []
    return exact + [f"{one.bounds}, a miss" for one in hits if not one.exact]


def _left_out(found: Sequence[Prediction]) -> list[str]:
    """Return clauses that count and name the arms that are neither hits nor misses."""
    infinite = [one.arm for one in found if math.isinf(one.noise_scale)]
    bounded = [one.bounds for one in found if math.isfinite(one.noise_scale) and not one.judged]
    notes = [say(_BOUNDED, arms=bounded)] if bounded else []
    return notes + ([say(_INFINITE, arms=infinite)] if infinite else [])
