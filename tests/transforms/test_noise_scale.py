"""The noise scale is unbiased: it recovers the planted signal and noise of gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusal import refused

import lbopt

# ||G|| = 0.3, tr(Sigma) = 40 * 4 = 160
DIM = 40
SIGNAL = 0.3
NOISE = 2.0


def parts(rng, num_small, size):
    """Return gradients of equal shards of a batch, with noise variance NOISE^2 per example."""
    true = np.full(DIM, SIGNAL / np.sqrt(DIM))
    return true + NOISE / np.sqrt(size / num_small) * rng.normal(size=(num_small, DIM))


@pytest.mark.parametrize(("num_small", "size"), [(2, 64), (4, 64), (16, 4096)])
def test_single_estimates_are_right_on_average(num_small, size):
    rng = np.random.default_rng(1)
    squares = []
    traces = []
    for _ in range(4000):
        g = parts(rng, num_small, size)
        small = np.mean(np.sum(g**2, 1))
        big = np.sum(g.mean(0) ** 2)
        estimate = lbopt.estimate_noise(small, big, num_small, size)
        squares.append(estimate.square_norm)
        traces.append(estimate.trace)
    for values, expected in ((squares, SIGNAL**2), (traces, DIM * NOISE**2)):
        standard_error = np.std(values) / np.sqrt(len(values))
        assert abs(np.mean(values) - expected) <= 4 * standard_error
        assert standard_error <= 0.6 * expected


def test_running_means_find_the_noise_scale():
    rng = np.random.default_rng(2)
    size = 16_384
    num_small = 8
    tx = lbopt.track_noise_scale(size, decay=0.99)
    state = tx.init(None)
    update = jax.jit(
        lambda g, state, small: tx.update(
            {"w": g}, state, small_square_norm=small, num_small=num_small
        )
    )
    for _ in range(400):
        g = parts(rng, num_small, size)
        updates, state = update(
            jnp.float32(g.mean(0)), state, jnp.float32(np.mean(np.sum(g**2, 1)))
        )
    assert np.array_equal(updates["w"], np.float32(g.mean(0)))
    expected = DIM * NOISE**2 / SIGNAL**2
    assert state.noise_scale() == pytest.approx(expected, rel=0.15)
    assert lbopt.optimizer_metrics(state) == {"noise_scale": state.noise_scale()}


def test_every_leaf_has_the_noise_scale_that_was_planted_in_it():
    """Three leaves with their own signal and noise; the norm's alone is that of its own leaves."""
    rng = np.random.default_rng(3)
    size = 4096
    num_small = 8
    planted = {
        "dense/kernel": (1.0, 3.0, 40),
        "norm/bias": (2.0, 1.0, 5),
        "norm/scale": (0.5, 2.0, 5),
    }
    params = {
        "dense": {"kernel": jnp.zeros((8, 5))},
        "norm": {n: jnp.zeros(5) for n in ("bias", "scale")},
    }
    tx = lbopt.track_noise_scale(size, decay=0.99, per_layer=True)
    state = tx.init(params)
    update = jax.jit(
        lambda g, state, small, smalls: tx.update(
            g, state, small_square_norm=small, small_square_norms=smalls, num_small=num_small
        )[1]
    )
    for _ in range(400):
        draws = {
            name: signal / n**0.5
            + noise * rng.normal(size=(num_small, n)) / (size / num_small) ** 0.5
            for name, (signal, noise, n) in planted.items()
        }
        smalls = {name: np.float32(np.mean(np.sum(g**2, 1))) for name, g in draws.items()}
        shaped = lambda found: {  # noqa: E731
            "dense": {"kernel": found["dense/kernel"]},
            "norm": {"bias": found["norm/bias"], "scale": found["norm/scale"]},
        }
        means = {name: np.float32(g.mean(0)) for name, g in draws.items()}
        means["dense/kernel"] = means["dense/kernel"].reshape(8, 5)
        state = update(shaped(means), state, np.float32(sum(smalls.values())), shaped(smalls))

    found = lbopt.optimizer_metrics(state)
    signals = {name: signal**2 for name, (signal, _, _) in planted.items()}
    traces = {name: n * noise**2 for name, (_, noise, n) in planted.items()}
    norms = ["norm/bias", "norm/scale"]
    expected = {f"noise_scale/{name}": traces[name] / signals[name] for name in planted}
    expected["noise_scale"] = sum(traces.values()) / sum(signals.values())
    expected["noise_scale_of_norms"] = sum(map(traces.get, norms)) / sum(map(signals.get, norms))
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected, rel=0.2)


PARAMS = {"w": jnp.arange(1.0, 4.0)}
WRAPPED = {
    "chain": lambda tx: optax.chain(tx, lbopt.lamb(0.1, variant="optax")),
    "masked": lambda tx: optax.masked(tx, {"w": True}),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 2),
    "skip": lbopt.skip_bad_updates,
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(lbopt.track_noise_scale)(64),
    "multi_transform": lambda tx: optax.multi_transform({"all": tx}, {"w": "all"}),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_arguments_find_their_way_through_wrappers(wrapper):
    tx = WRAPPED[wrapper](lbopt.track_noise_scale(64))
    state = tx.init(PARAMS)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(
        jnp.shape, jax.eval_shape(tx.init, PARAMS)
    )
    update = jax.jit(
        lambda state, small: tx.update(PARAMS, state, PARAMS, small_square_norm=small, num_small=2)
    )
    _, after = update(state, jnp.float32(20.0))
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    # |g|^2 is 14: (2 * 14 - 20) / 1 = 8 and (20 - 14) * 64 / 1 = 384
    assert lbopt.optimizer_metrics(after)["noise_scale"] == pytest.approx(48, rel=1e-5)


def test_no_signal_is_an_infinite_noise_scale():
    tx = lbopt.track_noise_scale(64)
    _, state = tx.update(
        {"w": jnp.zeros(3)}, tx.init(None), small_square_norm=jnp.float32(1.0), num_small=2
    )
    assert state.noise_scale() == np.inf


def test_refusals():
    tx = lbopt.track_noise_scale(64)
    with refused("num_small", None, "missing"):
        tx.update({"w": jnp.zeros(3)}, tx.init(None))
    with refused("global_batch_size", 1, "value"):
        lbopt.track_noise_scale(1)
