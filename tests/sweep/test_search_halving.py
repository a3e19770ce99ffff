"""Rungs and brackets: the published example, and the candidates that remain."""

import itertools
import math

import pytest
from hypothesis import given, settings, strategies

from lbopt.config import SearchConfig
from lbopt.sweep.search import Score, make_searcher
from lbopt.sweep.search._halving import halving_bracket, hyperband_brackets, num_halvings


def counts(brackets):
    return [[count for count, _ in bracket] for bracket in brackets]


def fine(value, tie=0.0):
    return Score(float(value), tie)


def test_the_brackets_are_those_of_the_published_example():
    """SMAC's documentation has eta 3 and budgets 10 to 500; its sum leaves the candidates out."""
    brackets = hyperband_brackets(3, 10, 500)
    assert counts(brackets) == [[27, 9, 3, 1], [12, 4, 1], [6, 2], [4]]
    longest = [500 / 27, 500 / 9, 500 / 3, 500.0]
    assert [round(budget, 2) for budget in longest] == [18.52, 55.56, 166.67, 500.0]
    for bracket in brackets:
        assert [budget for _, budget in bracket] == longest[-len(bracket) :]
    assert sum(map(sum, counts(brackets))) == 69
    assert sum(bracket[0][0] for bracket in brackets) == 49
    assert round(sum(count * budget for bracket in brackets for count, budget in bracket)) == 7833


def test_the_default_fidelity_gives_the_same_brackets():
    config = SearchConfig("hyperband")
    brackets = hyperband_brackets(config.eta, config.min_fidelity, 1.0)
    assert counts(brackets) == counts(hyperband_brackets(3, 10, 500))
    assert [budget for _, budget in brackets[0]] == [1 / 27, 1 / 9, 1 / 3, 1.0]


@pytest.mark.parametrize("eta", range(2, 12))
def test_powers_of_eta_are_counted_exactly(eta):
    for power in range(16):
        assert num_halvings(eta, float(eta**power)) == power
        assert num_halvings(eta, 1 / (1 / eta**power)) == power
        assert num_halvings(eta, eta ** (power + 1) * 0.999) == power


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(strategies.integers(2, 6), strategies.floats(1e-3, 1.0))
def test_every_bracket_follows_the_algorithm(eta, shortest):
    brackets = hyperband_brackets(eta, shortest, 1.0)
    most = len(brackets) - 1
    assert eta**most <= 1 / shortest * (1 + 1e-8) < eta ** (most + 1) * (1 + 1e-7)
    for halvings, bracket in zip(range(most, -1, -1), brackets, strict=True):
        assert bracket[0] == (
            math.ceil((most + 1) * eta**halvings / (halvings + 1)),
            1 / eta**halvings,
        )
        assert len(bracket) == halvings + 1
        assert bracket[-1][1] == 1.0
        for (count, budget), (after, longer) in itertools.pairwise(bracket):
            assert after == count // eta >= 1
            assert longer == pytest.approx(budget * eta, rel=1e-12)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(strategies.integers(2, 6), strategies.floats(1e-3, 1.0), strategies.integers(1, 200))
def test_halving_ends_with_full_runs_and_wastes_none_on_a_lone_survivor(
    eta, shortest, num_candidates
):
    bracket = halving_bracket(eta, shortest, 1.0, num_candidates)
    assert bracket[-1][1] == 1.0
    assert all(count > 1 for count, _ in bracket[:-1])
    assert bracket[0][0] == num_candidates
    for (count, _), (after, _) in itertools.pairwise(bracket):
        assert after == max(1, count // eta)


def test_successive_halving_keeps_the_best_of_each_rung():
    search = make_searcher(SearchConfig("successive_halving", num_candidates=9, min_fidelity=1 / 9))
    first = search.ask()
    assert [one.fidelity for one in first] == [1 / 9] * 9
    search.tell([fine(value) for value in (5, 1, 9, 8, 2, 7, 6, 3, 4)])
    second = search.ask()
    assert [one.factors for one in second] == [first[place].factors for place in (1, 4, 7)]
    assert {one.fidelity for one in second} == {1 / 3}
    search.tell([fine(3), fine(1), fine(2)])
    third = search.ask()
    assert [tuple(one) for one in third] == [(first[4].factors, 1.0)]
    search.tell([fine(1)])
    assert search.ask() == ()


def survivors(scores, **fields):
    """Return the places of the survivors of the first rung of nine."""
    search = make_searcher(
        SearchConfig("successive_halving", num_candidates=9, min_fidelity=1 / 9, **fields)
    )
    asked = [one.factors for one in search.ask()]
    search.tell(scores)
    return [asked.index(one.factors) for one in search.ask()]


def test_of_equal_scores_the_earlier_proposal_stays():
    assert survivors([fine(1)] * 9) == [0, 1, 2]
    assert survivors([fine(2), *[fine(1)] * 8]) == [1, 2, 3]


def test_the_second_number_decides_between_equal_first_ones():
    assert survivors([fine(1, 9 - place) for place in range(9)]) == [6, 7, 8]
    assert survivors([fine(2, 0), *[fine(1, 5)] * 8]) == [1, 2, 3]


def test_a_diverged_candidate_never_beats_another():
    lost = Score(math.inf, 0.0)
    assert survivors([lost, lost, *[fine(1e300, 1e300)] * 3, *[lost] * 4]) == [2, 3, 4]
    assert survivors([*[lost] * 8, fine(7)]) == [0, 1, 8]


def test_hyperband_asks_for_all_runs_of_one_length_at_once():
    """Four waits, each for runs of one length: 27, 9 + 12, 3 + 4 + 6 and 1 + 1 + 2 + 4 of them."""
    search = make_searcher(SearchConfig("hyperband", widen_candidates=0))
    rounds = []
    while asked := search.ask():
        rounds.append(asked)
        search.tell([fine(one.factors.learning_rate) for one in asked])
    assert [len(asked) for asked in rounds] == [27, 21, 13, 8]
    assert [{one.fidelity for one in asked} for asked in rounds] == [
        {1 / 27},
        {1 / 9},
        {1 / 3},
        {1.0},
    ]


def test_brackets_share_no_candidate_and_judge_their_own():
    search = make_searcher(SearchConfig("hyperband", min_fidelity=1 / 9))
    long = [one.factors for one in search.ask()]
    assert len(long) == 9
    search.tell([fine(place) for place in range(9)])
    second = [one.factors for one in search.ask()]
    assert second[:3] == long[:3]
    assert not set(second[3:]) & set(long)
    assert len(second) == 3 + 5
    search.tell([fine(value) for value in (9, 8, 7, 1, 2, 3, 4, 0)])
    third = [one.factors for one in search.ask()]
    assert third[:2] == [second[2], second[7]]
    assert not set(third[2:]) & {*long, *second}
    assert len(third) == 1 + 1 + 3
