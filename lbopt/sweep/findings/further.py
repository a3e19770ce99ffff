"""Whether layerwise adaptation under LEGW holds small-batch quality to a larger batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lbopt.sweep import fits
from lbopt.sweep.findings.groups import comparable, settings
from lbopt.sweep.findings.limits import named_without_limit
from lbopt.sweep.findings.metric import Metric
from lbopt.sweep.findings.names import arm_name, listed
from lbopt.sweep.findings.verdicts import HELD, NOT_HELD, UNKNOWN, Arms, Claim, said

_SURE = 0.95
_THAN = {"": "the other arms", "_than_linear_scaling": "the arms with linear scaling"}
_ONLY = "compared are only arms with the same data, model and loss"
Draws = Mapping[str, np.ndarray]


def layerwise_legw_goes_further(
    config: Mapping[str, Any], arms: Arms, metric: Metric, draws: Draws
) -> list[Claim]:
    """Hold the claim of the LEGW and LAMB papers against the limits.

    LAMB and LARS with LEGW's warmup and square-root scaling are held against all other arms, and once more against those
    of them with linear scaling. What decides is in how many draws of the seeds the largest of our limits is larger than the
    largest of theirs: it holds with 95 % or more. It does not with 5 % or less, where draws in which both reach the study's
    largest batch count as ours, as nothing tells what lies beyond. Else it cannot be told; nor can it where nobody got past
    the smallest batch.

    Args:
      config: the study's config as JSON data.
      arms: of the summary of a complete study with limits.
      metric: what the study is judged by.
      draws: name of an arm -> its limit in every draw, [draws] int.

    Returns:
      A claim for each group of comparable arms that has both sides, and for each of the two comparisons, where they differ.
    """
    groups = comparable(config, arms)
    found: list[Claim] = []
    for ending, than in _THAN.items():
        sides = [_sides(config, group, linear_only=bool(ending)) for group in groups]
        for place, (ours, theirs) in enumerate([one for one in sides if all(one)]):
            what = f"layerwise adaptation with LEGW holds small-batch {metric.name} to a larger batch than {than}"
            verdict, numbers = _judge(config, ours, theirs, draws)
            name = f"layerwise_legw_goes_further{ending}{f'_{place + 1}' * (place > 0)}"
            found.append(
                said(name, verdict, what, "; ".join([*numbers, *[_ONLY] * (len(groups) > 1)]))
            )
    return found


def _sides(config: Mapping[str, Any], group: Arms, linear_only: bool) -> tuple[Arms, Arms]:
    """Return our arms and those they are compared with; of the latter none if it would say the same twice."""
    ours = [arm for arm in group if _is_ours(settings(config, arm["arm"]))]
    others = [arm for arm in group if arm not in ours]
    if not linear_only:
        return ours, others
    linear = [
        arm
        for arm in others
        if settings(config, arm["arm"])["schedule"]["scaling_rule"] == "linear"
    ]
    return ours, [] if linear == others else linear


def _is_ours(arm: Mapping[str, Any]) -> bool:
    rules = (arm["schedule"]["warmup_rule"], arm["schedule"]["scaling_rule"])
    return arm["optimizer"]["name"] in ("lamb", "lars") and rules == ("legw", "sqrt")


def _judge(
    config: Mapping[str, Any], ours: Arms, theirs: Arms, draws: Draws
) -> tuple[str, list[str]]:
    """Return the verdict and what it rests on."""
    sizes, without = config["global_batch_sizes"], named_without_limit([*ours, *theirs])
    sides = [[arm for arm in side if arm["limit"] is not None] for side in (ours, theirs)]
    if not all(sides):
        return UNKNOWN, without
    if len(sizes) > 1 and all(arm["limit"] == sizes[0] for side in sides for arm in side):
        nobody = f"no arm got past the smallest batch; every limit lies between {sizes[0]} and {sizes[1]}"
        return UNKNOWN, [nobody, *without]
    first, second = (_Side.of(side, draws) for side in sides)
    further, equal, beyond = _shares(first.draws, second.draws, sizes[-1])
    verdict = HELD if further >= _SURE else NOT_HELD if further + beyond <= 1 - _SURE else UNKNOWN
    if second.limit == sizes[-1] and verdict == HELD:
        verdict = UNKNOWN
    shares = f"drawing the seeds again, the former is larger in {100 * further:.1f} % of the draws and equal in {100 * equal:.1f} %"
    both = (
        [f"in {100 * beyond:.1f} % both reach the largest batch, and how far they go is not known"]
        if beyond
        else []
    )
    return verdict, [
        f"{first.words(sizes[-1])}, {second.words(sizes[-1])}",
        shares,
        *both,
        *without,
    ]


class _Side(NamedTuple):
    """The best of several arms.

    Attributes:
      names: of the arms.
      limit: the largest.
      draws: the largest in every draw, [draws] int.
    """

    names: list[str]
    limit: int
    draws: np.ndarray

    @classmethod
    def of(cls, arms: Arms, draws: Draws) -> _Side:
        best = np.max([draws[arm["arm"]] for arm in arms], axis=0)
        return cls([arm_name(arm) for arm in arms], max(arm["limit"] for arm in arms), best)

    def words(self, largest: int) -> str:
        """Say how far it holds, and how sure that is."""
        low, high = fits.limit_quantiles(self.draws)
        who = self.names[0] if len(self.names) == 1 else f"the best of {listed(self.names)}"
        to = "the largest batch" if self.limit == largest else "batch"
        return f"{who} holds it up to {to} {self.limit} (95 % interval {low} to {high})"


def _shares(ours: np.ndarray, theirs: np.ndarray, largest: int) -> Sequence[float]:
    """Return in what share of the draws ours is larger, both are equal, and both are the largest."""
    return [
        float(np.mean(one))
        for one in (ours > theirs, ours == theirs, (ours == largest) & (theirs == largest))
    ]
