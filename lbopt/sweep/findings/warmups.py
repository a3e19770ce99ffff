"""Which transfer of the warmup does better over the batch sizes, in a search's own scores, and what chance would give."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

STEPS, EPOCHS, GROWING = 0.0, -1.0, 1.0
"""Exponents of the batch size with which a number of warmup steps is carried to another one."""
_NEAR = 1.5
_DRAWS = 2000


class Warmups(NamedTuple):
    """The warmup of a cell in which it was searched.

    Attributes:
      global_batch_size: of the cell.
      steps: that were tried, ascending; 0 is no warmup.
      ranks: of the best validation score with each, 0 for the best of all, the same for equal scores.
      chosen: place of the chosen one in both.
    """

    global_batch_size: int
    steps: tuple[float, ...]
    ranks: tuple[int, ...]
    chosen: int


class Contest(NamedTuple):
    """Constant steps against another transfer.

    Attributes:
      better: comparisons in which constant steps gave the better score; first as measured, then of every shuffle.
      worse: in which they gave the worse one, likewise.
      told: comparisons, equal scores among them, likewise.
    """

    better: np.ndarray
    worse: np.ndarray
    told: np.ndarray

    @property
    def lead(self) -> int:
        """How many more were better than worse, as measured."""
        return int(self.better[0] - self.worse[0])

    @property
    def by_chance(self) -> tuple[int, int]:
        """Between which leads 95 % of the shuffles lie."""
        low, high = np.quantile(
            (self.better - self.worse)[1:], [0.025, 0.975], method="inverted_cdf"
        )
        return int(low), int(high)

    @property
    def sign(self) -> int:
        """1 if constant steps are ahead by more than chance gives, -1 if behind, else 0."""
        low, high = self.by_chance
        return int(self.lead > high) - int(self.lead < low)


def warmups(arm: Mapping[str, Any], metric_name: str) -> list[Warmups]:
    """Return the cells of an arm in which several warmups were tried, each with all the other factors.

    Where warmup was drawn together with the learning rate, a good warmup may be one that met a good rate: such cells are
    left out, and so are those whose candidates were chosen by their steps to a target.

    Args:
      arm: of a summary.
      metric_name: "accuracy" or "perplexity".
    """
    found = []
    for point in arm["points"]:
        tried = _by_warmup(point)
        if point["target"] is None and is_crossed(point) and point["warmup_factor"] in tried:
            steps = tuple(group[0]["warmup_steps"] for group in tried.values())
            best = [min(_badness(one, metric_name) for one in group) for group in tried.values()]
            ranks = tuple(sorted(set(best)).index(value) for value in best)
            place = list(tried).index(point["warmup_factor"])
            found.append(Warmups(point["global_batch_size"], steps, ranks, place))
    return found


def is_searched(point: Mapping[str, Any]) -> bool:
    """Return whether more than one warmup was tried at full length in a cell, a point of a summary."""
    return len(_by_warmup(point)) > 1


def is_crossed(point: Mapping[str, Any]) -> bool:
    """Return whether every warmup was tried with the same learning rates and weight decays in a cell, a point of a summary.

    Only runs of full length count; where a single warmup was tried it is False.
    """
    others = [
        {(one["learning_rate_factor"], one["weight_decay_factor"]) for one in group}
        for group in _by_warmup(point).values()
    ]
    return len(others) > 1 and all(one == others[0] for one in others)


def _by_warmup(point: Mapping[str, Any]) -> dict[float, list[Mapping[str, Any]]]:
    """Return the candidates that were tried at full length, by their warmup factor, ascending."""
    full = [one for one in point["search"] if one["fidelity"] == 1]
    factors = sorted({one["warmup_factor"] for one in full})
    return {factor: [one for one in full if one["warmup_factor"] == factor] for factor in factors}


def _badness(candidate: Mapping[str, Any], metric_name: str) -> float:
    score = candidate[f"validation_{metric_name}_mean"]
    if score is None:
        return math.inf
    return -score if metric_name == "accuracy" else score


def compare(
    cells: Sequence[Warmups], exponent: float, index: int = 0, draws: int = _DRAWS
) -> Contest:
    """Carry the chosen warmup of every cell to every other one, as the same steps and otherwise, and compare the scores there.

    Chance is what is left when the scores of every cell are shuffled over its warmups, the choice along with them: if the
    warmup made no difference, every shuffle would be as likely as what was measured, whatever warmups the grid holds.

    Args:
      cells: of one arm.
      exponent: of the batch size, of the other transfer: -1 for constant epochs.
      index: of the arm, so that the shuffles of two arms are independent: what they give by chance adds up like noise.
      draws: shuffles.

    Returns:
      Counts, [1 + draws] int: first as measured, then of every shuffle.

    >>> cells = [Warmups(size, (2.0, 8.0, 32.0), (1, 0, 2), chosen=1) for size in (16, 64, 256)]
    >>> contest = compare(cells, EPOCHS)
    >>> int(contest.told[0]), contest.lead
    (4, 4)
    """
    draw = np.random.Generator(np.random.Philox([0, index]))
    drawn = [(cell, *_shuffles(cell, draws, draw)) for cell in cells]
    better, worse, told = (np.zeros(draws + 1, int) for _ in range(3))
    for (source, _, chosen), (target, ranks, _) in itertools.permutations(drawn, 2):
        ours, theirs = (landing(source, target, one)[chosen] for one in (STEPS, exponent))
        apart = (ours >= 0) & (theirs >= 0) & (ours != theirs)
        rows = np.arange(draws + 1)
        ahead = ranks[rows, theirs] - ranks[rows, ours]
        better += apart & (ahead > 0)
        worse += apart & (ahead < 0)
        told += apart
    return Contest(better, worse, told)


def _shuffles(
    cell: Warmups, draws: int, draw: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return ranks [1 + draws, warmups] and the place of the chosen one [1 + draws], first as they are."""
    order = draw.permuted(np.tile(np.arange(len(cell.steps)), (draws + 1, 1)), axis=1)
    order[0] = np.arange(len(cell.steps))
    return np.asarray(cell.ranks)[order], np.argmax(order == cell.chosen, axis=1)


def landing(source: Warmups, target: Warmups, exponent: float) -> np.ndarray:
    """Return where the warmups of a cell land among those of another: the nearest one tried, -1 if none is near enough.

    Near enough is within a factor of 1.5: halfway between two that are a factor of 4 apart it is neither. The shortest and
    the longest warmup of the source land nowhere: had they been chosen, the best one may lie beyond.

    Args:
      source: the cell from which they are carried.
      target: the cell to which they are.
      exponent: of the quotient of the batch sizes, by which a number of steps is multiplied: 0 for the same steps, -1 for the
        same epochs.

    Returns:
      [warmups of the source] int, places in `target.steps`.

    >>> ours, theirs = Warmups(16, (2.0, 8.0, 32.0), (0, 1, 2), 0), Warmups(64, (2.0, 8.0, 32.0), (0, 1, 2), 0)
    >>> landing(ours, theirs, STEPS).tolist(), landing(ours, theirs, EPOCHS).tolist()
    ([-1, 1, -1], [-1, 0, -1])
    """
    places = np.full(len(source.steps), -1)
    for place in range(1, len(source.steps) - 1):
        wanted = (
            source.steps[place] * (target.global_batch_size / source.global_batch_size) ** exponent
        )
        off = [abs(math.log(steps / wanted)) if steps > 0 else math.inf for steps in target.steps]
        if min(off) < math.log(_NEAR):
            places[place] = off.index(min(off))
    return places


def total(contests: Sequence[Contest]) -> Contest:
    """Add up the comparisons of several arms, at least one; all have equally many shuffles, independent of each other."""
    return Contest(*(np.sum(column, axis=0) for column in zip(*contests, strict=True)))
