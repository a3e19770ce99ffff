"""What a search may be configured with, and the line for what it may not."""

import math

import pytest

from lbopt.config import SearchConfig, validate_search
from lbopt.errors import UserError

METHODS = ("grid", "log_uniform", "halton", "successive_halving", "hyperband", "optuna")


@pytest.mark.parametrize("method", METHODS)
def test_the_defaults_are_valid_for_every_method(method):
    validate_search(SearchConfig(method=method), "config.search")


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
    validate_search(SearchConfig(**fields), "config.search")


GRID = "ascending, none twice"
BAD = [
    ("method", "random", "use one of grid, halton"),
    ("sampler", "gp", "use one of random, tpe"),
    ("pruner", "hyperbands", "did you mean 'hyperband'?"),
    ("learning_rate_factors", (), GRID),
    ("learning_rate_factors", (2.0, 1.0), GRID),
    ("learning_rate_factors", (1.0, 1.0), GRID),
    ("learning_rate_factors", (0.0, 1.0), "positive"),
    ("learning_rate_factors", (1.0, math.inf), GRID),
    ("learning_rate_factors", (math.nan,), GRID),
    ("learning_rate_factors", (1.0, math.nan, 2.0), GRID),
    ("warmup_factors", (), GRID),
    ("warmup_factors", (-1.0, 1.0), ">= 0"),
    ("weight_decay_factors", (1.0, 0.0), GRID),
    ("learning_rate_range", (10.0, 0.1), "low <= high"),
    ("learning_rate_range", (0.0, 10.0), "a lower end > 0"),
    ("learning_rate_range", (0.0, 0.0), "a lower end > 0"),
    ("learning_rate_range", (1.0, math.inf), "low <= high"),
    ("learning_rate_range", (math.nan, 1.0), "low <= high"),
    ("warmup_range", (0.0, 1.0), "a lower end > 0"),
    ("weight_decay_range", (-1.0, 1.0), "a lower end > 0"),
    ("num_candidates", 0, ">= 1"),
    ("candidates_at_once", 0, ">= 1"),
    ("eta", 1, ">= 2"),
    ("min_fidelity", 0.0, "[1e-05, 1]"),
    ("min_fidelity", 1.5, "[1e-05, 1]"),
    ("min_fidelity", math.nan, "[1e-05, 1]"),
    ("seeds", (), "at least one seed"),
    ("seeds", (1, 1), "none twice"),
    ("seed", 2**31, "[0, 2147483648)"),
]


@pytest.mark.parametrize(("field", "value", "fix"), BAD)
def test_bad_input_is_one_line_with_field_value_and_fix(field, value, fix):
    with pytest.raises(UserError) as caught:
        validate_search(SearchConfig(**{field: value}), "config.search")
    line = str(caught.value)
    assert line.startswith(f"config.search.{field} = {value!r}: ")
    assert fix in line
    assert "\n" not in line


@pytest.mark.parametrize("method", METHODS[1:])
def test_a_search_with_nothing_to_search_is_refused(method):
    with pytest.raises(
        UserError, match=r"config\.search\.learning_rate_range = \(1\.0, 1\.0\): .*method 'grid'"
    ):
        validate_search(SearchConfig(method, learning_rate_range=(1.0, 1.0)), "config.search")


@pytest.mark.parametrize(
    "fields", [{"method": "hyperband"}, {"method": "optuna", "pruner": "median"}]
)
def test_rungs_that_do_not_exist_are_refused(fields):
    with pytest.raises(
        UserError, match=r"config\.search\.min_fidelity = 0\.5: .*1 / eta = 0\.333333"
    ):
        validate_search(SearchConfig(**fields, min_fidelity=0.5), "config.search")


def test_the_seed_at_fault_is_named():
    with pytest.raises(
        UserError, match=r"config\.search\.seeds = -1: give a number in \[0, 2147483648\)"
    ):
        validate_search(SearchConfig(seeds=(0, -1)), "config.search")
