"""LEGW (linear-epoch gradual warmup): the rate grows as sqrt(k), the warmup epochs as k.

The number of warmup steps therefore stays constant.
"""

import math

import jax
import numpy as np
import pytest
from refusal import refused

import lbopt

IMAGENET = 1_281_167


def peak_step(schedule, total):
    rates = np.asarray(jax.jit(jax.vmap(schedule))(np.arange(total)))
    return int(np.argmax(rates)), float(rates.max())


@pytest.mark.parametrize("batch", [512, 1024, 2048, 4096, 8192, 16384, 32768])
def test_lamb_resnet50_peaks_after_782_steps_at_every_batch(batch):
    schedule = lbopt.legw_schedule(0.005, 512, 0.3125, batch, IMAGENET, 90)
    step, rate = peak_step(schedule, 1500)
    assert step == 782
    assert math.isclose(rate, 4 / (2 ** (math.log2(32768 / batch) / 2) * 100), rel_tol=1e-6)


def test_lamb_resnet50_at_32k_is_the_published_run():
    schedule = lbopt.legw_schedule(0.005, 512, 0.3125, 32768, IMAGENET, 90)
    for step in (0, 1, 391, 781, 782, 783, 2000, 3518, 3519):
        expected = 0.04 * (step / 782 if step <= 782 else (3519 - step) / (3519 - 782))
        assert abs(float(schedule(step)) - expected) <= 1e-6 * 0.04


@pytest.mark.parametrize(
    ("batch", "rate"), [(512, 4.0), (1024, 2**2.5), (4096, 2**3.5), (8192, 16.0), (16384, 2**4.5)]
)
def test_lars_resnet50_peaks_after_391_steps_up_to_16k(batch, rate):
    step, peak = peak_step(
        lbopt.legw_schedule(4.0, 512, 10 / 2**6, batch, IMAGENET, 90, power=2.0), 800
    )
    assert step == 391
    assert math.isclose(peak, rate, rel_tol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 4, 16, 64])
def test_rate_times_sqrt_k_at_the_same_step(k):
    base, large = (
        lbopt.legw_schedule(0.1, 64, 0.5, 64 * factor, 12_800, 40, "constant") for factor in (1, k)
    )
    for step in (1, 50, 99, 100):
        assert math.isclose(large(step), math.sqrt(k) * base(step), rel_tol=1e-6)


def test_other_rules_change_the_rate_and_not_the_warmup():
    for rule, rate in (("linear", 0.8), ("none", 0.1), ("sqrt", 0.1 * math.sqrt(8))):
        step, peak = peak_step(lbopt.legw_schedule(0.1, 64, 0.5, 512, 12_800, 40, rule=rule), 600)
        assert step == 100
        assert math.isclose(peak, rate, rel_tol=1e-6)


def test_options_reach_the_warmup_schedule():
    options = {"power": 2.0, "end_factor": 0.25, "first_step": 1}
    ours = lbopt.legw_schedule(0.1, 64, 0.5, 128, 12_800, 3, **options)
    plain = lbopt.warmup_schedule(0.1 * math.sqrt(2), 100, 300, **options)
    for step in (0, 98, 99, 100, 250, 299):
        assert math.isclose(ours(step), plain(step), rel_tol=1e-6)


def test_base_rate_may_be_traced():
    rate = jax.jit(lambda base: lbopt.legw_schedule(base, 64, 0.5, 256, 12_800, 40)(100))(0.1)
    assert math.isclose(rate, 0.2, rel_tol=1e-6)


GOOD = {
    "base_learning_rate": 0.1,
    "base_batch_size": 64,
    "base_warmup_epochs": 0.5,
    "global_batch_size": 128,
    "num_examples": 12_800,
    "num_epochs": 10,
}


@pytest.mark.parametrize(
    ("argument", "given", "shown", "code"),
    [
        ("base_batch_size", 0, 0, "value"),
        ("base_warmup_epochs", -1.0, -1.0, "value"),
        ("num_epochs", 0, 0, "value"),
        ("power", float("nan"), float("nan"), "value"),
        ("global_batch_size", 0, 0, "value"),
        ("num_examples", 0, 0, "value"),
        ("rule", "cubic", "cubic", "choice"),
        ("decay", "step", "step", "choice"),
        ("base_learning_rate", -0.1, -0.1, "value"),
        ("base_learning_rate", np.float32(-0.5), -0.5, "value"),
        ("base_warmup_epochs", np.float64(-1.0), -1.0, "value"),
    ],
)
def test_bad_arguments(argument, given, shown, code):
    with refused(argument, shown, code):
        lbopt.legw_schedule(**{**GOOD, argument: given})


def test_a_warmup_that_does_not_end_is_refused():
    with refused("warmup_steps", 100.0, "conflict"):
        lbopt.legw_schedule(**{**GOOD, "global_batch_size": 12_800, "num_epochs": 100})
