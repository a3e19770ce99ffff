"""The seam between models and steps: a model is two functions, whatever framework it came from."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from refusal import refused

import lbopt
from lbopt import losses, metrics
from lbopt.data import load_digits
from lbopt.models import CNN, Model, from_linen, from_nnx


def init(key, inputs):
    size = inputs[0].size
    return {"kernel": 0.01 * jax.random.normal(key, (size, 10)), "bias": jnp.zeros(10)}, {
        "calls": jnp.zeros(())
    }


def apply(params, model_state, inputs, train, rng=None):
    logits = inputs.reshape(len(inputs), -1) @ params["kernel"] + params["bias"]
    return logits, {"calls": model_state["calls"] + 1} if train else model_state


def logistic_regression(params, batch, learning_rate, num_steps):
    """Descend in float64 NumPy; return the kernel, the bias and the loss before each step."""
    kernel, bias = (np.asarray(params[name], np.float64) for name in ("kernel", "bias"))
    x = batch["image"].reshape(-1, 64).astype(np.float64)
    target = np.eye(10)[batch["label"]]
    history = []
    for _ in range(num_steps):
        logits = x @ kernel + bias
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        history.append(-np.mean((target * log_p).sum(-1)))
        error = (np.exp(log_p) - target) / len(x)
        kernel = kernel - learning_rate * x.T @ error
        bias = bias - learning_rate * error.sum(0)
    return kernel, bias, history


@pytest.mark.parametrize("backend", ["jit", "pmap"])
def test_a_model_of_plain_functions_trains(backend):
    model = Model(init, apply)
    batch = load_digits().train.take(np.arange(64))

    def loss_fn(params, model_state, batch, rng):
        logits, model_state = model.apply(params, model_state, batch["image"], train=True, rng=rng)
        each = losses.softmax_cross_entropy(logits, batch["label"])
        return jnp.mean(each), (model_state, metrics.classification(logits, batch["label"], each))

    tx = optax.sgd(0.5)
    state = lbopt.TrainState.create(*model.init(jax.random.key(0), batch["image"]), tx)
    kernel, bias, expected = logistic_regression(state.params, batch, 0.5, 10)
    step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(4), backend)
    history = []
    for _ in range(10):
        state, sums = jax.block_until_ready(step(state, batch))
        history.append(metrics.means([sums])["loss"])
    assert expected[-1] < 0.8 * expected[0]
    np.testing.assert_allclose(history, expected, rtol=1e-5)
    np.testing.assert_allclose(state.params["kernel"], kernel, atol=1e-5)
    np.testing.assert_allclose(state.params["bias"], bias, atol=1e-5)
    assert float(state.model_state["calls"]) == 10


def test_linen_state_is_what_is_not_a_parameter():
    model = from_linen(CNN(widths=(4,), hidden=6))
    images = jax.random.normal(jax.random.key(1), (4, 4, 4))
    params, model_state = model.init(jax.random.key(0), images)
    assert set(model_state) == {"batch_stats"}
    assert set(params) == {"PatchConv_0", "BatchNorm_0", "Dense_0", "Dense_1"}
    _, after_training = model.apply(params, model_state, images, True)
    _, after_inference = model.apply(params, model_state, images, False)
    assert jax.tree.structure(after_training) == jax.tree.structure(model_state)
    assert all(
        np.any(a != b)
        for a, b in zip(jax.tree.leaves(after_training), jax.tree.leaves(model_state), strict=True)
    )
    assert after_inference is model_state


class Dropped(nn.Module):
    """Nothing but dropout."""

    @nn.compact
    def __call__(self, x, train):
        return nn.Dropout(0.5, deterministic=not train)(x)


def test_dropout_draws_from_the_key_in_training_only():
    model = from_linen(Dropped())
    x = jnp.ones((4, 32))
    dropped, _ = model.apply({}, {}, x, True, jax.random.key(0))
    again, _ = model.apply({}, {}, x, True, jax.random.key(0))
    other, _ = model.apply({}, {}, x, True, jax.random.key(1))
    kept, _ = model.apply({}, {}, x, False, jax.random.key(0))
    np.testing.assert_array_equal(dropped, again)
    assert np.any(dropped != other)
    assert set(np.unique(dropped)) == {0.0, 2.0}
    np.testing.assert_array_equal(kept, x)


TOLD = """
class Told(nn.Module):
    def __call__(self, x, {arguments}):
        return x * ({trains})
"""


@pytest.mark.parametrize(
    ("arguments", "trains"),
    [
        ("training", "training"),
        ("is_training", "is_training"),
        ("deterministic", "not deterministic"),
        ("inference=True", "not inference"),
        ("**options", "options['train']"),
    ],
)
def test_a_module_is_told_that_it_trains_by_the_argument_that_it_has(arguments, trains):
    made = {"nn": nn}
    exec(TOLD.format(arguments=arguments, trains=trains), made)
    model = from_linen(made["Told"]())
    params, state = model.init(jax.random.key(0), jnp.ones(2))
    for train in (True, False):
        outputs, _ = model.apply(params, state, jnp.ones(2), train=train)
        assert outputs.tolist() == [float(train)] * 2


def test_a_sequence_is_called_as_its_first_layer_is():
    made = {"nn": nn}
    exec(TOLD.format(arguments="train", trains="train"), made)
    for layers, train in [([made["Told"](), nn.relu], True), ([nn.relu, nn.relu], False)]:
        model = from_linen(nn.Sequential(layers))
        variables = model.init(jax.random.key(0), jnp.ones(2))
        outputs, _ = model.apply(*variables, jnp.ones(2), train=train)
        assert outputs.tolist() == [1.0] * 2


def test_a_sequence_of_nnx_trains_by_its_layers_mode():
    model = from_nnx(lambda rngs: nnx.Sequential(jnp.positive, nnx.Dropout(0.5, rngs=rngs)))
    variables = model.init(jax.random.key(0), jnp.ones(64))
    for train, values in [(True, {0.0, 2.0}), (False, {1.0})]:
        outputs, _ = model.apply(*variables, jnp.ones(64), train=train, rng=jax.random.key(1))
        assert set(outputs.tolist()) == values


def test_a_module_that_needs_what_nobody_gives_is_refused():
    made = {"nn": nn}
    exec(TOLD.format(arguments="temperature", trains="1"), made)
    with refused("model", code="type") as caught:
        from_linen(made["Told"]()).init(jax.random.key(0), jnp.ones(2))
    assert "temperature" in caught.value.reason
