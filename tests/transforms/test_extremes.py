"""Gradients of 1e20 or 1e-30, whose squares fp32 cannot hold, behave as in float64."""

import jax
import jax.numpy as jnp
import lamb_sources
import lars_sources
import numpy as np
import optax
import pytest

import lbopt

SIZES = [1e20, 1e-25, 1e-30]
each_size = pytest.mark.parametrize("size", SIZES)
SHAPES = {"kernel": (6, 5), "bias": (5,), "other": (3, 4)}


def tree_of(seed, size=1.0):
    rng = np.random.default_rng(seed)
    return {name: np.float32(size * rng.normal(size=shape)) for name, shape in SHAPES.items()}


PARAMS = tree_of(0)


def exact_norm(tree):
    return np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree)))


def assert_close(ours, expected, rtol=2e-6):
    assert ours.keys() == expected.keys()
    for name in expected:
        error = np.linalg.norm(np.asarray(ours[name], np.float64) - expected[name])
        assert error <= rtol * np.linalg.norm(expected[name]), name


def update(tx, gradient, state=None):
    return jax.jit(tx.update)(gradient, tx.init(PARAMS) if state is None else state, PARAMS)


@each_size
def test_clip(size):
    gradient = tree_of(1, size)
    updates, state = update(lbopt.clip_by_global_norm(size), gradient)
    assert np.isclose(state.global_norm, exact_norm(gradient), rtol=1e-6, atol=0)
    assert_close(
        updates, {name: leaf * (size / exact_norm(gradient)) for name, leaf in gradient.items()}
    )


@each_size
def test_normalize(size):
    gradient = tree_of(2, size)
    for per, norm in (("global", lambda leaf: exact_norm(gradient)), ("layer", exact_norm)):
        updates, _ = update(lbopt.normalize_gradients(per), gradient)
        assert_close(
            updates, {name: np.float64(leaf) / norm(leaf) for name, leaf in gradient.items()}
        )


def test_only_what_is_not_finite_is_skipped_and_a_jump_is_a_spike():
    tx = lbopt.skip_bad_updates(optax.sgd(1.0), spike_factor=5.0, warmup_updates=1)
    state = None
    for size, counted in (
        (1e20, (0, 0)),
        (2e20, (0, 0)),
        (2e22, (0, 1)),
        (np.inf, (1, 1)),
        (1e-25, (1, 1)),
    ):
        gradient = tree_of(3, size)
        updates, state = update(tx, gradient, state)
        assert (state.skipped_nonfinite, state.skipped_spikes) == counted
        assert np.any(updates["kernel"]) == (size in (1e20, 2e20, 1e-25))
    assert np.isclose(float(state.typical_norm), 0.95 * 1.05e20 * exact_norm(tree_of(3)), rtol=1e-5)


@each_size
def test_monitor(size):
    gradient = tree_of(4, size)
    _, state = update(lbopt.monitor_layers(), gradient)
    for name, leaf in gradient.items():
        assert np.isclose(state.update_norm[name], exact_norm(leaf), rtol=1e-6, atol=0)


SOURCES = {
    "lamb": (lbopt.lamb, {}, lamb_sources.paper),
    "lamb_optax": (lbopt.lamb, {"variant": "optax"}, lamb_sources.optax),
    "lamb_albert": (lbopt.lamb, {"variant": "albert"}, lamb_sources.albert),
    "lans": (lbopt.lans, {}, lamb_sources.lans),
    "lars": (lbopt.lars, {}, lars_sources.paper),
    "lars_lamb_paper": (lbopt.lars, {"variant": "lamb_paper"}, lars_sources.lamb_paper),
    "lars_optax": (lbopt.lars, {"variant": "optax"}, lars_sources.optax),
    "lars_flax": (lbopt.lars, {"variant": "flax"}, lars_sources.flax),
}


@pytest.mark.everyday("*-0.1-1e+20", "*-0.0-1e-30")
@each_size
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.filterwarnings("ignore:.*adapts no layer:UserWarning")
def test_optimizers_equal_their_sources(name, decay, size):
    """One step only: later, LAMB's moments treat gradients beyond 4.6e18 as 4.6e18."""
    build, options, source = SOURCES[name]
    source_options = (
        {}
        if "variant" in options and name != "lars_lamb_paper"
        else {"skipped": lambda name: name == "bias"}
    )
    if build is lbopt.lars:
        options = {**options, "trust_coefficient": 0.01}
        source_options = {**source_options, "trust_coefficient": 0.01}

    gradient = tree_of(5, size)
    updates, _ = update(build(0.1, weight_decay=decay, **options), gradient)
    step = source(weight_decay=decay, **source_options)
    weights, gradients = (
        {name: np.float64(leaf) for name, leaf in tree.items()} for tree in (PARAMS, gradient)
    )

    after = step(weights, gradients, np.float64(np.float32(0.1)))
    expected = {name: after[name] - weights[name] for name in weights}

    for leaf in expected:  # what float64 resolves of an update read off the weights
        error = np.linalg.norm(np.asarray(updates[leaf], np.float64) - expected[leaf])
        assert error <= 3e-6 * np.linalg.norm(expected[leaf]) + 1e-15 * np.linalg.norm(
            weights[leaf]
        ), leaf


def test_a_weight_still_moves_after_a_gradient_whose_square_is_infinite():
    tx = lbopt.lamb(0.1)
    updates, state = update(tx, tree_of(6, 1e20))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((updates, state)))
    updates, state = update(tx, tree_of(7, 1e20), state)
    assert all(np.all(np.isfinite(leaf)) and np.all(leaf) for leaf in jax.tree.leaves(updates))
    assert np.isnan(update(tx, tree_of(6, np.inf), state)[0]["kernel"]).all(), (
        "what is infinite is not hidden"
    )


def test_noise_scale_leaves_out_what_it_cannot_square():
    tx = lbopt.track_noise_scale(64)

    def measure(gradient, small, state):
        return tx.update({"w": gradient}, state, small_square_norm=small, num_small=2)

    _, first = measure(jnp.full(4, 1e20), jnp.float32(np.inf), tx.init(None))
    assert [float(x) for x in first] == [0, 0, 0]
    _, second = measure(jnp.arange(1.0, 4.0), jnp.float32(20.0), first)
    _, third = measure(jnp.full(4, 1e20), jnp.float32(np.inf), second)
    assert third.noise_scale() == second.noise_scale() == pytest.approx(48, rel=1e-5)
