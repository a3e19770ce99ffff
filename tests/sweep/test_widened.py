"""A best candidate at an edge of a search is followed beyond it, within the budget of its cell."""

import json
import math

import pytest
from tiny_study import make_config

from lbopt.config import SearchConfig
from lbopt.sweep import _drive, _runner, _trials
from lbopt.sweep.search import Factors, Score, can_widen, make_searcher, search_cost

RATES = (0.5, 1.0, 2.0)


def widened(search, score, longest_warmup=math.inf):
    """Return the factors of each round after the search itself; `score` is a function of factors.

    The search is built anew, and told the same scores, before every round.
    """
    own = len(every_round(SearchConfig(**{**search, "widen_candidates": 0}), score, longest_warmup))
    return every_round(SearchConfig(**search), score, longest_warmup)[own:]


def every_round(config, score, longest_warmup=math.inf):
    told = []
    while True:
        searcher = make_searcher(config, longest_warmup)
        for asked, scores in told:
            assert searcher.ask() == asked
            searcher.tell(scores)
        asked = searcher.ask()
        if not asked:
            return [[one.factors for one in asked] for asked, _ in told]
        found = [score(one.factors) if one.fidelity == 1 else Score(0.5, 0.5) for one in asked]
        told.append((asked, [one if isinstance(one, Score) else Score(one, one) for one in found]))


def rates(rounds):
    return [one.learning_rate for asked in rounds for one in asked]


def nearest_to(best):
    return lambda factors: abs(math.log(factors.learning_rate / best))


@pytest.mark.parametrize(
    ("best", "wanted"),
    [
        (1.0, []),
        (2.1, [4.0]),  # 4 is worse, so 2 is interior
        (8.0, [4.0, 8.0, 16.0]),
        (0.2, [0.25, 0.125]),
        (1000.0, [4.0, 8.0, 16.0, 32.0]),  # the budget ends at the edge
    ],
)
def test_a_grid_goes_on_by_its_own_step_until_the_best_is_interior(best, wanted):
    assert rates(widened({"learning_rate_factors": RATES}, nearest_to(best))) == wanted


def test_the_step_is_that_of_the_end_where_the_best_lies():
    uneven = {"learning_rate_factors": (0.125, 0.5, 1.0, 2.0), "widen_candidates": 2}
    assert rates(widened(uneven, nearest_to(0.01))) == [0.125 / 4, 0.125 / 16]


def test_a_range_goes_on_by_tenths_from_its_outer_tenth():
    search = {"method": "log_uniform", "learning_rate_range": (0.01, 100.0), "num_candidates": 40}
    found = rates(widened(search, nearest_to(300.0)))
    step = 10**0.4
    assert found == pytest.approx([100 * step, 100 * step**2])  # 251, and 631 that is worse
    assert widened(search, nearest_to(20.0)) == []


def test_a_worse_candidate_beyond_the_best_one_makes_it_interior():
    """Also where both lie in the outer tenth of the range, which is the edge of the last one."""
    search = {"method": "log_uniform", "learning_rate_range": (0.01, 100.0), "num_candidates": 40}
    own = every_round(SearchConfig(**search, widen_candidates=0), nearest_to(1.0))
    *_, before, last = sorted(rates(own))
    assert before > 100 / 10**0.4
    assert widened(search, nearest_to(before)) == []
    assert rates(widened(search, nearest_to(last))) == pytest.approx([100 * 10**0.4])


def test_what_diverges_beyond_an_edge_ends_the_search_there():
    def diverges(factors):
        return Score(math.inf, math.inf) if factors.learning_rate > 2 else -factors.learning_rate

    assert rates(widened({"learning_rate_factors": RATES}, diverges)) == [4.0]


def test_if_all_diverged_smaller_rates_are_tried_and_no_other_factor():
    search = {"learning_rate_factors": RATES, "warmup_factors": (0.5, 1.0)}
    rounds = widened(search, lambda factors: Score(1.0, math.inf))  # accuracy 0, loss not finite
    assert rounds == [[Factors(0.5 / 2**step, 0.5, 1.0)] for step in range(1, 5)]


def test_where_nothing_learned_the_loss_is_followed_and_not_chance():
    def score(factors):
        """Accuracy by chance, best in the middle, at all rates that are too large."""
        rate = factors.learning_rate
        return Score(-rate, rate) if rate < 0.2 else Score(0.9 - 0.1 * (rate == 1.0), rate, False)

    assert rates(widened({"learning_rate_factors": RATES}, score)) == [0.25, 0.125, 0.0625]

    def too_small(factors):
        return Score(0.9 - 0.1 * (factors.learning_rate == 1.0), -factors.learning_rate, False)

    assert rates(widened({"learning_rate_factors": RATES}, too_small)) == [4.0, 8.0, 16.0, 32.0]

    def dead(factors):
        """All rates are far too large, and an interior one has the smallest loss by chance."""
        rate = factors.learning_rate
        return Score(-rate, rate) if rate < 0.1 else Score(0.9, abs(math.log(rate)), False)

    assert rates(widened({"learning_rate_factors": RATES}, dead)) == [0.25, 0.125, 0.0625, 0.03125]


@pytest.mark.parametrize(("most", "wanted"), [(0.6, [0.417]), (1.0, [])])
def test_where_few_rates_learned_a_smaller_one_is_tried(most, wanted):
    """The rate 0.5 is no better than 0.6; of ten, two or three learned."""

    def score(factors):
        value = abs(factors.learning_rate - 0.6)
        return Score(value, value, factors.learning_rate <= most)

    grid = (0.5, 0.6, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
    tried = rates(widened({"learning_rate_factors": grid}, score))
    assert tried == pytest.approx(wanted, abs=1e-3)


def test_equal_scores_go_to_the_smallest_factors_as_in_the_choice():
    assert rates(widened({"learning_rate_factors": RATES}, lambda factors: 0.0)) == [
        0.25,
        0.125,
        0.0625,
        0.03125,
    ]


def test_each_factor_at_an_edge_moves_on_alone_and_they_share_a_round():
    search = {
        "learning_rate_factors": RATES,
        "warmup_factors": (0.0, 1.0),
        "weight_decay_factors": (1.0, 3.0),
        "widen_candidates": 4,
    }

    def score(factors):
        return nearest_to(2.0)(factors) - factors.warmup - factors.weight_decay

    rounds = widened(search, score)
    assert rounds[0] == [Factors(4.0, 1.0, 3.0), Factors(2.0, 2.0, 3.0), Factors(2.0, 1.0, 9.0)]
    assert rounds[1] == [Factors(2.0, 1.0, 27.0)]  # the fourth and last; a rate beyond was tried


def test_nothing_lies_beyond_a_factor_of_zero_or_a_warmup_that_fills_the_run():
    search = {"learning_rate_factors": (1.0,), "warmup_factors": (0.0, 1.0, 2.0)}
    assert widened(search, lambda factors: factors.warmup) == []
    assert widened(search, lambda factors: -factors.warmup, longest_warmup=1.5) == []
    last = widened(search, lambda factors: -factors.warmup, longest_warmup=3.0)
    assert last == [[Factors(1.0, 4.0, 1.0)]]  # which is cut already


@pytest.mark.parametrize("method", ["halton", "successive_halving", "hyperband", "optuna"])
def test_every_method_is_followed_by_full_runs_from_its_best_full_run(method):
    pruner = {"pruner": "median"} if method == "optuna" else {}
    config = SearchConfig(method, warmup_range=(0.5, 2.0), **pruner)
    searcher = make_searcher(config)
    full = []
    while asked := searcher.ask():
        last = asked
        full += [one.factors for one in asked if one.fidelity == 1]
        searcher.tell([Score(-one.factors.learning_rate, 0.0) for one in asked])
    assert {one.fidelity for one in last} == {1.0}
    assert max(one.learning_rate for one in full) > 10
    assert all(0.5 <= one.warmup <= 2.0 for one in full)  # of the best, its rate alone moves on


def test_the_cost_has_the_budget_apart_and_none_where_nothing_is_searched():
    cost = search_cost(SearchConfig(learning_rate_factors=RATES, seeds=(0, 1)))
    assert (cost.trials, cost.full_runs, cost.extra) == (6, 6.0, 8)
    alone = SearchConfig(learning_rate_factors=(1.0,))
    assert not can_widen(alone)
    assert search_cost(alone).extra == 0
    assert widened({"learning_rate_factors": (1.0,)}, lambda factors: 0.0) == []


def test_a_widened_study_that_is_killed_anywhere_or_sharded_is_the_same(tmp_path):
    """Trials are real: rates far below what trains, so that every cell goes beyond its edge."""
    search = SearchConfig(learning_rate_factors=(0.01, 0.02), widen_candidates=2)
    config = make_config(search=search, final_seeds=(7,))
    config.arms = config.arms[:1]
    cells = _trials.make_cells(config, _trials.make_problems(config))

    def run(cells, folder, lines=()):
        folder.mkdir()
        (folder / "results.jsonl").write_text("".join(lines))
        _runner.run_sweep(config, cells, folder)
        return (folder / "results.jsonl").read_text().splitlines(keepends=True)

    def without_time(lines):
        return sorted(json.dumps({**json.loads(line), "seconds": None}) for line in lines)

    whole = run(cells, tmp_path / "whole")
    records = [json.loads(line) for line in whole]
    for size in config.global_batch_sizes:
        here = [record for record in records if record["global_batch_size"] == size]
        searched = [one["learning_rate_factor"] for one in here if one["phase"] == "search"]
        assert sorted(searched) == [0.01, 0.02, 0.04, 0.08]
        (final,) = (record for record in here if record["phase"] == "final")
        assert _drive.factors_of(final) == _drive.choose(here) == Factors(0.08, 1.0, 1.0)

    assert without_time(run(cells, tmp_path / "killed", whole[:6])) == without_time(whole)
    shard = run(cells[1:], tmp_path / "shard")
    of_shard = [line for line in whole if '"global_batch_size": 1024' in line]
    assert without_time(shard) == without_time(of_shard)
