"""What a search costs, before anything is run."""

from __future__ import annotations

from typing import NamedTuple

from lbopt.config import SearchConfig
from lbopt.sweep.search._make import make_searcher
from lbopt.sweep.search._protocol import Score


class SearchCost(NamedTuple):
    """What one cell's search takes.

    Attributes:
      trials: runs, short and long, of every candidate with every search seed.
      full_runs: their lengths added up, in runs of the whole length.
      at_once: the most trials that are asked for at a time.
    """

    trials: int
    full_runs: float
    at_once: int


def search_cost(config: SearchConfig) -> SearchCost:
    """Count what a search asks for if all candidates are equally good; what is pruned depends on how they do.

    Args:
      config: a valid search.

    Returns:
      Trials and full runs of one cell, without its final trials.

    Raises:
      EnvironmentProblem: if the method needs a package that is not installed.

    >>> search_cost(SearchConfig("successive_halving", num_candidates=9, min_fidelity=1 / 9))
    SearchCost(trials=13, full_runs=3.0, at_once=9)
    """
    searcher, trials, full_runs, at_once = make_searcher(config), 0, 0.0, 0
    while proposals := searcher.ask():
        trials += len(proposals) * len(config.seeds)
        at_once = max(at_once, len(proposals) * len(config.seeds))
        full_runs += sum(proposal.fidelity for proposal in proposals) * len(config.seeds)
        searcher.tell([Score(0.5, 0.5)] * len(proposals))
    return SearchCost(trials, round(full_runs, 6), at_once)
