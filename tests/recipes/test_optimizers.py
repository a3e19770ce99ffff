"""Optimizers by name take the steps of the same chains of Optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lbopt.config import OptimizerConfig
from lbopt.recipes.optimizers import make_optimizer
from lbopt.transforms.lamb import lamb
from lbopt.transforms.lars import lars

SCHEDULE = optax.linear_schedule(0.1, 0.02, 6)
MASK = {"Dense_0": {"kernel": True, "bias": False}, "BatchNorm_0": {"scale": False}}

# Name: the config, and the chain of Optax it stands for.
SAME = {
    "adam": (OptimizerConfig("adam", b1=0.8, b2=0.95, eps=1e-5), optax.adam(SCHEDULE, 0.8, 0.95, 1e-5)),
    "adam has no weight decay": (OptimizerConfig("adam", weight_decay=0.5), optax.adam(SCHEDULE, 0.9, 0.999, 1e-6)),
    "adamw": (
        OptimizerConfig("adamw", weight_decay=0.3),
        optax.adamw(SCHEDULE, 0.9, 0.999, 1e-6, weight_decay=0.3, mask=MASK),
    ),
    "momentum": (OptimizerConfig("momentum", momentum=0.7), optax.sgd(SCHEDULE, 0.7)),
    "nesterov": (OptimizerConfig("momentum", momentum=0.7, nesterov=True), optax.sgd(SCHEDULE, 0.7, nesterov=True)),
    "momentum with decay": (
        OptimizerConfig("momentum", momentum=0.7, weight_decay=0.2),
        optax.chain(optax.add_decayed_weights(0.2, MASK), optax.sgd(SCHEDULE, 0.7)),
    ),
    "clipped": (
        OptimizerConfig("momentum", max_grad_norm=0.5),
        optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(SCHEDULE, 0.9)),
    ),
    "lamb": (
        OptimizerConfig("lamb", weight_decay=0.1, b1=0.8, eps=1e-4, trust_ratio_bounds=(0.5, 2.0)),
        lamb(SCHEDULE, 0.8, 0.999, 1e-4, 0.1, trust_ratio_bounds=(0.5, 2.0)),
    ),
    "lars": (
        OptimizerConfig("lars", weight_decay=0.1, momentum=0.8, trust_coefficient=0.01, nesterov=True),
        lars(SCHEDULE, 0.1, 0.8, 0.01, nesterov=True),
    ),
}


def make_params():
    rng = np.random.default_rng(0)
    return {
        "Dense_0": {"kernel": rng.normal(size=(4, 3)), "bias": rng.normal(size=3)},
        "BatchNorm_0": {"scale": rng.uniform(0.5, 1.5, size=3)},
    }


def descend(tx, num_steps=5):
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), make_params())
    state = tx.init(params)
    update = jax.jit(tx.update)
    for step in range(num_steps):
        rng = np.random.default_rng(step + 1)
        grads = jax.tree.map(lambda w: jnp.asarray(rng.normal(size=w.shape), jnp.float32), params)  # noqa: B023
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("name", SAME)
def test_it_takes_the_same_steps(name):
    config, expected = SAME[name]
    ours, theirs = descend(make_optimizer(config, SCHEDULE)), descend(expected)
    start = make_params()
    for ours_leaf, theirs_leaf, start_leaf in zip(*map(jax.tree.leaves, (ours, theirs, start)), strict=True):
        moved = np.linalg.norm(theirs_leaf - start_leaf)
        assert moved > 1e-4
        assert np.linalg.norm(ours_leaf - theirs_leaf) < 1e-5 * moved


def test_a_weight_decay_beside_the_config_counts():
    beside = descend(make_optimizer(OptimizerConfig("adamw", weight_decay=0.9), SCHEDULE, weight_decay=0.3))
    inside = descend(make_optimizer(OptimizerConfig("adamw", weight_decay=0.3), SCHEDULE))
    jax.tree.map(np.testing.assert_array_equal, beside, inside)
    without = descend(make_optimizer(OptimizerConfig("adamw", weight_decay=0.9), SCHEDULE, weight_decay=0.0))
    assert not np.array_equal(beside["Dense_0"]["kernel"], without["Dense_0"]["kernel"])
    np.testing.assert_array_equal(beside["Dense_0"]["bias"], without["Dense_0"]["bias"])


@pytest.mark.parametrize("name", ["adam", "adamw", "lamb", "lars", "momentum"])
def test_rate_and_decay_may_be_traced(name):
    def last(rate, decay):
        return descend(make_optimizer(OptimizerConfig(name), rate, decay), num_steps=2)

    traced = jax.jit(last)(jnp.float32(0.05), jnp.float32(0.1))
    plain = last(0.05, 0.1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), traced, plain)
