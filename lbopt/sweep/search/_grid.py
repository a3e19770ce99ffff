"""Grid search over the three lists of factors."""

from __future__ import annotations

import itertools

from lbopt.config import SearchConfig
from lbopt.sweep.search._searcher import Factors, Proposal, Rounds


def grid(config: SearchConfig) -> Rounds:
    """Ask for the whole grid at full length, in one round.

    The learning rate changes slowest and the weight decay fastest.

    Args:
      config: The config of the search.

    >>> from lbopt.config import SearchConfig
    >>> config = SearchConfig(learning_rate_factors=(1.0, 2.0), warmup_factors=(0.0, 1.0))
    >>> [tuple(one.factors) for one in next(grid(config))]
    [(1.0, 0.0, 1.0), (1.0, 1.0, 1.0), (2.0, 0.0, 1.0), (2.0, 1.0, 1.0)]
    """
    lists = config.learning_rate_factors, config.warmup_factors, config.weight_decay_factors
    yield tuple(
        Proposal(Factors(*map(float, factors)), 1.0) for factors in itertools.product(*lists)
    )
