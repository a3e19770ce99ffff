"""Successive halving and Hyperband: many short runs, and longer ones for what did well."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

from lbopt.config import SearchConfig
from lbopt.sweep.search._protocol import Factors, Proposal, Rounds, Score
from lbopt.sweep.search._sampled import halton_candidates
from lbopt.sweep.search._space import make_space

Bracket: TypeAlias = list[tuple[int, float]]
"""The rungs of one tournament: how many candidates are run, and how long each."""

_ROUNDING = 1e-9
"""1 / (1 / 27) may come out a little below 27, and still holds three factors of 3."""


def num_halvings(eta: int, ratio: float) -> int:
    """Return how many times a length can be multiplied by eta before it has grown more than `ratio` times.

    Args:
      eta: the factor, >= 2.
      ratio: longest over shortest length, >= 1.

    Returns:
      floor(log_eta(ratio)), found by multiplying: the floor of a computed logarithm is off by one at powers of eta.

    >>> num_halvings(3, 27.0), num_halvings(3, 1 / (1 / 243)), num_halvings(10, 1000.0), num_halvings(3, 26.9)
    (3, 5, 3, 2)
    """
    count = 0
    while eta ** (count + 1) <= ratio * (1 + _ROUNDING):
        count += 1
    return count


def halving_bracket(eta: int, min_budget: float, max_budget: float, num_candidates: int) -> Bracket:
    """Lay out successive halving; each rung keeps one of eta candidates, rounded down, but at least one.

    A lone survivor goes straight to the full budget: shorter runs of it would decide nothing.

    Args:
      eta: the factor between the budgets of two rungs, >= 2.
      min_budget: the first rung has the least max_budget / eta^k that is not below it.
      max_budget: of the last rung, in the same unit.
      num_candidates: of the first rung, >= 1.

    Returns:
      (number of candidates, budget of each) of every rung.

    >>> halving_bracket(3, 1.0, 9.0, num_candidates=10), halving_bracket(3, 1.0, 9.0, num_candidates=4)
    ([(10, 1.0), (3, 3.0), (1, 9.0)], [(4, 1.0), (1, 9.0)])
    """
    steps = num_halvings(eta, max_budget / min_budget)
    rungs = [
        (max(1, num_candidates // eta**rung), max_budget / eta ** (steps - rung))
        for rung in range(steps + 1)
    ]
    return [(count, budget) for count, budget in rungs[:-1] if count > 1] + rungs[-1:]


def hyperband_brackets(eta: int, min_budget: float, max_budget: float) -> list[Bracket]:
    """Lay out Hyperband: brackets from many short runs to few long ones, each of about the same total cost.

    With s_max = floor(log_eta(max_budget / min_budget)), bracket s = s_max ... 0 begins with
    n_s = ceil((s_max + 1) / (s + 1) eta^s) candidates at max_budget / eta^s, and each rung keeps one of eta.

    Args:
      eta: the factor between the budgets of two rungs, >= 2.
      min_budget: no rung has less.
      max_budget: of the last rung of every bracket, in the same unit.

    Returns:
      The brackets, each with (number of candidates, budget of each) of every rung.

    References:
      Li et al., "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization", arXiv 1603.06560,
      Algorithm 1.

    >>> hyperband_brackets(3, 1.0, 9.0)
    [[(9, 1.0), (3, 3.0), (1, 9.0)], [(5, 3.0), (1, 9.0)], [(3, 9.0)]]
    """
    most = num_halvings(eta, max_budget / min_budget)
    starts = [
        (halvings, -(-(most + 1) * eta**halvings // (halvings + 1)))
        for halvings in range(most, -1, -1)
    ]
    return [
        halving_bracket(eta, max_budget / eta**halvings, max_budget, count)
        for halvings, count in starts
    ]


def successive_halving(config: SearchConfig) -> Rounds:
    """Run one bracket that begins with `num_candidates`.

    Args:
      config: the search.

    Returns:
      A round for each rung.
    """
    return _tournaments(
        config, [halving_bracket(config.eta, config.min_fidelity, 1.0, config.num_candidates)]
    )


def hyperband(config: SearchConfig) -> Rounds:
    """Run all brackets side by side.

    A round has every run of one length, whichever bracket it belongs to. So there is one wait per length, all runs
    between two waits end together and share a compiled program, and the longest chain of waits is 1 + 1/eta + 1/eta^2 +
    ... full runs; brackets in turn, or all first rungs together, would wait for a full run once per bracket.

    Args:
      config: the search.

    Returns:
      A round for each fidelity, from short to full.
    """
    return _tournaments(config, hyperband_brackets(config.eta, config.min_fidelity, 1.0))


def _tournaments(config: SearchConfig, brackets: Sequence[Bracket]) -> Rounds:
    """Play brackets that share no candidate; each is given its part of one Halton sequence."""
    fields = _deal(config, [bracket[0][0] for bracket in brackets])
    for fidelity in sorted({fidelity for bracket in brackets for _, fidelity in bracket}):
        playing = [
            index for index, bracket in enumerate(brackets) if fidelity in _fidelities(bracket)
        ]
        scores = iter(
            (
                yield tuple(
                    Proposal(factors, fidelity) for index in playing for factors in fields[index]
                )
            )
        )
        for index in playing:
            here = tuple(itertools.islice(scores, len(fields[index])))
            fields[index] = _best(fields[index], here, _kept(brackets[index], fidelity))


def _deal(config: SearchConfig, counts: Sequence[int]) -> list[tuple[Factors, ...]]:
    """Deal the candidates of one sequence out, so many to each."""
    candidates = iter(halton_candidates(make_space(config), sum(counts), config.seed))
    return [tuple(itertools.islice(candidates, count)) for count in counts]


def _fidelities(bracket: Bracket) -> list[float]:
    return [fidelity for _, fidelity in bracket]


def _kept(bracket: Bracket, fidelity: float) -> int:
    """Return how many stay after the rung of this fidelity: as many as the next one runs, none after the last."""
    following = _fidelities(bracket).index(fidelity) + 1
    return bracket[following][0] if following < len(bracket) else 0


def _best(
    candidates: Sequence[Factors], scores: Sequence[Score], count: int
) -> tuple[Factors, ...]:
    """Return the best candidates in the order of their proposal; of equal scores the earlier one is better."""
    ranked = sorted(range(len(candidates)), key=lambda index: scores[index])
    return tuple(candidates[index] for index in sorted(ranked[:count]))
