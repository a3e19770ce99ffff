"""Search beyond the edges of a search, until its best candidate is interior or a budget is spent.

A best candidate at the end of what was tried may have better neighbours outside. The range of each
factor is then extended there, a candidate at a time: the best one with that factor moved on, by the
grid's own step or by a tenth of the range.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from lbopt.config import SearchConfig
from lbopt.sweep.search._searcher import Factors, Proposal, Rounds, Score

_END = 0.1
"""Share of a range's logarithm that counts as its edge, and by which a step beyond extends it."""
_STEP_FROM_ZERO = 2.0
"""Step of a grid whose only other factor is 0, from which no ratio leads on."""
_MOST_LOST = 0.75
"""Share of the candidates that may fail to learn in a search that lies right."""
_FARTHEST = 1e50
"""Factors beyond this, or below its inverse, are not tried: their squares have to be finite."""


def widened(rounds: Rounds, config: SearchConfig, longest_warmup: float = math.inf) -> Rounds:
    """Ask for the trials of a search, and then for candidates beyond its edges.

    After the last round, the best candidate of full length is looked at. For each of its factors
    that lies at an edge, the candidate with that factor one step further is run at full length,
    all of them in one round; and so on with the best of all, up to `widen_candidates`. Of equal
    scores the smallest factors are the best, as in the choice. If a run of the best candidate
    diverged, only smaller learning rates are tried. If it did not learn, chance has chosen it: then
    the candidate with the smallest `Score.tie` is followed.

    Beyond some learning rate no candidate learns, and there an interior one is the best of bad
    ones. So the candidate with the smallest learning rate is followed instead where more than three
    quarters did not learn, if all of those have larger rates than the best one, or if the best one
    did not learn either and is interior.

    Args:
      rounds: The search itself.
      config: Its config.
      longest_warmup: Largest factor whose warmup fits into the run; larger ones change nothing.
    """
    full: dict[Factors, Score] = {}
    asked = next(rounds, ())
    while asked:
        scores = yield asked
        full |= _of_full_length(asked, scores)
        try:
            asked = rounds.send(scores)
        except StopIteration:
            break

    left = config.widen_candidates
    while full and left:
        asked = tuple(Proposal(one, 1.0) for one in _beyond(config, full, longest_warmup))[:left]
        if not asked:
            return
        full |= _of_full_length(asked, (yield asked))
        left -= len(asked)


def _of_full_length(asked: Iterable[Proposal], scores: Iterable[Score]) -> dict[Factors, Score]:
    pairs = zip(asked, scores, strict=True)
    return {proposal.factors: score for proposal, score in pairs if proposal.fidelity == 1}


def _beyond(
    config: SearchConfig, full: dict[Factors, Score], longest_warmup: float
) -> Iterator[Factors]:
    """Yield the best candidate with each factor that lies at an edge moved on by a step."""
    best = min(full, key=lambda factors: (full[factors][:2], factors))
    if not full[best].learned:
        best = min(full, key=lambda factors: (full[factors].tie, factors))
    if _lies_too_high(config, full, best):
        best = min(full, key=lambda factors: (factors.learning_rate, full[factors].tie))
    diverged = not all(map(math.isfinite, full[best][:2]))
    for name in Factors._fields:
        factor = getattr(best, name)
        side = edge_of(config, name, factor, (getattr(one, name) for one in full))
        cut = name == "warmup" and side > 0 and factor >= longest_warmup
        if not side or cut or (diverged and (name, side) != ("learning_rate", -1)):
            continue
        moved = _step_beyond(config, name, factor, side)
        if 1 / _FARTHEST <= moved <= _FARTHEST:
            yield best._replace(**{name: moved})


def _lies_too_high(config: SearchConfig, full: dict[Factors, Score], best: Factors) -> bool:
    """Return whether few candidates learned, as the learning rates are too large."""
    lost = [factors.learning_rate for factors in full if not full[factors].learned]
    if len(lost) <= _MOST_LOST * len(full):
        return False
    if full[best].learned:
        return min(lost) > best.learning_rate
    rates = (factors.learning_rate for factors in full)
    return not edge_of(config, "learning_rate", best.learning_rate, rates)


def can_widen(config: SearchConfig) -> bool:
    """Return whether a search may run candidates beyond its edges: something must be searched.

    >>> can_widen(SearchConfig()), can_widen(SearchConfig(learning_rate_factors=(1.0,)))
    (True, False)
    """
    ends = (_ends(config, name) for name in Factors._fields)
    return config.widen_candidates > 0 and any(low < high for low, high in ends)


def is_beyond(config: SearchConfig, factors: Factors) -> bool:
    """Return whether a candidate lies outside of the factors or ranges of its search.

    >>> is_beyond(SearchConfig(), Factors(8.0, 1.0, 1.0))
    True
    """
    pairs = [(_ends(config, name), getattr(factors, name)) for name in Factors._fields]
    return not all(low <= factor <= high for (low, high), factor in pairs)


def edge_of(config: SearchConfig, name: str, factor: float, tried: Iterable[float] = ()) -> int:
    """Return the edge of the search at which a factor of the best candidate lies.

    The edges of a grid are its ends; those of a range the first and the last tenth of its
    logarithm. It is no edge if a factor further out than the best candidate's was tried, as that
    one was no better. A factor of 0, and a single one, have no edge.

    Args:
      config: The config of the search.
      name: "learning_rate", "warmup" or "weight_decay".
      factor: The factor.
      tried: The factors of all candidates at full length.

    Returns:
      -1 for the lower edge, 1 for the upper one, 0 for none.

    >>> config = SearchConfig(learning_rate_factors=(0.5, 1.0, 2.0))
    >>> [edge_of(config, "learning_rate", factor) for factor in (0.5, 1.0, 2.0)]
    [-1, 0, 1]
    >>> edge_of(config, "learning_rate", 2.0, (0.5, 1.0, 2.0, 4.0))
    0
    >>> config = SearchConfig("halton", learning_rate_range=(0.1, 10.0))
    >>> edge_of(config, "learning_rate", 7.0), edge_of(config, "learning_rate", 7.0, (7.0, 9.5))
    (1, 0)
    """
    low, high = _ends(config, name)
    if low == high or factor <= 0:
        return 0
    near_low = low
    near_high = high
    if config.method != "grid":
        width = math.log(high / low)
        near_low = low * math.exp(_END * width)
        near_high = low * math.exp((1 - _END) * width)

    if factor <= near_low:
        return -1 if all(other >= factor for other in tried) else 0
    if factor >= near_high:
        return 1 if all(other <= factor for other in tried) else 0
    return 0


def _step_beyond(config: SearchConfig, name: str, factor: float, side: int) -> float:
    """Return the first factor beyond an edge and everything tried there."""
    low, high = _ends(config, name)
    if config.method == "grid":
        grid = getattr(config, f"{name}_factors")
        first, second = grid[-2:] if side > 0 else grid[:2]
        step = second / first if first else _STEP_FROM_ZERO
    else:
        step = (high / low) ** _END
    return max(factor, high) * step if side > 0 else min(factor, low) / step


def _ends(config: SearchConfig, name: str) -> tuple[float, float]:
    """Return the smallest and the largest factor of a search itself."""
    ends = getattr(config, f"{name}_factors" if config.method == "grid" else f"{name}_range")
    return float(ends[0]), float(ends[-1])
