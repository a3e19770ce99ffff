"""Batch-size schedules as phases: whole steps without gaps, and Seesaw's equivalence."""

import math
import random

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusal import refused

from lbopt.schedules import (
    BatchPhase,
    batch_phases,
    critical_changes,
    doubling_changes,
    phase_schedule,
    ramp_changes,
    seesaw_changes,
)


@pytest.mark.parametrize("seed", range(20))
def test_phases_have_no_gap_and_change_at_the_first_step_after_a_place(seed):
    draw = random.Random(seed)
    total = draw.uniform(1, 5000)
    places = sorted(draw.sample(range(1, 6000), draw.randint(0, 6)))
    changes = [(place, draw.choice([8, 12, 64, 96, 300])) for place in places]
    phases = batch_phases(16, changes, total, strict=False)

    step = example = 0
    sizes = []
    for phase in phases:
        assert (phase.first_step, phase.first_example) == (step, example)
        sizes += [phase.global_batch_size] * phase.num_steps
        step += phase.num_steps
        example = phase.last_example
    assert example >= total > example - sizes[-1]
    begins = np.cumsum([0, *sizes])[:-1]
    wanted = [([16] + [size for place, size in changes if place <= begin])[-1] for begin in begins]
    assert sizes == wanted


def test_megatrons_ramp():
    # --rampup-batch-size 16 8 3000 up to 40: three increments of 1,000 samples each.
    assert ramp_changes(16, 40, 8, 3000) == [(1000, 24), (2000, 32), (3000, 40)]
    phases = batch_phases(16, ramp_changes(16, 40, 8, 3000), 4000)
    assert [(one.global_batch_size, one.num_steps) for one in phases] == [
        (16, 63),
        (24, 42),
        (32, 31),
        (40, 25),
    ]


def test_the_batch_doubles_where_the_critical_batch_is_twice_as_large():
    measured = [(100, 90), (200, 129), (300, 1000), (400, 100)]
    assert critical_changes(64, 300, measured) == [(200, 128), (300, 256)]
    assert doubling_changes(64, 500, 10) == [(10, 128), (20, 256)]


@pytest.mark.parametrize(
    ("changes", "total"),
    [
        ([(100, 32), (50, 64)], 1000),
        ([(0, 32)], 1000),
        ([(100, 32.5)], 1000),
        ([(100, 0)], 1000),
        ([(1000, 32)], 1000),
        ([(100, 32), (101, 64)], 1000),
        ([(160, 32), (161, 64)], 1000),
        ([(1, 32)], 1000),
        ([(960, 64)], 1000),
        ([(100, 512), (1140, 32), (1200, 64)], 4000),
        ([(math.nan, 32)], 1000),
    ],
)
def test_refused_changes(changes, total):
    with refused("changes"):
        batch_phases(16, changes, total)


def test_a_run_without_changes_may_be_shorter_than_a_step():
    assert batch_phases(16, [], 10) == (BatchPhase(16, 1, 0, 0),)


def test_the_rate_of_a_phase_is_that_of_the_run_at_the_same_examples():
    whole = optax.cosine_decay_schedule(0.3, 200)
    phases = batch_phases(16, [(500, 32), (1500, 128)], 3200)
    for phase in phases:
        ratio = phase.global_batch_size / 16
        rate = phase_schedule(whole, phase, 16, scale=math.sqrt(ratio))
        for step in (phase.first_step, phase.first_step + phase.num_steps - 1):
            examples = phase.first_example + (step - phase.first_step) * phase.global_batch_size
            expected = math.sqrt(ratio) * float(whole(examples / 16))
            assert math.isclose(rate(jnp.int32(step)), expected, rel_tol=1e-5)


def risk(phases, rates, curvature):
    """Return the expected loss of SGD from x = 1 on curvature x^2 / 2, in closed form.

    The gradient's noise has variance 4 / batch.
    """
    mean = 1.0
    variance = 0.0
    for phase, of_phase in zip(phases, rates, strict=True):
        for rate in np.asarray(of_phase, np.float64):
            mean *= 1 - rate * curvature
            variance *= (1 - rate * curvature) ** 2
            variance += rate**2 * 4 / phase.global_batch_size
    return curvature * (mean**2 + variance) / 2


def test_seesaw_is_the_staircase_on_a_noisy_quadratic_in_fewer_steps():
    # Halving the rate of SGD equals doubling the batch, to first order in rate x curvature.
    steps = 12_000
    stairs = optax.piecewise_constant_schedule(0.02, {4000: 0.5, 8000: 0.5, 10_000: 0.5})
    changes = seesaw_changes(stairs, steps, first=8, last=64)
    assert changes == [(32_000, 16), (64_000, 32), (80_000, 64)]

    def of(changes, power):
        phases = batch_phases(8, changes, 8 * steps)
        rates = []
        for phase in phases:
            rate = phase_schedule(stairs, phase, 8, (phase.global_batch_size / 8) ** power)
            rates.append(rate(phase.first_step + jnp.arange(phase.num_steps)))
        found = [risk(phases, rates, curvature) for curvature in (0.3, 1.0, 3.0)]
        return phases, np.array(found)

    _, plain = of([], 0)
    phases, seesaw = of(changes, 1)
    _, unscaled = of(changes, 0)
    np.testing.assert_allclose(seesaw, plain, rtol=0.05)
    assert np.all(np.abs(unscaled / plain - 1) > 0.3)
    assert phases[-1].first_step + phases[-1].num_steps == 4000 + 2000 + 500 + 250


def test_seesaw_of_adam_keeps_rate_times_root_of_the_batch():
    stairs = optax.piecewise_constant_schedule(0.1, {100: 0.5, 200: 0.5})
    phases = batch_phases(8, seesaw_changes(stairs, 300, 8, 32), 2400)
    for phase, cut in zip(phases, (1, 2, 4), strict=True):
        rate = phase_schedule(stairs, phase, 8, math.sqrt(phase.global_batch_size / 8))
        assert math.isclose(rate(phase.first_step) * math.sqrt(cut), 0.1, rel_tol=1e-6)
    assert phases[1] == BatchPhase(16, 50, 100, 800)
