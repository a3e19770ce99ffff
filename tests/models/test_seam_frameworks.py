"""Equinox modules and Haiku's pairs behind the seam train as in their own frameworks' loops."""

import json
import sys

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from refusal import refused, troubled
from safetensors.numpy import load_file

import lbopt
from lbopt import losses, replicas
from lbopt.cli import main
from lbopt.models import from_equinox, from_haiku, from_nnx, make_model

EXAMPLES = 8
RATE = 0.1


class Gain(eqx.Module):
    """An array of NumPy, under the name that boxes give to theirs."""

    value: np.ndarray


class Net(eqx.Module):
    """A CNN for one image [4, 4], with an array of integers."""

    layers: list
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    order: jax.Array
    gain: Gain

    def __init__(self, outputs, key):
        keys = jax.random.split(key, 3)
        conv = eqx.nn.Conv2d(1, 4, 3, stride=2, padding=1, key=keys[0])
        self.layers = [conv, eqx.nn.Linear(16, outputs, key=keys[1])]
        self.norm = eqx.nn.BatchNorm(4, "examples", momentum=0.9, mode="batch")
        self.dropout = eqx.nn.Dropout(0.5)
        self.order = jax.random.permutation(keys[2], 16)
        self.gain = Gain(np.ones(16, np.float32))

    def __call__(self, x, state, *, key=None):
        x, state = self.norm(jax.nn.relu(self.layers[0](x[None])), state)
        x = self.dropout(x.reshape(-1)[self.order] * self.gain.value, key=key)
        return self.layers[1](x), state


def haiku_net(outputs):
    def net(x, is_training):
        x = jax.nn.relu(hk.Conv2D(4, 3, stride=2)(x[..., None]))
        x = hk.BatchNorm(True, True, 0.9)(x, is_training)
        x = hk.dropout(hk.next_rng_key(), 0.5 if is_training else 0.0, x.reshape(len(x), -1))
        return hk.Linear(outputs)(x)

    return hk.transform_with_state(net)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    images = rng.normal(size=(EXAMPLES, 4, 4)).astype(np.float32)
    return {"x": images, "y": np.arange(EXAMPLES) % 3}


def cross_entropy(logits, batch):
    return jnp.mean(losses.softmax_cross_entropy(logits, batch["y"]))


def by_equinox(batch, keys):
    """Train as Equinox's documentation does; return parameters and state by path, and logits."""

    @eqx.filter_grad(has_aux=True)
    def gradient(net, state, key):
        each = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(EXAMPLES))
        logits, state = mapped(lambda x, state, key: net(x, state, key=key))(
            batch["x"], state, each
        )
        return cross_entropy(logits, batch), state

    def mapped(one):
        return jax.vmap(one, (0, None, 0), (0, None), axis_name="examples")

    net, state = eqx.nn.make_with_state(Net)(3, jax.random.key(0))
    for key in keys:
        grads, state = gradient(net, state, key)
        net = eqx.apply_updates(net, jax.tree.map(lambda g: -RATE * g, grads))
    params = {
        ("norm", "weight"): net.norm.weight,
        ("norm", "bias"): net.norm.bias,
        ("gain", "value"): net.gain.value,
    }
    for number, layer in enumerate(net.layers):
        for name in ("weight", "bias"):
            params["layers", str(number), name] = getattr(layer, name)

    mean, var = state.get(net.norm.batch_state_index)
    index = ("state", "norm", "batch_state_index")
    kept = {
        ("arrays", "order"): net.order,
        ("state", "norm", "batch_counter"): state.get(net.norm.batch_counter),
        (*index, "0"): mean,
        (*index, "1"): var,
    }
    net = eqx.nn.inference_mode(net)
    logits, _ = mapped(lambda x, state, key: net(x, state))(batch["x"], state, jnp.ones(EXAMPLES))
    return params, kept, logits


def by_haiku(batch, keys):
    """Train as Haiku's documentation does; the results are those of `by_equinox`."""
    net = haiku_net(3)

    def loss(params, state, key):
        logits, state = net.apply(params, state, key, batch["x"], True)
        return cross_entropy(logits, batch), state

    params, state = net.init(jax.random.key(0), batch["x"], True)
    for key in keys:
        grads, state = jax.grad(loss, has_aux=True)(params, state, key)
        params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)

    logits, _ = net.apply(params, state, jax.random.key(5), batch["x"], False)
    return flatten_dict(params), flatten_dict({"state": state}), logits


MAKERS = [
    pytest.param(Net, by_equinox, id="equinox"),
    pytest.param(haiku_net, by_haiku, id="haiku"),
]


def loss_of(model):
    def loss_fn(params, model_state, batch, rng):
        logits, model_state = model.apply(params, model_state, batch["x"], train=True, rng=rng)
        loss = cross_entropy(logits, batch)
        return loss, (model_state, {"loss": (loss, jnp.ones(()))})

    return loss_fn


def close(ours, theirs):
    ours = flatten_dict(ours)
    assert ours.keys() == theirs.keys()
    for path, one in ours.items():
        np.testing.assert_allclose(one, theirs[path], rtol=2e-5, atol=2e-6, err_msg=str(path))


@pytest.mark.parametrize(("make", "by_framework"), MAKERS)
def test_a_step_is_that_of_the_frameworks_own_loop_on_any_number_of_devices(
    make, by_framework, batch
):
    model = make_model(make, 3, remat="all")
    tx = optax.sgd(RATE)
    first = lbopt.TrainState.create(*model.init(jax.random.key(0), batch["x"]), tx)
    keys = [first.replace(step=step).step_key() for step in range(2)]
    params, model_state, logits = by_framework(batch, keys)
    for devices in (1, 4):
        step = lbopt.make_train_step(loss_of(model), tx, lbopt.make_mesh(devices), donate=False)
        state = step.place(first)
        for _ in keys:
            state, _ = jax.block_until_ready(step(state, batch))
        close(state.params, params)
        close(state.model_state, model_state)

    found, kept = model.apply(state.params, state.model_state, batch["x"], train=False)
    np.testing.assert_allclose(found, logits, rtol=2e-5, atol=2e-6)
    assert kept is state.model_state


@pytest.mark.parametrize(("make", "by_framework"), MAKERS)
def test_bfloat16_computes_in_it_and_keeps_the_state_in_float32(make, by_framework, batch):
    del by_framework
    model = make_model(make, 3, jnp.bfloat16)
    variables = model.init(jax.random.key(0), batch["x"])
    outputs = [
        each.apply(*variables, batch["x"], train=True, rng=jax.random.key(1))
        for each in (model, make_model(make, 3))
    ]
    for narrow, wide in zip(*map(jax.tree.leaves, outputs), strict=True):
        assert narrow.dtype == wide.dtype
        np.testing.assert_allclose(narrow, wide, rtol=0.05, atol=0.05)
    assert np.any(outputs[0][0] != outputs[1][0])


def test_equinox_draws_for_an_example_by_its_number_in_the_global_batch():
    model = from_equinox(lambda key: eqx.nn.Dropout(0.5))
    x = jnp.ones((EXAMPLES, 16))
    key = jax.random.key(3)

    def on_replica(x):
        with replicas.tracing_for(4, "data"):
            return model.apply({}, {}, x, True, key)[0]

    whole, _ = model.apply({}, {}, x, True, key)
    mapped = jax.vmap(on_replica, axis_name="data")(x.reshape(4, -1, 16))
    np.testing.assert_array_equal(mapped.reshape(x.shape), whole)
    assert len(np.unique(whole, axis=0)) == EXAMPLES


class Batched(eqx.Module):
    """Takes two batches by name, needs a key, and is told its mode."""

    weight: jax.Array

    def __call__(self, left, right, key, training):
        noise = jax.random.normal(key, left.shape) if training else 0.0
        return left @ self.weight + right + noise


def test_an_equinox_module_may_take_the_batch_by_names_and_its_mode():
    model = from_equinox(lambda key: Batched(jnp.eye(2)), batched=True)
    inputs = {"left": jnp.ones((3, 2)), "right": jnp.full((3, 2), 2.0)}
    params, state = model.init(jax.random.key(0), inputs)
    key = jax.random.key(1)
    noisy, _ = model.apply(params, state, inputs, True, key)
    np.testing.assert_allclose(noisy, 3 + jax.random.normal(key, (3, 2)), rtol=1e-6)
    assert model.apply(params, state, inputs, False)[0].tolist() == [[3.0, 3.0]] * 3


def test_haiku_without_random_numbers_or_state():
    net = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(2, name="head")(x)))
    model = from_haiku(net)
    x = jnp.ones((3, 4))
    params, state = model.init(jax.random.key(0), x)
    assert (set(params), state) == ({"head"}, {})
    outputs, _ = model.apply(params, state, x, True, jax.random.key(1))
    np.testing.assert_array_equal(outputs, net.apply(params, x))


class EquinoxLayers(eqx.Module):
    layers: eqx.nn.Linear

    def __init__(self, key):
        make = eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 4, key=key))
        self.layers = make(jax.random.split(key, 3))

    def __call__(self, x):
        arrays, rest = eqx.partition(self.layers, eqx.is_array)
        return jax.lax.scan(lambda x, one: (eqx.combine(one, rest)(x), None), x, arrays)[0]


class NnxLayers(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs):
            return nnx.Linear(4, 4, rngs=rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        in_turn = nnx.scan(lambda x, one: one(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return in_turn(x, self.layers)


def haiku_layers():
    def net(x):
        return hk.experimental.layer_stack(3, name="layers")(lambda x: hk.Linear(4)(x))(x)

    return hk.transform(net)


@pytest.mark.parametrize(
    ("model", "kernel", "turned"),
    [
        pytest.param(lambda: from_equinox(EquinoxLayers), "weight", True, id="equinox"),
        pytest.param(lambda: from_haiku(haiku_layers()), "w", False, id="haiku"),
        pytest.param(lambda: from_nnx(NnxLayers), "kernel", False, id="nnx"),
    ],
)
def test_each_layer_of_a_stack_has_its_own_trust_ratio(model, kernel, turned):
    model = model()
    x = jnp.ones((2, 4))
    params, state = model.init(jax.random.key(0), x)
    found = {path[-1]: leaf for path, leaf in flatten_dict(params).items()}
    assert found[kernel].shape == (3, 4, 4)

    # The layers are along the leading axis: applying them in turn gives the model's outputs.
    expected = x
    for layer in found[kernel]:
        expected = expected @ (layer.T if turned else layer)
    bias = next(leaf for name, leaf in found.items() if name != kernel)
    params = jax.tree.map(lambda leaf: leaf * (leaf.shape != bias.shape), params)
    np.testing.assert_allclose(
        model.apply(params, state, x, train=False)[0], expected, rtol=1e-5, atol=1e-6
    )

    scales = jnp.array([1.0, 10.0, 100.0]).reshape(3, 1, 1)
    params = jax.tree.map(lambda leaf: leaf * scales if leaf.ndim == 3 else leaf, params)
    tx = lbopt.scale_by_layerwise_trust_ratio(stacked=lbopt.stacked_paths(kernel))
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = tx.update(grads, tx.init(params), params)
    new = {path[-1]: leaf for path, leaf in flatten_dict(updates).items()}[kernel]
    wide = {path[-1]: leaf for path, leaf in flatten_dict(params).items()}[kernel]
    norms = np.linalg.norm(wide, axis=(1, 2))
    np.testing.assert_allclose(np.linalg.norm(new, axis=(1, 2)), norms, rtol=1e-5)


def test_the_abstract_module_stays_with_the_model(batch):
    model = make_model(Net, 3, jnp.bfloat16, remat="all")
    assert isinstance(model.module.norm, eqx.nn.BatchNorm)
    assert isinstance(model.module.layers[0].weight, jax.ShapeDtypeStruct)
    assert isinstance(from_nnx(NnxLayers).module.layers, nnx.Linear)
    assert make_model(haiku_net, 3).module is None


class Other(eqx.Module):
    """Its call needs what nobody gives."""

    weight: jax.Array

    def __call__(self, x, temperature):
        return x * self.weight / temperature


class Counting(eqx.Module):
    """Keeps a state of each example, or returns none."""

    count: eqx.nn.StateIndex
    returns: bool

    def __init__(self, returns):
        self.count = eqx.nn.StateIndex(jnp.zeros(()))
        self.returns = returns

    def __call__(self, x, state):
        state = state.set(self.count, jnp.sum(x))
        return (x, state) if self.returns else x


def dropping(x):
    return hk.dropout(hk.next_rng_key(), 0.5, x)


ONE = jnp.ones(())


@pytest.mark.parametrize(
    ("make", "word", "code"),
    [
        (lambda key: Other(ONE), "temperature", "type"),
        (lambda: Other(ONE), "key", "type"),
        (lambda key: {}, "dict", "type"),
        (lambda: {}, "hk.transform", "type"),
        (Other(ONE), "finished", "type"),
        (lambda key: Counting(True), "lax.pmean", "mismatch"),
        (lambda key: Counting(False), "state", "type"),
        (lambda: hk.transform(lambda x, temperature: x), "temperature", "type"),
        (lambda: hk.transform(dropping), "is_training", "type"),
    ],
)
def test_what_is_no_model_is_refused(make, word, code):
    x = jnp.ones((2, 3))
    with refused("model", code=code) as caught:
        model = make_model(make, 3)
        model.apply(*model.init(jax.random.key(0), x), x, train=False)
    assert word in caught.value.reason


@pytest.mark.parametrize("make", [lambda outputs, width: None, lambda rngs, width: None])
def test_arguments_without_a_value_are_refused(make):
    with refused("options", code="missing") as caught:
        make_model(make, 3)
    assert "needs width too" in caught.value.reason


def test_what_the_seam_cannot_wrap_is_refused(monkeypatch):
    with refused("transformed", code="type"):
        from_haiku(lambda x: x)
    with refused("build", code="type"):
        from_equinox(Other(ONE))
    monkeypatch.setitem(sys.modules, "equinox", None)
    with troubled("equinox", code="installation"):
        from_equinox(lambda key: None)


CODE = """
import equinox as eqx
import haiku as hk
import jax
import numpy as np
from lbopt.data import Splits


class Equinox(eqx.Module):
    inner: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, outputs, key, width=8):
        first, last = jax.random.split(key)
        self.inner = eqx.nn.Linear(3, width, key=first)
        self.norm = eqx.nn.BatchNorm(width, "batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.1)
        self.head = eqx.nn.Linear(width, outputs, key=last)

    def __call__(self, x, state, key=None):
        x, state = self.norm(jax.nn.relu(self.inner(x)), state)
        return self.head(self.dropout(x, key=key)), state


def haiku(outputs, width=8):
    def net(x, is_training):
        x = jax.nn.relu(hk.Linear(width, name="inner")(x))
        x = hk.BatchNorm(True, True, 0.9)(x, is_training)
        if is_training:
            x = hk.dropout(hk.next_rng_key(), 0.1, x)
        return hk.nets.MLP([outputs], name="head")(x)

    return hk.transform_with_state(net)


def load():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 3)).astype(np.float32)
    split = {"x": x, "y": (x[:, 0] > 0).astype(np.int32)}
    return Splits(split, split, split)
"""


@pytest.mark.parametrize(
    ("name", "kernel", "shape", "mean"),
    [
        ("Equinox", "inner/weight", (5, 3), "norm/batch_state_index/0"),
        ("haiku", "head/~/linear_0/w", (5, 2), "batch_norm/~/mean_ema/average"),
    ],
)
def test_a_recipe_of_it_is_trained_evaluated_and_exported(
    name, kernel, shape, mean, tmp_path, monkeypatch, capsys
):
    (tmp_path / "net.py").write_text(CODE)
    (tmp_path / "conf.py").write_text(
        "from lbopt.config import *\n"
        "def get_config(arg):\n"
        f"    model = ModelConfig('net.py:{name}', options={{'width': 5}})\n"
        "    return TrainConfig(data='net.py:load', model=model, num_steps=60,\n"
        "                       global_batch_size=32, schedule=ScheduleConfig(0.05))\n"
    )
    monkeypatch.chdir(tmp_path)
    flags = ["--config=conf.py", "--workdir=run"]
    assert main(["train", *flags]) == 0
    assert main(["evaluate", *flags]) == 0
    scores = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert scores["validation/accuracy"] > 0.8
    assert main(["export", "--workdir=run", "--format=safetensors", "--output=out"]) == 0
    saved = load_file("out/model.safetensors")
    assert saved[f"params/{kernel}"].shape == shape
    assert np.any(saved[f"state/{mean}"] != 0)
