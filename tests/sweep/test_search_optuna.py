"""Search by Optuna: pruning, learning, and its limits."""

import itertools
import math
import sys
import types

import numpy as np
import pytest
from refusal import troubled

from lbopt.config import SearchConfig
from lbopt.sweep import _drive
from lbopt.sweep.search import Factors, Proposal, Score, _adaptive, make_searcher

# A study's scores of a candidate that diverged, on images and on text.
DIVERGED = {"diverged": True, "validation_loss": None, "validation_accuracy": None}
LOST_KINDS = {
    "images": _drive.score([DIVERGED]),
    "text": _drive.score([{**DIVERGED, "validation_perplexity": None}]),
}
PRUNERS = ("median", "successive_halving", "hyperband")


def fine(value):
    return Score(float(value), 0.0)


def bowl(proposal):
    """Return a score that is best at 3 times the rule's learning rate."""
    return fine(math.log(proposal.factors.learning_rate / 3) ** 2)


def asked_of(config, objective):
    search = make_searcher(config)
    rounds = []
    while asked := search.ask():
        rounds.append(asked)
        search.tell([objective(one) for one in asked])
    return rounds


def test_without_a_pruner_every_candidate_is_run_once_at_full_length():
    rounds = asked_of(SearchConfig("optuna", num_candidates=10, candidates_at_once=4), bowl)
    assert [len(asked) for asked in rounds] == [4, 4, 2]
    proposals = [one for asked in rounds for one in asked]
    assert {one.fidelity for one in proposals} == {1.0}
    assert len({one.factors for one in proposals}) == 10


def test_three_factors_are_searched_in_their_ranges():
    ranges = {
        "learning_rate_range": (0.5, 2.0),
        "warmup_range": (2.0, 4.0),
        "weight_decay_range": (0.0, 0.0),
    }
    rounds = asked_of(SearchConfig("optuna", **ranges, widen_candidates=0), bowl)
    assert rounds[0][0].factors == Factors(1.0, 2.0, 0.0)
    for one in (one.factors for asked in rounds for one in asked):
        assert 0.5 <= one.learning_rate <= 2.0
        assert 2.0 <= one.warmup <= 4.0
        assert one.weight_decay == 0.0


def test_tpe_learns_where_random_draws_do_not():
    """The measure is the mean log distance of the last 8 of 32 candidates from the optimum."""

    def distance(sampler):
        last = [
            asked_of(SearchConfig("optuna", sampler=sampler, num_candidates=32, seed=seed), bowl)[
                -2:
            ]
            for seed in range(3)
        ]
        rates = [one.factors.learning_rate for rounds in last for asked in rounds for one in asked]
        return np.mean(np.abs(np.log(np.array(rates) / 3)))

    assert distance("tpe") < 0.5 * distance("random")


@pytest.mark.parametrize("seed", range(3))
def test_tpe_stays_away_from_where_runs_diverge(seed):
    """Of the last 12 candidates one or two diverge; reported as failures, 8 to 12 would."""

    def cliff(proposal):
        rate = proposal.factors.learning_rate
        return LOST_KINDS["images"] if rate > 1.5 else fine(math.log(rate / 0.5) ** 2)

    last = asked_of(SearchConfig("optuna", num_candidates=32, seed=seed), cliff)[-3:]
    assert sum(cliff(one) == LOST_KINDS["images"] for asked in last for one in asked) <= 3


@pytest.mark.parametrize("pruner", PRUNERS)
def test_a_generation_climbs_the_rungs_together(pruner):
    rounds = asked_of(SearchConfig("optuna", pruner=pruner, min_fidelity=1 / 9), bowl)
    lengths = [{one.fidelity for one in asked} for asked in rounds]
    assert all(len(length) == 1 for length in lengths)
    assert lengths[:3] == [{1 / 9}, {1 / 3}, {1.0}]
    for before, after in itertools.pairwise(rounds):
        if after[0].fidelity > before[0].fidelity:
            assert {one.factors for one in after} <= {one.factors for one in before}
        else:
            assert after[0].fidelity == 1 / 9


def test_halving_compares_a_generation_with_its_best():
    """Optuna lets the best so far pass: in this order of scores, all four would."""
    search = make_searcher(SearchConfig("optuna", pruner="successive_halving", sampler="random"))
    first = search.ask()
    search.tell([fine(value) for value in (4, 3, 2, 1)])
    assert [one.factors for one in search.ask()] == [first[3].factors]


def test_the_median_of_complete_runs_prunes():
    config = SearchConfig(
        "optuna", pruner="median", num_candidates=8, candidates_at_once=2, min_fidelity=1 / 3
    )
    search = make_searcher(config)
    search.ask()
    search.tell([fine(1), fine(3)])
    assert [one.fidelity for one in search.ask()] == [1.0, 1.0]
    search.tell([fine(1), fine(3)])
    second = search.ask()
    search.tell([fine(2.5), fine(1.5)])
    assert search.ask() == (Proposal(second[1].factors, 1.0),)


@pytest.fixture(params=LOST_KINDS)
def lost(request):
    return LOST_KINDS[request.param]


@pytest.mark.parametrize("pruner", PRUNERS)
def test_a_diverged_candidate_goes_no_further(pruner, lost):
    search = make_searcher(SearchConfig("optuna", pruner=pruner))
    first = search.ask()
    search.tell([lost, lost, fine(0.2), lost])
    second = search.ask()
    assert [one.factors for one in second] == [first[2].factors]
    search.tell([lost])
    assert search.ask()[0].fidelity == 1 / 27


@pytest.mark.parametrize("pruner", PRUNERS)
def test_if_all_runs_diverge_the_rule_is_run_at_full_length(pruner, lost):
    rounds = asked_of(SearchConfig("optuna", pruner=pruner, num_candidates=10), lambda one: lost)
    assert [asked[0].fidelity for asked in rounds] == [1 / 27, 1 / 27, 1 / 27, 1.0]
    assert rounds[-1] == (Proposal(Factors(1.0, 1.0, 1.0), 1.0),)


@pytest.mark.parametrize("eta", range(2, 12))
def test_optunas_hyperband_gets_a_bracket_for_every_rung(eta):
    """Optuna takes floor(log_eta(max / min)) + 1 in floating point, where log_3(3^5) < 5."""
    kinds = types.SimpleNamespace(pruners=types.SimpleNamespace(HyperbandPruner=dict))
    for steps in range(1, 12):
        made = _adaptive._make_pruner(
            SearchConfig("optuna", pruner="hyperband", eta=eta), steps, kinds
        )
        assert math.floor(math.log(made["max_resource"] / made["min_resource"], eta)) == steps
        assert made["reduction_factor"] == eta


def test_a_search_says_nothing(capfd, caplog):
    asked_of(SearchConfig("optuna", pruner="hyperband"), bowl)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with troubled("method", "optuna", "installation"):
        make_searcher(SearchConfig("optuna"))
