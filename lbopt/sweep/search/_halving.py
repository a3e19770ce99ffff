"""Successive halving and Hyperband: many short runs, and longer ones for the best of them.

A rung is ranked once all its runs have ended, in whatever order; Optuna's pruners compare a run
with those that have reported before it. Candidates are SciPy's Halton sequence, from which Optuna's
QMC sampler takes them too, but need no Optuna, an optional extra, and no study that counts them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

from lbopt.config import SearchConfig
from lbopt.sweep.search._sampled import halton_candidates
from lbopt.sweep.search._searcher import Factors, Proposal, Rounds, Score
from lbopt.sweep.search._space import make_space

Bracket: TypeAlias = list[tuple[int, float]]
"""The rungs of a bracket: number of candidates, and budget of each."""
_ROUNDING = 1e-9
"""Tolerance of a ratio: 1 / (1 / 27) may be a little below 27 in floating point."""


def num_halvings(eta: int, ratio: float) -> int:
    """Return floor(log_eta(ratio)), the number of times that a budget can be divided by eta.

    It is found by multiplying: the floor of a computed logarithm is off by one at powers of eta.

    Args:
      eta: Factor between two budgets, >= 2.
      ratio: Largest budget divided by the smallest one, >= 1.

    >>> num_halvings(3, 27.0), num_halvings(3, 1 / (1 / 243)), num_halvings(3, 26.9)
    (3, 5, 2)
    >>> num_halvings(10, 1000.0)
    3
    """
    count = 0
    while eta ** (count + 1) <= ratio * (1 + _ROUNDING):
        count += 1
    return count


def halving_bracket(eta: int, min_budget: float, max_budget: float, num_candidates: int) -> Bracket:
    """Return the rungs of successive halving; each keeps 1 / eta of the candidates, at least one.

    A lone survivor goes straight to the full budget: shorter runs of it would decide nothing.

    Args:
      eta: Factor between the budgets of two rungs, >= 2.
      min_budget: Smallest budget; the first rung has the smallest max_budget / eta^k that is not
        below it.
      max_budget: Budget of the last rung, in the same unit.
      num_candidates: Number of candidates in the first rung, >= 1.

    >>> halving_bracket(3, 1.0, 9.0, num_candidates=10)
    [(10, 1.0), (3, 3.0), (1, 9.0)]
    >>> halving_bracket(3, 1.0, 9.0, num_candidates=4)
    [(4, 1.0), (1, 9.0)]
    """
    steps = num_halvings(eta, max_budget / min_budget)
    rungs = [
        (max(1, num_candidates // eta**rung), max_budget / eta ** (steps - rung))
        for rung in range(steps + 1)
    ]
    return [(count, budget) for count, budget in rungs[:-1] if count > 1] + rungs[-1:]


def hyperband_brackets(eta: int, min_budget: float, max_budget: float) -> list[Bracket]:
    """Return the brackets of Hyperband, from many short runs to few long ones.

    With s_max = floor(log_eta(max_budget / min_budget)), bracket s = s_max ... 0 begins with
    n_s = ceil((s_max + 1) / (s + 1) eta^s) candidates at max_budget / eta^s, and each rung keeps
    1 / eta of them. All brackets cost about the same.

    Args:
      eta: Factor between the budgets of two rungs, >= 2.
      min_budget: Smallest budget of a rung.
      max_budget: Budget of the last rung of every bracket, in the same unit.

    References:
      Li et al., "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization", arXiv
      1603.06560v4, Algorithm 1.

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
    """Ask for the trials of one bracket that begins with `num_candidates`, a rung in each round.

    Args:
      config: The config of the search.
    """
    bracket = halving_bracket(config.eta, config.min_fidelity, 1.0, config.num_candidates)
    return _run_brackets(config, [bracket])


def hyperband(config: SearchConfig) -> Rounds:
    """Ask for the trials of all brackets side by side, a round for each fidelity.

    A round has every run of one length, from all brackets. So all runs of a round end together and
    share a compiled program, and the rounds take as long as 1 + 1/eta + 1/eta^2 + ... full runs.
    Brackets in turn, or all first rungs together, would wait for a full run once per bracket.

    Args:
      config: The config of the search.
    """
    return _run_brackets(config, hyperband_brackets(config.eta, config.min_fidelity, 1.0))


def _run_brackets(config: SearchConfig, brackets: Sequence[Bracket]) -> Rounds:
    """Ask for the trials of brackets that share no candidate, a round for each fidelity."""
    remaining = _deal(config, [bracket[0][0] for bracket in brackets])
    for fidelity in sorted({fidelity for bracket in brackets for _, fidelity in bracket}):
        running = [
            index for index, bracket in enumerate(brackets) if fidelity in _fidelities(bracket)
        ]
        told = yield tuple(
            Proposal(factors, fidelity) for index in running for factors in remaining[index]
        )

        scores = iter(told)
        for index in running:
            of_bracket = tuple(itertools.islice(scores, len(remaining[index])))
            kept = _kept(brackets[index], fidelity)
            remaining[index] = _best(remaining[index], of_bracket, kept)


def _deal(config: SearchConfig, counts: Sequence[int]) -> list[tuple[Factors, ...]]:
    """Return the candidates of several brackets, consecutive stretches of one Halton sequence."""
    candidates = iter(halton_candidates(make_space(config), sum(counts), config.seed))
    return [tuple(itertools.islice(candidates, count)) for count in counts]


def _fidelities(bracket: Bracket) -> list[float]:
    return [fidelity for _, fidelity in bracket]


def _kept(bracket: Bracket, fidelity: float) -> int:
    """Return the number of candidates in the rung after this fidelity; 0 after the last rung."""
    following = _fidelities(bracket).index(fidelity) + 1
    return bracket[following][0] if following < len(bracket) else 0


def _best(
    candidates: Sequence[Factors], scores: Sequence[Score], count: int
) -> tuple[Factors, ...]:
    """Return the best candidates in the order of their proposal; ties go to the earlier one."""
    ranked = sorted(range(len(candidates)), key=lambda index: scores[index][:2])
    return tuple(candidates[index] for index in sorted(ranked[:count]))
