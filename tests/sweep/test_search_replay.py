"""Every search method replays exactly, begins with the rule, and finds the optimum."""

import json
import math
import os
import subprocess
import sys

import pytest

from lbopt.config import SearchConfig
from lbopt.sweep.search import Factors, Score, make_searcher

OPTUNA = {"method": "optuna", "num_candidates": 24}
CONFIGS = {
    "grid": {"learning_rate_factors": (0.5, 1.0, 2.0), "warmup_factors": (0.0, 1.0)},
    "log_uniform": {"method": "log_uniform"},
    "halton": {"method": "halton"},
    "successive_halving": {"method": "successive_halving", "num_candidates": 27},
    "hyperband": {"method": "hyperband"},
    "tpe": OPTUNA,
    "tpe_median": {**OPTUNA, "pruner": "median"},
    "tpe_halving": {**OPTUNA, "pruner": "successive_halving"},
    "tpe_hyperband": {**OPTUNA, "pruner": "hyperband"},
    "random_halving": {**OPTUNA, "sampler": "random", "pruner": "successive_halving"},
}
WIDE = {"warmup_range": (0.25, 4.0), "seed": 3}
every_method = pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)


def valley(proposal):
    """Return a score that is best at 3 times the rule's rate and a short warmup.

    Short runs favour smaller rates, and large rates diverge.
    """
    rate, warmup, _ = proposal.factors
    if rate > 8:
        return Score(math.inf, 0.0)
    bias = 0.3 * (1 - proposal.fidelity) * math.log2(rate)
    return Score(math.log2(rate / 3) ** 2 + 0.1 * math.log2(1 + warmup) + bias, rate)


def run(config, objective=valley):
    """Return the rounds of a whole search, each with its proposals and scores."""
    search = make_searcher(config)
    rounds = []
    while asked := search.ask():
        rounds.append((asked, [objective(one) for one in asked]))
        search.tell(rounds[-1][1])
    return rounds


@every_method
def test_a_search_that_is_built_anew_asks_for_the_very_same_runs(fields):
    """The search is killed after any round and given the saved scores again, read from JSON."""
    config = SearchConfig(**{**WIDE, **fields})
    rounds = run(config)
    for told in range(len(rounds) + 1):
        again = make_searcher(config)
        for asked, scores in rounds[:told]:
            assert again.ask() == asked
            again.tell([Score(*numbers) for numbers in json.loads(json.dumps(scores))])
        assert again.ask() == (rounds[told][0] if told < len(rounds) else ())


def run_all():
    return [run(SearchConfig(**{**WIDE, **fields})) for fields in CONFIGS.values()]


@pytest.mark.everyday("2")
@pytest.mark.process
@pytest.mark.everyday("1")
@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_another_process_asks_for_the_very_same_runs(hash_seed):
    """The processes have different hash seeds; `repr` shows floats exactly."""
    program = f"import runpy; print(runpy.run_path({__file__!r})['run_all']())"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert said.stdout.strip() == repr(run_all())


@every_method
def test_the_rule_is_tried_first_by_every_method_but_the_grid(fields):
    first = make_searcher(SearchConfig(**fields)).ask()[0].factors
    assert first == (
        Factors(0.5, 0.0, 1.0) if fields == CONFIGS["grid"] else Factors(1.0, 1.0, 1.0)
    )


@every_method
@pytest.mark.parametrize(
    "score", [Score(math.inf, 0.0), Score(1.0, 0.0)], ids=["all diverge", "all equal"]
)
def test_somebody_always_runs_at_full_length(fields, score):
    rounds = run(SearchConfig(**fields), lambda proposal: score)
    assert any(one.fidelity == 1.0 for asked, _ in rounds for one in asked)


@every_method
def test_no_run_is_asked_for_twice_and_every_round_has_one_length(fields):
    rounds = run(SearchConfig(**fields))
    proposals = [one for asked, _ in rounds for one in asked]
    assert len(set(proposals)) == len(proposals)
    assert all(len({one.fidelity for one in asked}) == 1 for asked, _ in rounds)
    assert all(0 < one.fidelity <= 1 for one in proposals)


@pytest.mark.parametrize(
    ("method", "most"),
    [
        ("successive_halving", 0.16),
        ("hyperband", 0.33),
        ("tpe_halving", 0.2),
        ("tpe_hyperband", 0.75),
    ],
)
def test_a_better_rate_is_found_at_a_part_of_the_cost(method, most):
    """The chosen rate is within a factor of 1.5 of the best, after at most `most` full runs."""
    config = SearchConfig(**CONFIGS[method])
    rounds = run(config)
    scored = [pair for asked, scores in rounds for pair in zip(asked, scores, strict=True)]
    _, best = min((score, one.factors) for one, score in scored if one.fidelity == 1.0)
    assert 3 / 1.5 < best.learning_rate < 3 * 1.5
    cost = sum(one.fidelity for one, _ in scored)
    assert cost < most * len({one.factors for one, _ in scored})
