"""Calls to ask and tell alternate, and a caller's mistake raises an error."""

import math
import subprocess
import sys

import pytest
from refusal import raised

from lbopt.config import SearchConfig
from lbopt.sweep.search import Score, make_searcher

FINE = Score(1.0, 0.0)


@pytest.fixture
def search():
    return make_searcher(SearchConfig(learning_rate_factors=(0.5, 1.0), widen_candidates=0))


def test_asking_again_before_telling_is_refused(search):
    search.ask()
    with raised(RuntimeError, numbers=[2]):  # the proposals whose scores are not told
        search.ask()


def test_telling_without_asking_is_refused(search):
    with raised(RuntimeError, numbers=[]):
        search.tell([FINE, FINE])


def test_telling_twice_is_refused(search):
    search.ask()
    search.tell([FINE, FINE])
    with raised(RuntimeError, numbers=[]):
        search.tell([FINE, FINE])


def test_as_many_scores_as_proposals_are_told(search):
    search.ask()
    with raised(ValueError, numbers=[1, 2]):
        search.tell([FINE])


@pytest.mark.parametrize("bad", [Score(math.nan, 0.0), Score(math.inf, math.nan)])
def test_a_score_that_cannot_be_compared_is_refused(search, bad):
    search.ask()
    with raised(ValueError, numbers=[], names={"number"}):
        search.tell([FINE, bad])


def test_a_refused_telling_can_be_repeated_rightly(search):
    search.ask()
    with raised(ValueError, numbers=[1, 2]):
        search.tell([FINE])
    search.tell([FINE, FINE])
    assert search.ask() == ()


def test_a_search_that_is_over_stays_over(search):
    search.ask()
    search.tell([FINE, FINE])
    assert search.ask() == ()
    assert search.ask() == ()


@pytest.mark.process
def test_libraries_wait_until_a_method_needs_them():
    program = (
        "import sys, lbopt.sweep.search; "
        "print(sorted({'optuna', 'scipy.stats'} & set(sys.modules)))"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert said.stdout == "[]\n"
