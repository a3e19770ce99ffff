"""The cost of a search, before anything is run."""

from __future__ import annotations

from typing import NamedTuple

from lbopt.config import SearchConfig
from lbopt.sweep.search._methods import within_edges
from lbopt.sweep.search._searcher import Score, Turns
from lbopt.sweep.search._widened import can_widen


class SearchCost(NamedTuple):
    """The cost of the search of one cell.

    Attributes:
      trials: Number of runs, short and long, of every candidate with every search seed.
      full_runs: Sum of their lengths, in runs of the full length.
      at_once: Largest number of trials that can run at the same time.
      extra: Largest number of further runs, all of full length, beyond the edges of the search.
    """

    trials: int
    full_runs: float
    at_once: int
    extra: int = 0


def search_cost(config: SearchConfig) -> SearchCost:
    """Count the trials of a search whose candidates are all equally good.

    A method that prunes runs more or fewer trials, depending on the scores. So does the search
    beyond the edges: `extra` has its budget.

    Args:
      config: A validated config.

    Returns:
      The cost for one cell, without its final trials.

    Raises:
      EnvironmentProblem: If the method needs a package that is not installed.

    >>> search_cost(SearchConfig("successive_halving", num_candidates=9, min_fidelity=1 / 9))
    SearchCost(trials=13, full_runs=3.0, at_once=9, extra=4)
    """
    searcher = Turns(within_edges(config))
    trials = 0
    full_runs = 0.0
    at_once = 0
    while proposals := searcher.ask():
        trials += len(proposals) * len(config.seeds)
        at_once = max(at_once, len(proposals) * len(config.seeds))
        full_runs += sum(proposal.fidelity for proposal in proposals) * len(config.seeds)
        searcher.tell([Score(0.5, 0.5)] * len(proposals))
    extra = config.widen_candidates * len(config.seeds) if can_widen(config) else 0
    return SearchCost(trials, round(full_runs, 6), at_once, extra)
