"""Valid settings of a search, and the refusal of others."""

import math

import pytest
from refusal import refused

from lbopt.config import SearchConfig, check_search

METHODS = ("grid", "log_uniform", "halton", "successive_halving", "hyperband", "optuna")


@pytest.mark.parametrize("method", METHODS)
def test_the_defaults_are_valid_for_every_method(method):
    check_search(SearchConfig(method=method))


@pytest.mark.parametrize(
    "fields",
    [
        {"warmup_factors": (0.0, 0.5, 1.0), "weight_decay_factors": (0.0,)},
        {"method": "halton", "weight_decay_range": (0.0, 0.0)},
        {"method": "halton", "learning_rate_range": (2.0, 2.0), "warmup_range": (0.5, 2.0)},
        {"learning_rate_range": (1.0, 1.0)},
        {"min_fidelity": 1.0},
        {"method": "optuna", "min_fidelity": 1.0},
        {"method": "hyperband", "eta": 3, "min_fidelity": 1 / 3},
        {"method": "hyperband", "eta": 49, "min_fidelity": 1 / 49},
        {"seeds": (0, 2**31 - 1), "seed": 2**31 - 1},
    ],
)
def test_unusual_and_sound_is_accepted(fields):
    check_search(SearchConfig(**fields))


BAD = [
    ("method", "random"),
    ("sampler", "gp"),
    ("pruner", "hyperbands"),
    ("learning_rate_factors", ()),
    ("learning_rate_factors", (2.0, 1.0)),
    ("learning_rate_factors", (1.0, 1.0)),
    ("learning_rate_factors", (0.0, 1.0)),
    ("learning_rate_factors", (1.0, math.inf)),
    ("learning_rate_factors", (math.nan,)),
    ("learning_rate_factors", (1.0, math.nan, 2.0)),
    ("warmup_factors", ()),
    ("warmup_factors", (-1.0, 1.0)),
    ("weight_decay_factors", (1.0, 0.0)),
    ("learning_rate_range", (10.0, 0.1)),
    ("learning_rate_range", (0.0, 10.0)),
    ("learning_rate_range", (0.0, 0.0)),
    ("learning_rate_range", (1.0, math.inf)),
    ("learning_rate_range", (math.nan, 1.0)),
    ("warmup_range", (0.0, 1.0)),
    ("weight_decay_range", (-1.0, 1.0)),
    ("num_candidates", 0),
    ("candidates_at_once", 0),
    ("eta", 1),
    ("min_fidelity", 0.0),
    ("min_fidelity", 1.5),
    ("min_fidelity", math.nan),
    ("seeds", ()),
    ("seeds", (1, 1)),
    ("seed", 2**31),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_bad_input_names_field_and_value(field, value):
    code = "choice" if field in ("method", "sampler", "pruner") else "value"
    with refused(field, value, code):
        check_search(SearchConfig(**{field: value}))


@pytest.mark.parametrize("method", METHODS[1:])
def test_a_search_with_nothing_to_search_is_refused(method):
    with refused("learning_rate_range", (1.0, 1.0)):
        check_search(SearchConfig(method, learning_rate_range=(1.0, 1.0)))


@pytest.mark.parametrize(
    "fields", [{"method": "hyperband"}, {"method": "optuna", "pruner": "median"}]
)
def test_rungs_that_do_not_exist_are_refused(fields):
    with refused("min_fidelity", 0.5):
        check_search(SearchConfig(**fields, min_fidelity=0.5))


def test_the_seed_at_fault_is_named():
    with refused("seeds", -1):
        check_search(SearchConfig(seeds=(0, -1)))
