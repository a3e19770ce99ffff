"""How the learning rate follows the batch size."""

import math

import jax
import numpy as np
import pytest
from refusal import refused

import lbopt
from lbopt.schedules import stretch_schedule

NAN = float("nan")


@pytest.mark.parametrize(("rule", "power"), [("sqrt", 0.5), ("linear", 1.0), ("none", 0.0)])
@pytest.mark.parametrize("batch", [32, 256, 384, 8192])
def test_closed_form(rule, power, batch):
    assert math.isclose(
        lbopt.scale_learning_rate(0.3, 256, batch, rule),
        0.3 * math.pow(batch / 256, power),
        rel_tol=1e-14,
    )


def test_sqrt_is_the_default_and_turns_four_times_the_batch_into_twice_the_rate():
    assert lbopt.scale_learning_rate(0.1, 256, 1024) == 0.2


def test_scaling_in_two_strides_is_scaling_in_one():
    for rule in ("sqrt", "linear", "none"):
        two = lbopt.scale_learning_rate(
            lbopt.scale_learning_rate(0.1, 64, 512, rule), 512, 4096, rule
        )
        assert math.isclose(two, lbopt.scale_learning_rate(0.1, 64, 4096, rule), rel_tol=1e-14)


def test_published_rates_of_lamb_on_resnet50_follow_the_square_root():
    for batch, rate in (
        (512, 0.005),
        (4096, 4 / (2**1.5 * 100)),
        (8192, 0.02),
        (16384, 4 / (2**0.5 * 100)),
    ):
        assert math.isclose(lbopt.scale_learning_rate(0.04, 32768, batch), rate, rel_tol=1e-12)


def test_rate_may_be_traced():
    traced = jax.jit(lambda rate: lbopt.scale_learning_rate(rate, 256, 1024))(0.1)
    assert math.isclose(traced, 0.2, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("argument", "value", "code", "arguments"),
    [
        ("rule", "cubic", "choice", (0.1, 256, 512, "cubic")),
        ("rule", ["sqrt"], "choice", (0.1, 256, 512, ["sqrt"])),
        ("base_batch_size", 0, "value", (0.1, 0, 512)),
        ("base_batch_size", -256, "value", (0.1, -256, 512)),
        ("global_batch_size", 0, "value", (0.1, 256, 0)),
        ("global_batch_size", -1, "value", (0.1, 256, -1)),
    ],
)
def test_bad_arguments_are_named(argument, value, code, arguments):
    with refused(argument, value, code):
        lbopt.scale_learning_rate(*arguments)


@pytest.mark.parametrize("bad", [float("nan"), np.array(0.5), np.array(np.nan), "8", 0])
def test_sizes_that_are_no_sizes_are_refused(bad):
    shown = bad.item() if isinstance(bad, np.ndarray) else bad
    with refused("global_batch_size", shown, "value"):
        lbopt.scale_learning_rate(0.1, 8, bad)
    with refused("num_steps", shown, "value"):
        stretch_schedule(lbopt.warmup_schedule(0.1, 2, 8), 8, bad)


@pytest.mark.parametrize("bad", [float("nan"), -0.1, np.array(np.inf)])
def test_rates_that_are_no_rates_are_refused(bad):
    with refused("base_learning_rate", float(bad), "value"):
        lbopt.scale_learning_rate(bad, 8, 16)
