"""Candidates that do not wait for scores: drawn at random, or spread evenly."""

from __future__ import annotations

import numpy as np

from lbopt.config import SearchConfig
from lbopt.sweep.search._protocol import Factors, Proposal, Rounds
from lbopt.sweep.search._space import Space, make_space

_STREAM = 0x5EA2C4
"""The second word of the key, the epoch where data is shuffled: a search shares its numbers with no shuffle."""


def log_uniform(config: SearchConfig) -> Rounds:
    """Ask for the rule and for random candidates at full length, all at once.

    Args:
      config: the search.

    Returns:
      One round of `num_candidates`.
    """
    yield _whole(log_uniform_candidates(make_space(config), config.num_candidates, config.seed))


def halton(config: SearchConfig) -> Rounds:
    """Ask for the rule and for evenly spread candidates at full length, all at once.

    Args:
      config: the search.

    Returns:
      One round of `num_candidates`.
    """
    yield _whole(halton_candidates(make_space(config), config.num_candidates, config.seed))


def _whole(candidates: tuple[Factors, ...]) -> tuple[Proposal, ...]:
    return tuple(Proposal(factors, 1.0) for factors in candidates)


def log_uniform_candidates(space: Space, count: int, seed: int) -> tuple[Factors, ...]:
    """Return the rule and then independent draws; a larger count begins with the same ones.

    They are made from the raw words of a counter-based generator, which NumPy guarantees to stay as they are.

    Args:
      space: the ranges.
      count: how many, the rule among them, >= 1.
      seed: of the draws, >= 0.

    Returns:
      `count` candidates.
    """
    size = count - 1, len(space.searched)
    words = np.random.Philox(key=[seed, _STREAM]).random_raw(size)
    return space.rule, *map(space.at, (words >> np.uint64(11)) * 2.0**-53)


def halton_candidates(space: Space, count: int, seed: int) -> tuple[Factors, ...]:
    """Return the rule and then a scrambled Halton sequence; a larger count begins with the same ones.

    Only the factors that are searched take a dimension, so that a search over one of them has the even spread of one
    dimension.

    Note:
      SciPy draws the scrambling from a generator whose methods NumPy may change between versions: a search that was
      begun has to be resumed with the same ones.

    Args:
      space: the ranges.
      count: how many, the rule among them, >= 1.
      seed: of the scrambling, >= 0.

    Returns:
      `count` candidates.
    """
    from scipy.stats import qmc  # here, since it takes the better part of a second

    points = qmc.Halton(len(space.searched), scramble=True, rng=seed).random(count - 1)
    return space.rule, *map(space.at, points)
