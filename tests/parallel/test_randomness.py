"""Dropout draws from the step's key: the same on any number of devices under jit, independently per replica under pmap."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lbopt


class Dropped(nn.Module):
    """Dropout on the pixels, then one dense layer."""

    @nn.compact
    def __call__(self, images, train):
        x = images.reshape(images.shape[0], -1)
        return nn.Dense(10)(nn.Dropout(0.5, deterministic=not train)(x))


def test_dropout_is_the_same_on_one_and_four_devices(problem, trajectory, relative_gap, batches):
    loss_fn, create = problem(Dropped())
    tx = optax.sgd(0.1)
    one, four = (
        trajectory(lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(n)), create(tx), batches[:5]) for n in (1, 4)
    )
    assert relative_gap(one[0], one[1], four[1]) <= 1e-5
    assert relative_gap(one[0], one[-1], four[-1]) <= 1e-5


def noise_sum(params, model_state, batch, rng):
    """Report the random numbers that the examples see; the loss itself needs none."""
    noise = jax.random.uniform(rng, batch["x"].shape)
    spread = jnp.zeros(16).at[batch["place"]].set(noise)
    return jnp.mean(params["w"] * batch["x"]), (model_state, {"noise": (spread, jnp.ones(()))})


def noise(num_devices, backend, num_microsteps=1, num_steps=1, seed=0):
    tx = optax.sgd(0.1)
    step = lbopt.make_train_step(noise_sum, tx, lbopt.make_mesh(num_devices), backend, num_microsteps=num_microsteps)
    state = lbopt.TrainState.create({"w": jnp.ones(())}, {}, tx, seed)
    for _ in range(num_steps):
        state, metrics = jax.block_until_ready(step(state, {"x": np.ones(16, np.float32), "place": np.arange(16)}))
    return np.asarray(metrics["noise"][0])


def test_every_example_draws_the_same_under_jit_whatever_the_devices():
    np.testing.assert_array_equal(noise(1, "jit"), noise(4, "jit"))


@pytest.mark.parametrize(
    ("num_devices", "backend", "num_microsteps"), [(4, "jit", 1), (4, "pmap", 1), (4, "jit", 2), (4, "pmap", 2)]
)
def test_no_two_examples_draw_the_same(num_devices, backend, num_microsteps):
    assert len(set(noise(num_devices, backend, num_microsteps).tolist())) == 16


@pytest.mark.parametrize("backend", ["jit", "pmap"])
def test_steps_and_seeds_draw_differently_and_repeatably(backend):
    first = noise(4, backend)
    np.testing.assert_array_equal(first, noise(4, backend))
    assert not np.any(first == noise(4, backend, num_steps=2))
    assert not np.any(first == noise(4, backend, seed=1))
