"""Search methods by name.

Only the method "optuna" uses Optuna, an optional extra; its samplers and pruners replay from the
same scores. Its `QMCSampler` takes the same Halton sequence from SciPy as `halton` does. Its
pruners decide trial by trial as scores come in; successive halving and Hyperband here score a whole
rung first, as in Hyperband's Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lbopt.config import SearchConfig
from lbopt.sweep.search._adaptive import adaptive
from lbopt.sweep.search._grid import grid
from lbopt.sweep.search._halving import hyperband, successive_halving
from lbopt.sweep.search._sampled import halton, log_uniform
from lbopt.sweep.search._searcher import Rounds, Searcher, Turns
from lbopt.sweep.search._widened import widened

_SPREAD = ("numpy", "scipy")
DRAWN_BY = {
    "halton": _SPREAD,
    "successive_halving": _SPREAD,
    "hyperband": _SPREAD,
    "optuna": ("numpy", "optuna"),
}
"""Packages whose versions decide the candidates of a method; other methods depend on none."""

_METHODS: dict[str, Callable[[SearchConfig], Rounds]] = {
    "grid": grid,
    "log_uniform": log_uniform,
    "halton": halton,
    "successive_halving": successive_halving,
    "hyperband": hyperband,
    "optuna": adaptive,
}


def make_searcher(config: SearchConfig, longest_warmup: float = math.inf) -> Searcher:
    """Return a new search.

    Args:
      config: A validated config.
      longest_warmup: Largest factor of the warmup that fits into the run; the search is not
        extended beyond it.

    Returns:
      A searcher, to ask and tell in turns. The same config and scores give the same candidates.

    Raises:
      EnvironmentProblem: If the method needs a package that is not installed.

    >>> search = make_searcher(SearchConfig(learning_rate_factors=(0.5, 1.0)))
    >>> [proposal.factors.learning_rate for proposal in search.ask()]
    [0.5, 1.0]
    """
    return Turns(widened(within_edges(config), config, longest_warmup))


def within_edges(config: SearchConfig) -> Rounds:
    """Return the rounds of a search itself, without what lies beyond its edges."""
    return _METHODS[config.method](config)
