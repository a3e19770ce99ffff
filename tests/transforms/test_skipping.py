"""Bad gradients are skipped and counted; good ones are not touched."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusal import refused

import lbopt

PARAMS = {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}


def gradient(size, seed=0):
    rng = np.random.default_rng(seed)
    leaves = {name: rng.normal(size=leaf.shape) for name, leaf in PARAMS.items()}
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in leaves.values()))
    return {name: jnp.float32(leaf * size / norm) for name, leaf in leaves.items()}


def feed(tx, sizes, state=None):
    """Return the states after each gradient of these norms."""
    state = tx.init(PARAMS) if state is None else state
    states = []
    update = jax.jit(tx.update)
    for number, size in enumerate(sizes):
        updates, state = update(gradient(size, number), state, PARAMS)
        states.append((updates, state))
    return states


def counts(state):
    return (
        int(state.skipped_nonfinite),
        int(state.skipped_spikes),
        int(state.consecutive),
        bool(state.limit_reached),
    )


def test_good_gradients_pass_as_they_are():
    inner = lbopt.lamb(0.1, weight_decay=0.1)
    ours = feed(lbopt.skip_bad_updates(inner, spike_factor=3.0), [1.0, 2.0, 0.5])
    state = inner.init(PARAMS)
    update = jax.jit(inner.update)
    for number, size in enumerate([1.0, 2.0, 0.5]):
        expected, state = update(gradient(size, number), state, PARAMS)
        assert all(np.array_equal(ours[number][0][name], expected[name]) for name in PARAMS)
    assert counts(ours[-1][1]) == (0, 0, 0, False)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(ours[-1][1].inner), jax.tree.leaves(state), strict=True)
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_skips_the_update(bad):
    tx = lbopt.skip_bad_updates(lbopt.lamb(0.1))
    [(_, before)] = feed(tx, [1.0])
    broken = gradient(1.0)
    broken["kernel"] = broken["kernel"].at[1, 2].set(bad)
    updates, after = tx.update(broken, before, PARAMS)
    assert not any(np.any(leaf) for leaf in updates.values())
    assert counts(after) == (1, 0, 1, False)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(after.inner), jax.tree.leaves(before.inner), strict=True)
    )
    assert after.typical_norm == before.typical_norm
    _, good = feed(tx, [1.0], after)[0]
    assert counts(good) == (1, 0, 0, False)


def test_spikes_are_measured_against_the_norms_before():
    tx = lbopt.skip_bad_updates(optax.sgd(0.1), spike_factor=3.0, norm_decay=0.5, warmup_updates=2)
    states = feed(tx, [1.0, 5.0, 8.9, 9.1, 30.0])
    # The typical norm is 1, then 3. 8.9 < 9 passes and raises it to 5.95; 9.1 passes; 7.525 * 3 =
    # 22.6 < 30 is a spike.
    assert [counts(state)[1] for _, state in states] == [0, 0, 0, 0, 1]
    assert np.isclose(states[3][1].typical_norm, 7.525, rtol=1e-5)
    assert states[4][1].typical_norm == states[3][1].typical_norm
    assert not np.any(states[4][0]["kernel"])


def test_no_spike_is_seen_before_enough_updates_were_applied():
    tx = lbopt.skip_bad_updates(optax.sgd(0.1), spike_factor=2.0, warmup_updates=3)
    assert [counts(state)[1] for _, state in feed(tx, [1.0, 100.0, 1e4, 1e6, 1.0])] == [
        0,
        0,
        0,
        1,
        1,
    ]


def test_a_level_that_stays_is_accepted_after_the_limit():
    tx = lbopt.skip_bad_updates(
        optax.sgd(0.1), max_consecutive=2, spike_factor=2.0, norm_decay=0.0, warmup_updates=1
    )
    states = feed(tx, [1.0, 10.0, 10.0, 10.0, 10.0])
    assert [counts(state)[:3] for _, state in states] == [
        (0, 0, 0),
        (0, 1, 1),
        (0, 2, 2),
        (0, 2, 0),
        (0, 2, 0),
    ]
    assert np.any(states[3][0]["kernel"])


def test_what_is_not_finite_is_never_accepted_and_the_limit_is_reported():
    tx = lbopt.skip_bad_updates(optax.sgd(0.1), max_consecutive=2, spike_factor=2.0)
    states = feed(tx, [1.0, np.nan, np.nan, np.nan, 1.0])
    assert [counts(state) for _, state in states] == [
        (0, 0, 0, False),
        (1, 0, 1, False),
        (2, 0, 2, False),
        (3, 0, 3, True),
        (3, 0, 0, True),
    ]
    assert not np.any(states[3][0]["kernel"])
    metrics = lbopt.optimizer_metrics(states[-1][1])
    assert {name: float(value) for name, value in metrics.items()} == {
        "skipped/nonfinite": 3,
        "skipped/spikes": 0,
        "skipped/limit_reached": 1,
    }


def test_metrics_of_the_optimizer_inside_are_found():
    tx = lbopt.skip_bad_updates(lbopt.lamb(0.25, max_grad_norm=0.5))
    metrics = lbopt.optimizer_metrics(feed(tx, [2.0])[0][1])
    assert metrics["learning_rate"] == 0.25
    assert np.isclose(metrics["gradient_norm"], 2.0, rtol=1e-6)
    assert "trust_ratio/kernel" in metrics


@pytest.mark.parametrize(
    ("argument", "bad"),
    [("spike_factor", 1.0), ("max_consecutive", -1), ("norm_decay", 1.0), ("warmup_updates", -1)],
)
def test_refusals(argument, bad):
    with refused(argument, bad, "value"):
        lbopt.skip_bad_updates(optax.sgd(0.1), **{argument: bad})
