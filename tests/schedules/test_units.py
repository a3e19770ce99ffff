"""Epochs, steps and examples."""

import dataclasses
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies as st
from refusal import refused

from lbopt.schedules import Units

IMAGENET = 1_281_167


def test_ninety_epochs_of_imagenet_at_32k_are_3519_steps():
    assert Units(IMAGENET, 32768).steps(90) == 3519


def test_lamb_resnet50_warms_up_for_782_steps_at_every_batch():
    for batch, epochs in (
        (512, 0.3125),
        (1024, 0.625),
        (2048, 1.25),
        (4096, 2.5),
        (8192, 5),
        (16384, 10),
        (32768, 20),
    ):
        assert epochs == 20 * batch / 32768
        assert Units(IMAGENET, batch).warmup_steps(epochs) == 782


def test_lars_resnet50_warms_up_for_391_steps_up_to_16k():
    for batch, epochs in (
        (512, 10 / 2**6),
        (1024, 10 / 2**5),
        (4096, 10 / 2**3),
        (8192, 10 / 2**2),
        (16384, 5),
    ):
        assert epochs == 10 * batch / 32768
        assert Units(IMAGENET, batch).warmup_steps(epochs) == 391


def test_fourteen_epochs_at_32k_are_the_exception():
    assert Units(IMAGENET, 32768).warmup_steps(14) == 547


def test_steps_round_up_so_that_no_budget_is_cut():
    units = Units(100, 32)
    assert [units.steps(epochs) for epochs in (0, 0.01, 1, 2, 8)] == [0, 1, 4, 7, 25]


@pytest.mark.parametrize(
    ("examples", "batch", "epochs", "steps"),
    [(1000, 10, 0.07, 7), (1000, 10, 0.29, 29), (60000, 100, 1.1, 660), (3000, 10, 2.3, 690)],
)
def test_decimal_epochs_are_not_rounded_up_by_float_noise(examples, batch, epochs, steps):
    assert Fraction(str(epochs)) * examples == steps * batch
    assert Units(examples, batch).steps(epochs) == steps


def test_warmup_goes_to_the_nearest_step_and_not_up():
    assert [Units(100, 10).warmup_steps(epochs) for epochs in (0, 0.13, 0.17, 1)] == [0, 1, 2, 10]


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 10**7), st.integers(1, 10**5), st.integers(0, 200))
def test_whole_epochs_against_exact_arithmetic(examples, batch, epochs):
    units = Units(examples, batch)
    steps = units.steps(epochs)
    assert steps == math.ceil(Fraction(epochs * examples, batch))
    assert units.examples(steps) >= epochs * examples > units.examples(steps - 1) or epochs == 0
    assert math.isclose(units.epochs(units.exact_steps(epochs)), epochs, rel_tol=1e-12)


def test_units_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Units(10, 2).num_examples = 5


@pytest.mark.parametrize(
    ("argument", "value", "sizes"),
    [
        ("num_examples", 0, (0, 8)),
        ("num_examples", -5, (-5, 8)),
        ("global_batch_size", 0, (10, 0)),
        ("global_batch_size", -8, (10, -8)),
    ],
)
def test_bad_sizes_are_named(argument, value, sizes):
    with refused(argument, value, "value"):
        Units(*sizes)
