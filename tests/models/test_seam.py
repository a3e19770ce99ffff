"""The seam between models and steps: a model is two functions, whatever framework it came from."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lbopt
from lbopt import losses, metrics
from lbopt.data.digits import load_digits
from lbopt.models import cnn, seam


def init(key, inputs):
    size = inputs[0].size
    return {"kernel": 0.01 * jax.random.normal(key, (size, 10)), "bias": jnp.zeros(10)}, {"calls": jnp.zeros(())}


def apply(params, model_state, inputs, train, rng=None):
    logits = inputs.reshape(len(inputs), -1) @ params["kernel"] + params["bias"]
    return logits, {"calls": model_state["calls"] + 1} if train else model_state


@pytest.mark.parametrize("backend", ["jit", "pmap"])
def test_a_model_of_plain_functions_trains(backend):
    model = seam.Model(init, apply)
    batch = load_digits().train.take(np.arange(256))

    def loss_fn(params, model_state, batch, rng):
        logits, model_state = model.apply(params, model_state, batch["image"], train=True, rng=rng)
        each = losses.softmax_cross_entropy(logits, batch["label"])
        return jnp.mean(each), (model_state, metrics.classification(logits, batch["label"], each))

    tx = lbopt.lamb(0.1)
    state = lbopt.TrainState.create(*model.init(jax.random.key(0), batch["image"]), tx)
    step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(4), backend)
    history = []
    for _ in range(20):
        state, sums = jax.block_until_ready(step(state, batch))
        history.append(metrics.means([sums]))
    assert history[0]["loss"] == pytest.approx(np.log(10), abs=0.1)
    assert history[-1]["loss"] < 0.7
    assert history[-1]["accuracy"] > 0.9
    assert float(state.model_state["calls"]) == 20


def test_linen_state_is_what_is_not_a_parameter():
    model = seam.from_linen(cnn.CNN(widths=(4,), hidden=6))
    images = jax.random.normal(jax.random.key(1), (4, 4, 4))
    params, model_state = model.init(jax.random.key(0), images)
    assert set(model_state) == {"batch_stats"}
    assert set(params) == {"PatchConv_0", "BatchNorm_0", "Dense_0", "Dense_1"}
    _, after_training = model.apply(params, model_state, images, True)
    _, after_inference = model.apply(params, model_state, images, False)
    assert jax.tree.structure(after_training) == jax.tree.structure(model_state)
    assert all(np.any(a != b) for a, b in zip(jax.tree.leaves(after_training), jax.tree.leaves(model_state), strict=True))
    assert after_inference is model_state


class Dropped(nn.Module):
    """Nothing but dropout."""

    @nn.compact
    def __call__(self, x, train):
        return nn.Dropout(0.5, deterministic=not train)(x)


def test_dropout_draws_from_the_key_in_training_only():
    model = seam.from_linen(Dropped())
    x = jnp.ones((4, 32))
    dropped, _ = model.apply({}, {}, x, True, jax.random.key(0))
    again, _ = model.apply({}, {}, x, True, jax.random.key(0))
    other, _ = model.apply({}, {}, x, True, jax.random.key(1))
    kept, _ = model.apply({}, {}, x, False, jax.random.key(0))
    np.testing.assert_array_equal(dropped, again)
    assert np.any(dropped != other)
    assert set(np.unique(dropped)) == {0.0, 2.0}
    np.testing.assert_array_equal(kept, x)
