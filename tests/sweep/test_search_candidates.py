"""Grids and samples: the candidates that depend on no score."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from lbopt.config import SearchConfig
from lbopt.sweep.search import Factors, make_searcher
from lbopt.sweep.search._sampled import halton_candidates, log_uniform_candidates
from lbopt.sweep.search._space import Range, Space

WIDE = Space([(0.1, 10.0), (0.25, 4.0), (1.0, 1.0)])
SPREAD = {"log_uniform": log_uniform_candidates, "halton": halton_candidates}


def parts(candidates, name="learning_rate", low=0.1, high=10.0):
    """Return the relative positions of candidates between the ends, in logarithms."""
    values = np.log([getattr(one, name) for one in candidates[1:]])
    return (values - math.log(low)) / (math.log(high) - math.log(low))


def test_a_grid_is_the_whole_product_with_the_learning_rate_slowest():
    lists = {
        "learning_rate_factors": (0.5, 1.0),
        "warmup_factors": (0.0, 2.0),
        "weight_decay_factors": (0.0, 1.0, 3.0),
    }
    proposals = make_searcher(SearchConfig(**lists)).ask()
    expected = [
        (rate, warmup, decay)
        for rate in (0.5, 1.0)
        for warmup in (0.0, 2.0)
        for decay in (0.0, 1.0, 3.0)
    ]
    assert [tuple(one.factors) for one in proposals] == expected
    assert {one.fidelity for one in proposals} == {1.0}


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    strategies.tuples(strategies.floats(1e-6, 1e6), strategies.floats(1.0, 1e6)),
    strategies.floats(0.0, 1.0, exclude_max=True),
)
def test_no_draw_leaves_its_range(ends, part):
    low = ends[0]
    high = ends[0] * ends[1]
    assert low <= Range(low, high).at(part) <= high


def test_the_rule_is_moved_into_the_ranges():
    assert Space([(0.1, 10.0), (2.0, 4.0), (0.0, 0.0)]).rule == Factors(1.0, 2.0, 0.0)
    assert Space([(0.1, 0.5), (1.0, 1.0), (1.0, 1.0)]).rule == Factors(0.5, 1.0, 1.0)


@pytest.mark.parametrize("make", SPREAD.values(), ids=SPREAD)
def test_the_rule_comes_first_and_the_count_is_the_whole(make):
    for count in (1, 2, 16):
        candidates = make(WIDE, count, 0)
        assert len(candidates) == count == len(set(candidates))
        assert candidates[0] == WIDE.rule


@pytest.mark.parametrize("make", SPREAD.values(), ids=SPREAD)
def test_more_candidates_begin_with_the_same_ones(make):
    assert make(WIDE, 40, 3)[:10] == make(WIDE, 10, 3)


@pytest.mark.parametrize("make", SPREAD.values(), ids=SPREAD)
def test_seeds_draw_different_candidates(make):
    assert not set(make(WIDE, 10, 0)[1:]) & set(make(WIDE, 10, 1)[1:])


@pytest.mark.parametrize("make", SPREAD.values(), ids=SPREAD)
def test_what_has_equal_ends_is_not_searched(make):
    candidates = make(Space([(0.1, 10.0), (2.0, 2.0), (0.0, 0.0)]), 8, 0)
    assert {(one.warmup, one.weight_decay) for one in candidates} == {(2.0, 0.0)}
    assert len({one.learning_rate for one in candidates}) == 8


def test_random_draws_are_uniform_in_the_logarithm():
    """The mean of 1,000 has standard deviation 0.009; 0.04 is more than four of them."""
    drawn = parts(log_uniform_candidates(WIDE, 1001, 0))
    assert abs(drawn.mean() - 0.5) < 0.04
    assert abs(np.mean(drawn < 0.25) - 0.25) < 0.06


def test_random_draws_stay_the_same_between_versions():
    """The numbers are pinned; the tolerance allows for another mathematical library."""
    drawn = [
        one.learning_rate
        for one in log_uniform_candidates(Space([(0.1, 10.0), (1, 1), (1, 1)]), 4, 7)
    ]
    assert drawn == pytest.approx(
        [1.0, 2.2348260978576646, 2.0200726419763013, 0.785301082990012], rel=1e-14
    )


def test_a_halton_sequence_spreads_evenly():
    """With one searched factor, each of 32 equal slices of the range has one of 32 points."""
    alone = parts(halton_candidates(Space([(0.1, 10.0), (1.0, 1.0), (1.0, 1.0)]), 33, 5))
    assert sorted(np.floor(alone * 32 + 1e-9).astype(int)) == list(range(32))
    second = parts(halton_candidates(WIDE, 28, 5), "warmup", 0.25, 4.0)
    assert sorted(np.floor(second * 27 + 1e-9).astype(int)) == list(range(27))


@pytest.mark.parametrize("method", SPREAD)
def test_all_are_asked_for_at_once_at_full_length(method):
    search = make_searcher(SearchConfig(method, num_candidates=12, seed=4))
    proposals = search.ask()
    space = Space([(0.1, 10.0), (1.0, 1.0), (1.0, 1.0)])
    assert tuple(one.factors for one in proposals) == SPREAD[method](space, 12, 4)
    assert {one.fidelity for one in proposals} == {1.0}
