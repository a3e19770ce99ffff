"""Candidates that do not depend on scores: random ones, or a low-discrepancy sequence."""

from __future__ import annotations

import numpy as np

from lbopt.config import SearchConfig
from lbopt.sweep.search._searcher import Factors, Proposal, Rounds
from lbopt.sweep.search._space import Space, make_space

_STREAM = 0x5EA2C4
"""Second word of the generator's key; a shuffle has the epoch there, and so other numbers."""


def log_uniform(config: SearchConfig) -> Rounds:
    """Ask for the rule and for random candidates at full length, in one round.

    Args:
      config: The config of the search.
    """
    yield _at_full_length(
        log_uniform_candidates(make_space(config), config.num_candidates, config.seed)
    )


def halton(config: SearchConfig) -> Rounds:
    """Ask for the rule and for points of a Halton sequence at full length, in one round.

    Args:
      config: The config of the search.
    """
    yield _at_full_length(halton_candidates(make_space(config), config.num_candidates, config.seed))


def _at_full_length(candidates: tuple[Factors, ...]) -> tuple[Proposal, ...]:
    return tuple(Proposal(factors, 1.0) for factors in candidates)


def log_uniform_candidates(space: Space, count: int, seed: int) -> tuple[Factors, ...]:
    """Return the rule, and then independent random candidates.

    They are made from the raw words of a counter-based generator, which are the same in every
    version of NumPy. A larger count begins with the same candidates.

    Args:
      space: The ranges of the factors.
      count: Number of candidates, the rule included, >= 1.
      seed: Seed of the generator, >= 0.
    """
    size = (count - 1, len(space.searched))
    words = np.random.Philox(key=[seed, _STREAM]).random_raw(size)
    return space.rule, *map(space.at, (words >> np.uint64(11)) * 2.0**-53)


def halton_candidates(space: Space, count: int, seed: int) -> tuple[Factors, ...]:
    """Return the rule, and then a scrambled Halton sequence.

    Only the searched factors take a dimension, so a search over one of them has the even spread of
    one dimension. A larger count begins with the same candidates.

    Note:
      SciPy takes the scrambling from a generator whose methods NumPy may change between versions: a
      search must be resumed with the versions that it began with.

    Args:
      space: The ranges of the factors.
      count: Number of candidates, the rule included, >= 1.
      seed: Seed of the scrambling, >= 0.
    """
    from scipy.stats import qmc  # its import takes most of a second

    points = qmc.Halton(len(space.searched), scramble=True, rng=seed).random(count - 1)
    return space.rule, *map(space.at, points)
