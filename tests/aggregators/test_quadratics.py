"""A published effect of error feedback: replicas with different minima, with and without noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lbopt
from lbopt.aggregators import _aggregator, topk

REPLICAS = 8
SIZE = 40
RATE = 0.003
STEPS = 12_000
LAST = 3_000
NOISES = (0.0, 5.0)


def forgetful(aggregator):
    """Drop the compression error at every step."""

    def update(rows, state, group, extra):
        return aggregator.update(rows, state, group, extra)._replace(state=state)

    return _aggregator.dataclasses.replace(aggregator, update=update)


TOP = topk(k=2)
ROWS = {
    "plain mean": _aggregator.plain_mean(),
    "top-2 alone": forgetful(lbopt.ef(TOP)),
    "`ef`": lbopt.ef(TOP),
    "`ef21`": lbopt.ef21(TOP),
    "`econtrol`, eta = 0.1": lbopt.econtrol(TOP, 0.1),
}


@functools.cache
def distances(name):
    """Return the mean squared distance from the minimum over the last steps, for each noise."""
    rng = np.random.default_rng(0)
    curvature = rng.uniform(0.5, 2, (REPLICAS, SIZE))
    minima = 3 * rng.normal(size=(REPLICAS, SIZE))
    goal = (curvature * minima).sum(0) / curvature.sum(0)
    tx = _aggregator.aggregate(ROWS[name], optax.sgd(RATE), REPLICAS)

    def one(noise):
        def step(carry, key):
            x, state = carry
            grads = curvature * (x - minima) + noise * jax.random.normal(key, minima.shape)
            updates, state = tx.update(grads, state, x)
            x = optax.apply_updates(x, updates)
            return (x, state), jnp.sum((x - goal) ** 2)

        x = jnp.zeros(SIZE)
        _, found = jax.lax.scan(step, (x, tx.init(x)), jax.random.split(jax.random.key(1), STEPS))
        return found[-LAST:].mean()

    with jax.enable_x64(True):
        return tuple(float(jax.jit(one)(noise)) for noise in NOISES)


@pytest.mark.slow
def test_without_noise_error_feedback_is_stuck_and_ef21_and_econtrol_are_exact():
    exact, alone, ef, ef21, econtrol = (distances(name)[0] for name in ROWS)
    assert max(exact, ef21, econtrol) < 1e-12
    assert alone > 1
    assert 1e-3 < ef < 1


@pytest.mark.slow
def test_with_noise_ef21_stays_at_its_floor_and_econtrol_does_not():
    exact, alone, ef, ef21, econtrol = (distances(name)[1] for name in ROWS)
    assert ef21 > 10 * exact
    assert alone > 10 * exact
    assert econtrol < 4 * exact
    assert ef < 2 * exact
