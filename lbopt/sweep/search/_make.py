"""From the name of a method to a search."""

from __future__ import annotations

from collections.abc import Callable

from lbopt.config import SearchConfig
from lbopt.sweep.search._adaptive import adaptive
from lbopt.sweep.search._grid import grid
from lbopt.sweep.search._halving import hyperband, successive_halving
from lbopt.sweep.search._protocol import Rounds, Searcher, Turns
from lbopt.sweep.search._sampled import halton, log_uniform

_SPREAD = ("numpy", "scipy")
DRAWN_BY = {
    "halton": _SPREAD,
    "successive_halving": _SPREAD,
    "hyperband": _SPREAD,
    "optuna": ("numpy", "optuna"),
}
"""The packages whose versions decide which candidates a method asks for; those of the others are the same with all."""

_METHODS: dict[str, Callable[[SearchConfig], Rounds]] = {
    "grid": grid,
    "log_uniform": log_uniform,
    "halton": halton,
    "successive_halving": successive_halving,
    "hyperband": hyperband,
    "optuna": adaptive,
}


def make_searcher(config: SearchConfig) -> Searcher:
    """Return a search at its beginning.

    Args:
      config: a valid search.

    Returns:
      What to ask and tell in turns; the same from the same config and scores.

    Raises:
      EnvironmentProblem: if the method needs a package that is not installed.

    >>> search = make_searcher(SearchConfig(learning_rate_factors=(0.5, 1.0)))
    >>> [proposal.factors.learning_rate for proposal in search.ask()]
    [0.5, 1.0]
    """
    return Turns(_METHODS[config.method](config))
