"""Claim: the distance from the start grows like the logarithm of the steps."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from lbopt.report.study._metric import ACCURACY, Metric
from lbopt.report.study._study import ArmResults, CellResults, MeanDiffusion, Study
from lbopt.report.study._words import HELD, NOT_HELD, UNKNOWN, Claim, count, judged, say

_NAME = "diffusion_is_logarithmic"
_WHAT = "diffusion is ultra-slow, the distance from the start growing like log t,"
_FITS = 0.95
_TRAINED = 0.9
_EVIDENCE = """
    {%- if not sign %}neither fits most cells: {% endif -%}
    log t is the better fit, with R^2 of at least {{ least }}, in {{ log }} of
    {{ total | count("cell") }}, a power of t in {{ power }}
    (median R^2 {{ "%.4f" % log_r2 }} against {{ "%.4f" % power_r2 }};
    median exponent {{ "%.2f" % exponent }})"""
_FEW = 'to judge by are the cells of {{ arms | map("name") | listed }} alone, of {{ total }} arms'
_AGAINST = 'but for {{ arms | map("name") | listed }} it is {{ curve }}'


@dataclasses.dataclass(frozen=True, slots=True)
class _Cells:
    """The cells of an arm that have fits, or of all arms.

    Attributes:
      name: Name of the arm.
      fits: Fits of the cells that count.
      diverged: Number of cells left out because a seed diverged.
      untrained: Number of cells left out because training accuracy stayed too low.
    """

    name: str
    fits: list[MeanDiffusion]
    diverged: int
    untrained: int

    def count(self, sign: int) -> int:
        """Return the number of cells that log t describes (1), or a power of t (-1)."""
        return sum(_sign(fit) == sign for fit in self.fits)

    @property
    def sign(self) -> int:
        """1 if log t describes most cells, -1 if a power of t does, 0 if neither."""
        return next((sign for sign in (1, -1) if 2 * self.count(sign) > len(self.fits)), 0)


def diffusion_is_logarithmic(study: Study) -> Claim | None:
    """Judge whether the distance grows like log t, by fits of log t and of a power of t.

    Both fits have two parameters, so the larger R^2 is the better fit. A cell counts for neither if
    both R^2 are below 0.95. The claim holds if log t describes most cells, and does not if a power
    of t does. It cannot be told if at least a third of the arms contradict the majority, or if
    fewer than half of the study's arms have cells that count.

    Left out are arms whose learning rate decays, because their distance grows ever more slowly
    anyway; cells in which a final seed diverged; and cells of classifiers with a training accuracy
    below 90 %.

    Returns:
      The claim; None if no cell has fits.

    References:
      Hoffer et al., Train Longer, Generalize Better, arXiv 1705.08741v2, abstract; contradicted by
      You et al., The Limit of the Batch Size, arXiv 2006.08517v1, abstract.
    """
    constant = [arm for arm in study.arms if arm.config.schedule.decay == "constant"]
    arms = [
        _cells_of(arm, study.metric)
        for arm in constant
        if any(cell.diffusion for cell in arm.cells)
    ]
    if not arms:
        return None

    total = _Cells(
        "",
        [fit for arm in arms for fit in arm.fits],
        sum(arm.diverged for arm in arms),
        sum(arm.untrained for arm in arms),
    )
    notes = _notes(total, len(study.arms) - len(constant))
    if not total.fits:
        return judged(_NAME, UNKNOWN, _WHAT, "there is no cell to judge by", *notes)

    judging = [arm.name for arm in arms if arm.fits]
    total_arms = len(study.arms)
    few = say(_FEW, arms=judging, total=total_arms) if 2 * len(judging) < total_arms else ""
    against = [arm.name for arm in arms if total.sign and arm.sign == -total.sign]
    verdict = {1: HELD, 0: UNKNOWN, -1: NOT_HELD}[total.sign]
    # Most cells may be those of one arm, so arms are counted too.
    if few or 3 * len(against) >= len(judging):
        verdict = UNKNOWN

    curve = "log t" if total.sign < 0 else "a power of t"
    but = say(_AGAINST, arms=against, curve=curve) if against else ""
    return judged(_NAME, verdict, _WHAT, _evidence(total), but, few, *notes)


def _cells_of(arm: ArmResults, metric: Metric) -> _Cells:
    cells = [cell for cell in arm.cells if cell.diffusion]
    whole = [cell for cell in cells if not cell.diverged]
    kept = [cell for cell in whole if metric is not ACCURACY or _is_trained(cell)]
    fits = [cell.diffusion for cell in kept if cell.diffusion]
    return _Cells(arm.name, fits, len(cells) - len(whole), len(whole) - len(kept))


def _is_trained(cell: CellResults) -> bool:
    accuracy = cell.means.train_accuracy
    return accuracy is None or accuracy >= _TRAINED


def _sign(fit: MeanDiffusion) -> int:
    """Return 1 if log t describes the distance, -1 if a power of t does, 0 if neither."""
    if max(fit.log_r2, fit.power_r2) < _FITS:
        return 0
    return 1 if fit.log_r2 > fit.power_r2 else -1


def _evidence(cells: _Cells) -> str:
    return say(
        _EVIDENCE,
        sign=cells.sign,
        least=_FITS,
        log=cells.count(1),
        power=cells.count(-1),
        total=len(cells.fits),
        log_r2=statistics.median(fit.log_r2 for fit in cells.fits),
        power_r2=statistics.median(fit.power_r2 for fit in cells.fits),
        exponent=statistics.median(fit.exponent for fit in cells.fits),
    )


def _notes(cells: _Cells, decaying: int) -> Sequence[str]:
    """Return a clause for each kind of cell or arm that was left out."""
    low = f"{count(cells.untrained, 'cell')} left out, as training accuracy stayed under 90 %"
    return (
        f"{count(cells.diverged, 'cell')} left out, as a seed diverged" * bool(cells.diverged),
        low * bool(cells.untrained),
        f"{count(decaying, 'arm')} not judged, as the rate falls" * bool(decaying),
    )
