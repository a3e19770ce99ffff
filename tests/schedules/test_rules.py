"""The table of scaling rules: identities that each rule keeps, and what its source computes."""

import math
import re

import numpy as np
import pytest
from refusal import refused
from scipy import stats

import lbopt
from lbopt.schedules import RULES, combine_rules, rule_changes, scale_number

BASES = {
    "learning_rate": 0.004,
    "rest_learning_rate": 0.002,
    "warmup_epochs": 0.5,
    "b1": 0.98,
    "b2": 0.999,
    "momentum": 0.9,
    "eps": 1e-8,
    "eps_root": 1e-16,
    "weight_decay": 0.1,
    "ema_decay": 0.9999,
}


@pytest.mark.parametrize("rule", [rule for name, rule in RULES.items() if name != "none"])
def test_every_rule_names_its_source_and_the_place_in_it(rule):
    paper = re.search(r"arXiv \d{4}\.\d{5}v\d+, \w{2,}", rule.source)
    code = re.search(r"\w/[\w-]+@\w{7}:[\w/]+\.py$", rule.source)
    assert paper or code, rule.source


@pytest.mark.parametrize("rule", RULES)
def test_at_the_base_batch_nothing_changes(rule):
    for number, base in BASES.items():
        assert math.isclose(scale_number(number, base, rule, 1.0), base, rel_tol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_scaling_in_two_strides_is_scaling_in_one(rule):
    for number, base in BASES.items():
        change = rule_changes(rule).get(number)
        if change is None or change.low or change.high < math.inf:
            continue
        half = scale_number(number, base, rule, 4.0, rate=2.0)
        two = scale_number(number, half, rule, 2.0, rate=math.sqrt(2))
        one = scale_number(number, base, rule, 8.0, rate=math.sqrt(8))
        assert math.isclose(two, one, rel_tol=1e-12), number


def test_half_lives_in_examples_stay():
    for rule, number in (("token_half_life", "b2"), ("sde_half_life", "b1"), ("ema", "ema_decay")):
        for ratio in (0.25, 3, 64):
            scaled = scale_number(number, BASES[number], rule, ratio)
            examples = [
                size * math.log(0.5) / math.log(decay)
                for size, decay in ((1, BASES[number]), (ratio, scaled))
            ]
            assert math.isclose(*examples, rel_tol=1e-10), (rule, ratio)


def test_the_second_moment_of_marek_et_al_is_that_of_their_configs():
    # martin-marek/batch-size@32700f0: .95 at 512 sequences and .9999 at one; .95 at 16, .997 at 1.
    assert round(scale_number("b2", 0.95, "token_half_life", 1 / 512), 4) == 0.9999
    assert round(scale_number("b2", 0.95, "token_half_life", 1 / 16), 3) == 0.997


@pytest.mark.parametrize(
    ("rule", "duration"), [("none", 1.0), ("sqrt", 1.0), ("linear", 4.0), ("adamh", 4.0)]
)
def test_power_lines_keep_the_time_scale_of_adamw(rule, duration):
    numbers = {"global_batch_size": 256, "learning_rate": 1e-3, "weight_decay": 0.1}
    found = lbopt.scale_recipe(
        numbers, global_batch_size=2048, rule=f"{rule}+power_lines", duration=duration
    ).recipe
    times = [
        each["global_batch_size"] / (each["learning_rate"] * each["weight_decay"] * length)
        for each, length in ((numbers, 1.0), (found, duration))
    ]
    assert math.isclose(*times, rel_tol=1e-12)


def completed_adamh(batch, tokens):
    """Return the numbers of marin's heuristic, written from its source for sequences of 4096."""
    noise = batch * 2.5e9 / (64 * tokens)
    rate = min(0.0063 * math.sqrt(batch / 64) * (2.5e9 / tokens) ** 0.3, 0.01)
    rest = min(0.000656 * math.sqrt(noise), 0.01)
    b2 = min(max(0.9999 ** (batch / 64), 0.9), 0.9999)
    return {
        "learning_rate": rate,
        "rest_learning_rate": rest,
        "b1": 0.9,
        "b2": b2,
        "eps": 1.85e-8 * math.sqrt(1 / noise),
    }


@pytest.mark.parametrize("batch", [8, 64, 512, 8192, 131072])
@pytest.mark.parametrize("tokens", [1e9, 2.5e9, 4e10, 1e12])
def test_adamh_gives_marins_constants(batch, tokens):
    base = {"global_batch_size": 64, **completed_adamh(64, 2.5e9)}
    scaled = lbopt.scale_recipe(
        base, global_batch_size=batch, rule="adamh", duration=tokens / 2.5e9
    ).recipe
    for name, value in completed_adamh(batch, tokens).items():
        assert math.isclose(scaled[name], value, rel_tol=1e-9), name


@pytest.mark.parametrize("batch", [16, 128, 1024, 8192])
def test_muonh_gives_marins_constants(batch):
    base = {
        "global_batch_size": 128,
        "learning_rate": 0.01,
        "rest_learning_rate": 0.33 * math.sqrt(128) / 512,
        "b1": 0.95,
        "b2": 0.98,
        "momentum": 0.98,
    }
    found = lbopt.scale_recipe(base, global_batch_size=batch, rule="muonh").recipe
    assert math.isclose(found["learning_rate"], 0.01 * min(1, math.sqrt(batch / 128)))
    assert math.isclose(found["rest_learning_rate"], 0.33 * math.sqrt(batch) / 512)
    assert math.isclose(found["b2"], max(0.95, 0.98 ** (batch / 128)))
    assert (found["b1"], found["momentum"]) == (0.95, 0.98)


def test_completed_p_in_batch_and_length():
    # arXiv 2512.22382v1, Table 1, last rows: m_B = 8, m_D = 2, so sqrt(m_B / m_D) = 2.
    base = {"global_batch_size": 256, **BASES}
    found = lbopt.scale_recipe(base, global_batch_size=2048, rule="completed_p", duration=2.0)
    after = found.recipe
    assert math.isclose(after["learning_rate"], 2 * BASES["learning_rate"])
    assert math.isclose(after["weight_decay"], 2 * BASES["weight_decay"])
    assert math.isclose(after["eps"], BASES["eps"] / 2)
    assert math.isclose(after["eps_root"], BASES["eps_root"] / 4)
    assert math.isclose(1 - after["b1"], 4 * (1 - BASES["b1"]), rel_tol=1e-12)
    assert math.isclose(1 - after["b2"], 4 * (1 - BASES["b2"]), rel_tol=1e-12)
    # As many examples for each token of the base run: the same stochastic differential equation.
    same = lbopt.scale_recipe(base, global_batch_size=512, rule="completed_p", duration=2.0).recipe
    for name in ("learning_rate", "b1", "b2", "eps", "weight_decay"):
        assert math.isclose(same[name], BASES[name], rel_tol=1e-12)


def adam_on_noisy_line(numbers, num_steps, start, slope, seed, chains=4000):
    """Return where Adam ends on loss slope x^2 / 2 with gradient noise of variance 1 / batch.

    Without b1, and with `eps_root`, it is RMSProp.
    """
    random = np.random.default_rng(seed)
    b1 = numbers.get("b1", 0.0)
    b2 = numbers["b2"]
    x = np.full(chains, start)
    mean = np.zeros(chains)
    square = np.zeros(chains)

    for step in range(1, num_steps + 1):
        noise = random.normal(size=chains) / math.sqrt(numbers["global_batch_size"])
        gradient = slope * x + noise
        mean = b1 * mean + (1 - b1) * gradient
        square = b2 * square + (1 - b2) * gradient**2
        size = np.sqrt(square / (1 - b2**step) + numbers.get("eps_root", 0.0))
        size = size + numbers.get("eps", 0.0)
        x = x - numbers["learning_rate"] * mean / (1 - b1**step) / size
    return x


BASE = {"global_batch_size": 1, "learning_rate": 0.005, "b1": 0.98, "b2": 0.99, "eps": 0.01}
STEPS = 8000
START = 1.0
SLOPE = 0.02


@pytest.fixture(scope="module")
def ends_at_batch_1():
    return adam_on_noisy_line(BASE, STEPS, START, SLOPE, seed=0)


@pytest.mark.parametrize("ratio", [4, 16])
def test_adam_ends_in_the_same_distribution_under_the_sde_rule_alone(ratio, ends_at_batch_1):
    # Kolmogorov-Smirnov distances. Chance gives 4000 chains of one law 0.03 at the 5 % quantile.
    def distance(rule):
        numbers = lbopt.scale_recipe(BASE, global_batch_size=ratio, rule=rule).recipe
        ends = adam_on_noisy_line(numbers, STEPS // ratio, START, SLOPE, seed=1)
        return stats.ks_2samp(ends_at_batch_1, ends).statistic

    assert distance("sde") < 0.06
    assert distance("sde_half_life") < 0.06
    assert distance("none") > 0.3
    assert distance("linear") > 0.3


def test_an_eps_under_the_root_keeps_its_weight_under_the_sde_rule():
    # With a large eps, so that a wrong power shows.
    base = {"global_batch_size": 1, "learning_rate": 0.005, "b2": 0.99, "eps_root": 4.0}

    def end(ratio, **others):
        numbers = lbopt.scale_recipe(base, global_batch_size=ratio, rule="sde").recipe | others
        return adam_on_noisy_line(numbers, STEPS // ratio, START, SLOPE, seed=ratio)

    first = end(1)
    assert stats.ks_2samp(first, end(16)).statistic < 0.06
    assert stats.ks_2samp(first, end(16, eps_root=4.0 / 4)).statistic > 0.3


def test_averaged_parameters_of_a_random_walk_keep_their_variance():
    # Parameters walk by independent steps, sqrt(k) times as large with k times the batch. The lag
    # walk - average is AR(1), of variance step^2 decay^2 / (1 - decay^2) in the long run.
    random = np.random.default_rng(0)
    decay = 0.995
    steps = 8000
    variances = {}
    for ratio, power in ((1, 1.0), (16, 1.0), (16, 0.0)):
        scaled = scale_number("ema_decay", decay, "ema", ratio**power)
        moves = random.normal(size=(steps // ratio, 4000)) * math.sqrt(ratio)
        lag = np.zeros(4000)
        for move in moves:
            lag = scaled * (lag + move)
        variances[ratio, power] = lag.var()
    assert math.isclose(variances[16, 1.0], variances[1, 1.0], rel_tol=0.15)
    assert variances[16, 0.0] > 10 * variances[1, 1.0]


@pytest.mark.parametrize(
    ("names", "code"),
    [
        ("linear+sqrt", "conflict"),
        ("sde+legw", "conflict"),
        ("sde+token_half_life", "conflict"),
        ("sqrt+sqrt", "value"),
        ("sqrt+", "choice"),
        ("cubic", "choice"),
        (0.5, "choice"),
    ],
)
def test_refused_rules(names, code):
    with refused("rule", code=code):
        combine_rules(names)


def test_linear_form_ends_where_a_decay_keeps_nothing():
    assert math.isclose(scale_number("b1", 0.9, "sde", 9.5), 0.05)
    with refused("b1", 0.9, "conflict"):
        scale_number("b1", 0.9, "sde", 10)
    assert math.isclose(scale_number("b1", 0.9, "sde_half_life", 10), 0.9**10)
