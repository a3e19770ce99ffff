"""Whether the gradient noise scale predicts how far the batch goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lbopt.sweep.findings.limits import named_without_limit
from lbopt.sweep.findings.names import arm_name, listed
from lbopt.sweep.findings.ranks import RankTest, rank_test
from lbopt.sweep.findings.verdicts import HELD, NOT_HELD, UNKNOWN, Arms, Claim, said

WITHIN = 4.0
"""A prediction of a limit is good within this factor: batch sizes of a study are factors of 2 apart, or of 4."""
_AGREES = 0.5
_CHANCE = 0.1
_FEWEST = 3
_DEFINED = "tr(Sigma) / |G|^2 at the smallest batch, the median over the probes of a run"


class Prediction(NamedTuple):
    """What the noise scale of an arm predicts, and what was found.

    Attributes:
      arm: its name.
      noise_scale: in examples, at its smallest batch; None if it is infinite.
      least: batch size that was found; where only bounds are known, the lower one.
      most: the upper one, infinite if there is none.
    """

    arm: str
    noise_scale: float | None
    least: float
    most: float

    @property
    def exact(self) -> bool:
        """Whether what was found is known, not only between bounds."""
        return self.least == self.most

    @property
    def missed(self) -> bool:
        """Whether it is off by more than `WITHIN`, wherever between its bounds the truth lies."""
        return (
            self.noise_scale is not None
            and not self.least / WITHIN <= self.noise_scale <= WITHIN * self.most
        )

    @property
    def judged(self) -> bool:
        """Whether it is known to be a hit or a miss."""
        return self.noise_scale is not None and (self.exact or self.missed)

    def bounds(self) -> str:
        """Say what is known where only bounds are."""
        if math.isinf(self.most):
            return f"{self.arm} held up to the largest batch, {self.least}"
        return f"the limit of {self.arm} lies between {self.least} and {self.most}"


def noise_scale_predicts_limit(arms: Arms, sizes: Sequence[int]) -> Claim | None:
    """Hold the claim that the gradient noise scale predicts how far the batch goes against the limits that were reached.

    See `_predicted`. The limit of an arm that held up to the largest batch is that batch or more: a miss if it is more than 4
    times the noise scale. That of an arm that did not get past the smallest one lies between that and the next: a miss if
    all that is more than 4 times away. Else such arms are left out, as nothing tells on which side they are.

    Args:
      arms: of a summary of a study with limits.
      sizes: its batch sizes, ascending.

    Returns:
      The claim; None if no arm has a noise scale.
    """
    noisy = [arm for arm in arms if _is_measured(arm)]
    if not noisy:
        return None
    found = [_of_limit(arm, sizes) for arm in noisy if arm["limit"] is not None]
    return _predicted(
        "noise_scale_predicts_limit", "limit", found, _range(noisy), named_without_limit(noisy)
    )


def noise_scale_predicts_critical_batch(arms: Arms) -> Claim | None:
    """Hold the same claim as `noise_scale_predicts_limit` against the critical batches that the steps to a target gave.

    Args:
      arms: of a summary.

    Returns:
      The claim; None if no arm has both a critical batch and a noise scale.
    """
    noisy = [arm for arm in arms if arm["critical_batch"] and _is_measured(arm)]
    if not noisy:
        return None
    found = [_prediction(arm, *[arm["critical_batch"]["critical_batch_size"]] * 2) for arm in noisy]
    return _predicted(
        "noise_scale_predicts_critical_batch", "critical batch", found, _range(noisy), []
    )


def _is_measured(arm: Mapping[str, Any]) -> bool:
    """Return whether an arm has a noise scale at its smallest batch, be it infinite."""
    return bool(arm["points"]) and arm["points"][0]["noise_scale_over_steps"] is not None


def _of_limit(arm: Mapping[str, Any], sizes: Sequence[int]) -> Prediction:
    limit = arm["limit"]
    if arm["limit_is_largest"]:
        return _prediction(arm, limit, math.inf)
    return _prediction(arm, limit, sizes[1] if limit == sizes[0] else limit)


def _prediction(arm: Mapping[str, Any], least: float, most: float) -> Prediction:
    return Prediction(arm_name(arm), arm["points"][0]["noise_scale"], least, most)


def _range(noisy: Arms) -> str:
    """Say between what the noise scale lies in the course of the runs at the smallest batch."""
    lows, highs = zip(*(arm["points"][0]["noise_scale_range"] for arm in noisy), strict=True)
    least = min((low for low in lows if low is not None), default=None)
    if least is None:
        return "at no probe of a run the noise scale is told from infinity"
    most = "infinity" if None in highs else _amount(max(highs))
    return f"over the run the noise scale goes from {_amount(least)} to {most}"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _predicted(
    name: str, thing: str, found: Sequence[Prediction], course: str, without: Sequence[str]
) -> Claim:
    """Judge predictions of batch sizes.

    The prediction is the noise scale at an arm's smallest batch, which nobody needs large batches to measure: the median
    over its run, see `lbopt.sweep.findings.probes.noise_scales`. It does not hold if it is off by more than a factor of 4 for
    most arms. It holds if it is within that for most, and if the ranks agree, where they can be told to: with a
    correlation above 0.5 that at most one in ten orders would give by chance. Of three arms, or with too many ties, no order
    is so rare, and the factor alone decides. Fewer than three arms tell nothing.

    Args:
      name: of the claim.
      thing: that is predicted.
      found: every arm that has a noise scale and what it predicts.
      course: how the noise scale changes over the run.
      without: clauses naming arms that have nothing to predict.

    References:
      McCandlish et al., An Empirical Model of Large-Batch Training, arXiv 1812.06162 [recalled 90%].
    """
    judged = [one for one in found if one.judged]
    missed = sum(one.missed for one in judged)
    within = len(judged) - missed
    ranks = rank_test([(one.noise_scale or 0.0, one.least) for one in judged if one.exact])
    what = f"the gradient noise scale ({_DEFINED}) predicts the {thing}"
    notes = [course, *_left_out(found), *without]
    if len(judged) < _FEWEST:
        few = f"it takes {_FEWEST} arms to judge by, and there {'is' if len(judged) == 1 else 'are'} {len(judged) or 'none'}"
        return said(name, UNKNOWN, what, "; ".join([few, *_ratios(thing, judged), *notes]))
    verdict = (
        NOT_HELD if missed > within else HELD if within > missed and _agree(ranks) else UNKNOWN
    )
    factor = (
        f"it is within a factor of {WITHIN:g} of the {thing} for {within} of {len(judged)} arms"
    )
    return said(
        name, verdict, what, "; ".join([factor, *_ratios(thing, judged), _said_of(ranks), *notes])
    )


def _can_be_told(ranks: RankTest | None) -> bool:
    return ranks is not None and ranks.least_p <= _CHANCE


def _agree(ranks: RankTest | None) -> bool:
    """Return whether the ranks do not speak against the prediction."""
    return (
        ranks is None
        or not _can_be_told(ranks)
        or (ranks.correlation > _AGREES and ranks.p <= _CHANCE)
    )


def _said_of(ranks: RankTest | None) -> str:
    if ranks is None or not _can_be_told(ranks):
        return "whether the ranks agree cannot be told from so few arms with different limits"
    return f"the rank correlation is {ranks.correlation:.2f} (one-sided p {ranks.p:.2f} over all orders)"


def _ratios(thing: str, judged: Sequence[Prediction]) -> list[str]:
    """Say how far off the predictions are, and which misses have bounds only."""
    ratios = sorted(one.least / one.noise_scale for one in judged if one.exact and one.noise_scale)
    ends = list(dict.fromkeys(f"{ratio:.3g}" for ratio in ratios[:1] + ratios[-1:]))
    exact = [f"the {thing} is {' to '.join(ends)} times the noise scale"] if ends else []
    return exact + [f"{one.bounds()}, a miss" for one in judged if not one.exact]


def _left_out(found: Sequence[Prediction]) -> list[str]:
    """Count and name the arms that are neither hits nor misses."""
    infinite = [one.arm for one in found if one.noise_scale is None]
    bounded = [one.bounds() for one in found if one.noise_scale is not None and not one.judged]
    notes = []
    if bounded:
        notes.append(
            f"{_counted(bounded)} left out, as each may be a hit or a miss: {', '.join(bounded)}"
        )
    if infinite:
        notes.append(
            f"{_counted(infinite)} left out, as the noise scale is not told from infinity: {listed(infinite)}"
        )
    return notes


def _counted(arms: Sequence[str]) -> str:
    return f"{len(arms)} arm{'s' * (len(arms) > 1)}"
