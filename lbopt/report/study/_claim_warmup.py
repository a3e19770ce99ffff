"""Claim of LEGW (linear-epoch gradual warmup): warmup steps stay constant as the batch grows."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from lbopt.report.study._metric import Metric
from lbopt.report.study._statistics import pooled_slope
from lbopt.report.study._study import Candidate, CellResults, Study
from lbopt.report.study._words import HELD, NOT_HELD, UNKNOWN, Claim, judged, quoted, say

# Exponents of the batch size by which a number of warmup steps is scaled to another batch size.
STEPS = 0.0
EPOCHS = -1.0
GROWING = 1.0
_NEAR = 1.5
_SHUFFLES = 2000
_NAME = "constant_warmup_steps"
_WHAT = "constant warmup steps are the right transfer over batch sizes (LEGW)"
_AS_EPOCHS = "as the same number of epochs"
_IN_PROPORTION = "as steps in proportion to the batch"
_DRAWN = (
    "warmup and learning rate were sampled together, not crossed in a grid, so their effects "
    "cannot be told apart"
)
_NOWHERE = (
    "no warmup chosen inside its tried range can be transferred to another batch size both as the "
    "same steps and as the same epochs, because no tried warmup is near the transferred ones"
)
_CARRIED = "carried to another batch size, the chosen warmup "
_COUNTS = """scored better as the same number of steps than {{ other }}
    in {{ contest.better[0] }} of {{ contest.told[0] }} cases and worse in {{ contest.worse[0] }},
    a lead of {{ contest.lead }} where scores shuffled over the warmups
    give {{ contest.by_chance[0] }} to {{ contest.by_chance[1] }} (95 %)"""
_SLOPES = """the chosen warmup steps go like
    {{ slopes | join(", ") or "nothing, none being above 0" }}
    (0 is constant steps, -1 constant epochs)"""


@dataclasses.dataclass(frozen=True, slots=True)
class Warmups:
    """The warmups that were tried in a cell, each with all the other factors.

    Attributes:
      global_batch_size: Batch size of the cell.
      steps: Warmup steps that were tried, ascending; 0 is no warmup.
      ranks: Rank of the best validation score with each, 0 for the best; equal scores share a rank.
      chosen: Index of the chosen warmup in `steps` and `ranks`.
    """

    global_batch_size: int
    steps: tuple[float, ...]
    ranks: tuple[int, ...]
    chosen: int


@dataclasses.dataclass(frozen=True, slots=True)
class Contest:
    """A comparison of constant steps with another transfer; each field is [1 + shuffles] int.

    Element 0 is as measured, the others are of the shuffles.

    Attributes:
      better: Number of comparisons in which constant steps gave the better score.
      worse: Number in which they gave the worse score.
      told: Number of all comparisons, including those of equal scores.
    """

    better: np.ndarray
    worse: np.ndarray
    told: np.ndarray

    def __add__(self, other: Contest) -> Contest:
        """Add up the comparisons of two arms, whose shuffles are independent."""
        return Contest(self.better + other.better, self.worse + other.worse, self.told + other.told)

    @property
    def lead(self) -> int:
        """Number of better comparisons less that of worse ones, as measured."""
        return int(self.better[0] - self.worse[0])

    @property
    def by_chance(self) -> tuple[int, int]:
        """The two leads between which 95 % of the shuffles lie."""
        leads = (self.better - self.worse)[1:]
        low, high = np.quantile(leads, [0.025, 0.975], method="inverted_cdf")
        return int(low), int(high)

    @property
    def sign(self) -> int:
        """1 if constant steps are ahead by more than chance gives, -1 if behind, else 0."""
        low, high = self.by_chance
        return int(self.lead > high) - int(self.lead < low)


def constant_warmup_steps(study: Study) -> Claim | None:
    """Judge LEGW's rule of constant warmup steps by the scores of the search; see `judge_warmups`.

    Cells whose candidates were chosen by their steps to a target are left out. So are cells in
    which warmup and learning rate were sampled together: a warmup may score well there only because
    it was paired with a good rate.

    Returns:
      The claim; None if no cell tried several warmups.
    """
    arms = [(arm.name, [] if study.has_target else arm.cells) for arm in study.arms]
    if not any(len(_by_warmup(cell)) > 1 for _, cells in arms for cell in cells):
        return None
    crossed = {
        name: found
        for name, cells in arms
        if (found := [one for cell in cells if (one := warmups_of(cell, study.metric))])
    }
    return judge_warmups(crossed)


def warmups_of(cell: CellResults, metric: Metric) -> Warmups | None:
    """Return a cell's warmups; None unless all of several had the same rates and decays."""
    tried = _by_warmup(cell)
    others = [
        {(one.factors.learning_rate, one.factors.weight_decay) for one in group}
        for group in tried.values()
    ]
    crossed = len(others) > 1 and all(one == others[0] for one in others)
    if not crossed or cell.chosen.warmup not in tried:
        return None
    steps = tuple(group[0].warmup_steps for group in tried.values())
    best = [min(metric.badness(one.score) for one in group) for group in tried.values()]
    ranks = tuple(sorted(set(best)).index(value) for value in best)
    return Warmups(cell.global_batch_size, steps, ranks, list(tried).index(cell.chosen.warmup))


def _by_warmup(cell: CellResults) -> dict[float, list[Candidate]]:
    """Return the candidates run at full length, grouped by their ascending warmup factors."""
    found: dict[float, list[Candidate]] = {}
    for one in sorted(cell.full, key=lambda one: one.factors.warmup):
        found.setdefault(one.factors.warmup, []).append(one)
    return found


def judge_warmups(arms: Mapping[str, Sequence[Warmups]]) -> Claim:
    """Judge whether the warmup transfers as constant steps.

    The slope of the chosen warmup over the batch size is no evidence: every arm's grid is centred
    on its own rule, so random choices have slope 0 under LEGW and -1 under constant epochs. Instead
    the warmup that validation chose at one batch size is transferred to every other batch size, as
    the same number of steps and as the same number of epochs, and the search scores of both are
    compared there. A permutation test gives the lead that either gets by chance; see `compare`.

    The claim holds if constant steps lead by more than chance gives (95 %) and are not behind steps
    that grow with the batch. It does not if constant epochs or growing steps lead by as much.
    Otherwise, or if an arm clearly contradicts the others, it cannot be told.

    Args:
      arms: Cells of each arm, by its name.
    """
    if not arms:
        return judged(_NAME, UNKNOWN, _WHAT, _DRAWN)
    contests, against_growing = (
        [compare(cells, exponent, place) for place, cells in enumerate(arms.values())]
        for exponent in (EPOCHS, GROWING)
    )
    pooled = total(contests)
    growing = total(against_growing)
    growing_text = say(_COUNTS, contest=growing, other=_IN_PROPORTION)
    slopes = _slopes(arms)

    # Growing steps refute the claim on their own, whether or not constant epochs do worse.
    if growing.sign < 0:
        return judged(_NAME, NOT_HELD, _WHAT, _CARRIED + growing_text, slopes)
    if not pooled.told[0]:
        return judged(_NAME, UNKNOWN, _WHAT, _NOWHERE, slopes)

    evidence = [_CARRIED + say(_COUNTS, contest=pooled, other=_AS_EPOCHS), slopes]
    names = zip(arms, contests, strict=True)
    against = [quoted(name) for name, one in names if one.sign * pooled.sign < 0]
    if against:
        evidence.append(f"but the opposite holds for {' and '.join(against)} alone")
        return judged(_NAME, UNKNOWN, _WHAT, *evidence)

    if growing.lead < 0 < pooled.sign:
        return judged(_NAME, UNKNOWN, _WHAT, *evidence, f"but it also {growing_text}")
    verdict = {1: HELD, 0: UNKNOWN, -1: NOT_HELD}[pooled.sign]
    return judged(_NAME, verdict, _WHAT, *evidence)


def _slopes(arms: Mapping[str, Sequence[Warmups]]) -> str:
    """Return the slope of each arm's chosen warmup steps over the batch size, as a clause."""
    slopes = []
    for name, cells in arms.items():
        pairs = [(cell.global_batch_size, cell.steps[cell.chosen]) for cell in cells]
        slope = pooled_slope([pair for pair in pairs if pair[1] > 0])
        slopes += [] if slope is None else [f"batch^{slope + 0.0:.2f} for {quoted(name)}"]
    return say(_SLOPES, slopes=slopes)


def compare(
    cells: Sequence[Warmups], exponent: float, index: int = 0, shuffles: int = _SHUFFLES
) -> Contest:
    """Transfer each cell's chosen warmup to every other cell in two ways and compare the scores.

    A shuffle permutes the scores of every cell over its warmups, and the choice with them. If the
    warmup made no difference, every shuffle would be as likely as the measured order, for any grid
    of warmups.

    Args:
      cells: Cells of one arm.
      exponent: Exponent of the batch size of the other transfer: -1 for constant epochs.
      index: Place of the arm, so that the shuffles of two arms are independent.
      shuffles: Number of shuffles.

    >>> cells = [Warmups(size, (2.0, 8.0, 32.0), (1, 0, 2), chosen=1) for size in (16, 64, 256)]
    >>> contest = compare(cells, EPOCHS)
    >>> int(contest.told[0]), contest.lead
    (4, 4)
    """
    rng = np.random.Generator(np.random.Philox([0, index]))
    shuffled = [(cell, *_shuffles(cell, shuffles, rng)) for cell in cells]
    better, worse, told = (np.zeros(shuffles + 1, int) for _ in range(3))
    rows = np.arange(shuffles + 1)
    for (source, _, chosen), (target, ranks, _) in itertools.permutations(shuffled, 2):
        ours, theirs = (landing(source, target, one)[chosen] for one in (STEPS, exponent))
        apart = (ours >= 0) & (theirs >= 0) & (ours != theirs)
        ahead = ranks[rows, theirs] - ranks[rows, ours]
        better += apart & (ahead > 0)
        worse += apart & (ahead < 0)
        told += apart
    return Contest(better, worse, told)


def _shuffles(
    cell: Warmups, shuffles: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return ranks [1 + shuffles, warmups] and chosen places [1 + shuffles], first as measured."""
    order = rng.permuted(np.tile(np.arange(len(cell.steps)), (shuffles + 1, 1)), axis=1)
    order[0] = np.arange(len(cell.steps))
    return np.asarray(cell.ranks)[order], np.argmax(order == cell.chosen, axis=1)


def landing(source: Warmups, target: Warmups, exponent: float) -> np.ndarray:
    """Return the warmup of the target cell nearest to each of the source; -1 if none is near.

    Near means within a factor of 1.5, so that a value halfway between two warmups a factor of 4
    apart is near neither. The shortest and the longest warmup of the source get -1, because the
    best warmup may lie beyond them.

    Args:
      source: Cell whose warmups are transferred.
      target: Cell to which they are transferred.
      exponent: Exponent of the ratio of the batch sizes by which steps are multiplied: 0 for the
        same steps, -1 for the same epochs.

    Returns:
      [warmups of the source] int, places in `target.steps`.

    >>> steps, ranks = (2.0, 8.0, 32.0), (0, 1, 2)
    >>> ours, theirs = Warmups(16, steps, ranks, 0), Warmups(64, steps, ranks, 0)
    >>> landing(ours, theirs, STEPS).tolist(), landing(ours, theirs, EPOCHS).tolist()
    ([-1, 1, -1], [-1, 0, -1])
    """
    places = np.full(len(source.steps), -1)
    ratio = (target.global_batch_size / source.global_batch_size) ** exponent
    for place in range(1, len(source.steps) - 1):
        wanted = source.steps[place] * ratio
        off = [abs(math.log(steps / wanted)) if steps > 0 else math.inf for steps in target.steps]
        if min(off) < math.log(_NEAR):
            places[place] = off.index(min(off))
    return places


def total(contests: Sequence[Contest]) -> Contest:
    """Add up the comparisons of several arms, at least one."""
    first, *others = contests
    return sum(others, first)
