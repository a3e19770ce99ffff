"""The convolution, CNN and LSTM against independent implementations; their shapes and dtypes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

from lbopt.models import LSTMClassifier, _cnn, _conv, _pool, from_linen


@pytest.mark.parametrize(
    ("size", "shape", "max_pool"),
    [
        (3, (2, 8, 8, 3), False),
        (1, (2, 4, 4, 2), False),
        (5, (2, 6, 4, 2), False),
        (5, (2, 1, 2, 1), False),
        (1, (2, 4, 4, 2), True),
        (3, (2, 8, 8, 3), True),
        (5, (2, 2, 4, 1), True),
        (7, (2, 6, 4, 2), True),
    ],
)
def test_patch_conv_equals_flax_conv(size, shape, max_pool):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape)
    batch, height, width, _ = shape
    tile = 2 if max_pool else 1
    weights = rng.normal(size=(batch, height // tile, width // tile, 4))
    variables = {"params": {"kernel": rng.normal(size=(size, size, shape[-1], 4))}}

    def loss(variables, x, module):
        y = module.apply(variables, x)
        y = nn.max_pool(y, (2, 2), (2, 2)) if max_pool and module is theirs else y
        return jnp.sum(weights * jnp.sin(y)), y

    with jax.enable_x64(True):
        ours = _conv.PatchConv(4, size, dtype=jnp.float64, max_pool=max_pool)
        theirs = nn.Conv(4, (size, size), use_bias=False)
        shapes = jax.eval_shape(ours.init, jax.random.key(0), x)
        assert shapes["params"]["kernel"].shape == (size, size, shape[-1], 4)

        differentiate = jax.jit(jax.grad(loss, (0, 1), has_aux=True), static_argnums=2)
        results = [differentiate(variables, x, module) for module in (ours, theirs)]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-12, 1e-12), *results)


def test_patch_conv_computes_in_the_asked_dtype():
    x = jnp.ones((2, 4, 4, 1))
    variables = _conv.PatchConv(4, dtype=jnp.bfloat16).init(jax.random.key(0), x)
    assert variables["params"]["kernel"].dtype == jnp.float32
    assert _conv.PatchConv(4, dtype=jnp.bfloat16).apply(variables, x).dtype == jnp.bfloat16
    assert _conv.PatchConv(4).apply(variables, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def described(tree):
    return {
        name: (leaf.shape, leaf.dtype)
        for name, leaf in jax.tree_util.tree_leaves_with_path(dict(tree))
    }


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "module",
    [_cnn.CNN(), _cnn.CNN(7, widths=(4,)), LSTMClassifier(), LSTMClassifier(7, hidden=5)],
)
def test_shapes_and_dtypes(module, dtype):
    module = module.clone(dtype=dtype)
    model = from_linen(module)
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((2, 8, 8)))
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}
    for train in (True, False):
        for shape in ((6, 8, 8), (6, 8, 8, 1)):
            images = jax.ShapeDtypeStruct(shape, jnp.float32)
            logits, model_state = jax.eval_shape(
                lambda params, state, x, train=train: model.apply(params, state, x, train),
                *variables,
                images,
            )
            assert (logits.shape, logits.dtype) == ((6, module.num_classes), jnp.float32)
            assert described(model_state) == described(variables[1])


def test_parameter_counts():
    zeros = jnp.zeros((2, 8, 8))
    params, state = jax.eval_shape(from_linen(_cnn.CNN()).init, jax.random.key(0), zeros)
    # Two convolutions, a scale and a bias per channel, a hidden layer of 2 x 2 x 32 inputs, the
    # head.
    assert count(params) == 9 * 16 + 9 * 16 * 32 + 2 * (16 + 32) + (128 * 64 + 64) + (64 * 10 + 10)
    assert count(state) == 2 * (16 + 32)
    params, state = jax.eval_shape(from_linen(LSTMClassifier()).init, jax.random.key(0), zeros)
    # Four gates from 8 columns and 64 states with one bias each, and the head.
    assert count(params) == 4 * (8 * 64 + 64 * 64 + 64) + (64 * 10 + 10)
    assert state == {}


@pytest.mark.parametrize("module", [_cnn.CNN(widths=(4,), hidden=6), LSTMClassifier(hidden=5)])
def test_a_channel_axis_of_one_makes_no_difference(module):
    model = from_linen(module)
    images = jax.random.normal(jax.random.key(1), (3, 2, 2))
    params, state = model.init(jax.random.key(0), images)
    flat, _ = model.apply(params, state, images, True)
    deep, _ = model.apply(params, state, images[..., None], True)
    assert np.std(flat) > 0
    np.testing.assert_array_equal(flat, deep)


@pytest.mark.parametrize(
    ("shape", "widths"), [((2, 8, 8), (4,) * 4), ((2, 6, 6), (4, 4)), ((2, 8, 7), (4,))]
)
def test_an_image_that_cannot_be_halved_is_refused(shape, widths):
    with refused("widths", code="mismatch"):
        _cnn.CNN(widths=widths).init(jax.random.key(0), jnp.zeros(shape), train=True)


def test_cnn_equals_its_layers_at_inference():
    """Compare with float64 NumPy: convolution, given statistics, ReLU and pooling."""
    model = from_linen(_cnn.CNN(widths=(3,), hidden=5))
    x = np.random.default_rng(0).standard_normal((4, 4, 4)).astype(np.float32)
    params, state = model.init(jax.random.key(0), x)
    state = {
        "batch_stats": {
            "BatchNorm_0": {
                "mean": np.array([0.1, -0.2, 0.3], np.float32),
                "var": np.array([0.5, 1.5, 2.0], np.float32),
            }
        }
    }
    logits, _ = model.apply(params, state, x, False)

    p, stats = (
        jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)
        for tree in (params, state["batch_stats"]["BatchNorm_0"])
    )
    padded = np.pad(x.astype(np.float64), ((0, 0), (1, 1), (1, 1)))
    h = np.zeros((4, 4, 4, 3))
    for row, column in np.ndindex(4, 4):
        h[:, row, column] = np.tensordot(
            padded[:, row : row + 3, column : column + 3], p["PatchConv_0"]["kernel"][:, :, 0], 2
        )
    h = (h - stats["mean"]) / np.sqrt(stats["var"] + 1e-5)
    h = np.maximum(h, 0)
    h = np.maximum.reduce([h[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]).reshape(4, -1)
    h = np.maximum(h @ p["Dense_0"]["kernel"], 0)
    np.testing.assert_allclose(logits, h @ p["Dense_1"]["kernel"], rtol=1e-5, atol=1e-5)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_lstm_equals_its_equations():
    """The last h is classified.

    i, f, o = sigmoid and g = tanh of W x + U h + b; c = f c + i g; h = o tanh(c).
    """
    model = from_linen(LSTMClassifier(hidden=5))
    x = np.random.default_rng(0).standard_normal((3, 6, 4)).astype(np.float32)
    params, state = model.init(jax.random.key(0), x)
    params = jax.tree.map(
        lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), params
    )  # biases are random too
    logits, _ = jax.jit(lambda params, x: model.apply(params, state, x, True))(params, x)

    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    cell = p["OptimizedLSTMCell_0"]
    c = np.zeros((3, 5))
    h = np.zeros((3, 5))
    for row in np.moveaxis(x.astype(np.float64), 1, 0):
        gates = {
            gate: row @ cell["i" + gate]["kernel"]
            + h @ cell["h" + gate]["kernel"]
            + cell["h" + gate]["bias"]
            for gate in "ifgo"
        }
        c = sigmoid(gates["f"]) * c + sigmoid(gates["i"]) * np.tanh(gates["g"])
        h = sigmoid(gates["o"]) * np.tanh(c)
    np.testing.assert_allclose(
        logits, h @ p["Dense_0"]["kernel"] + p["Dense_0"]["bias"], rtol=1e-5, atol=1e-6
    )


def test_the_gradient_of_the_maximum_is_shared_evenly_and_never_undefined():
    x = np.maximum(np.random.default_rng(0).integers(-3, 3, (4, 6, 6, 3)), 0).astype(
        np.float32
    )  # many ties
    weights = np.random.default_rng(1).normal(size=(4, 3, 3, 3)).astype(np.float32)

    def plain(x):
        return jnp.sum(x.reshape(4, 3, 2, 3, 2, 3).max(axis=(2, 4)) * weights)

    def ours(x):
        return jnp.sum(_pool.max_pool(x) * weights)

    np.testing.assert_array_equal(jax.grad(ours)(x), jax.grad(plain)(x))
    (pooled,) = _pool._backward((x, jnp.full((4, 3, 3, 3), 0.5)), weights)
    assert not np.any(pooled)  # no element equals the maximum, so none gets a gradient
