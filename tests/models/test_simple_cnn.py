"""The Simple CNN against its layers in PyTorch, forward and backward, and its published size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

from lbopt.config import ModelConfig
from lbopt.models import SimpleCNN, from_linen, make_simple_cnn
from lbopt.recipes._networks import make_network

torch = pytest.importorskip("torch")
F = torch.nn.functional


def shapes_of(module, images):
    return jax.eval_shape(functools.partial(module.init, train=True), jax.random.key(0), images)


def drawn(module, images, seed=0):
    """Return parameters of which none is zero, in float32."""
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        scale = 0.1 if path[-1].key == "bias" else np.prod(shape.shape[:-1]) ** -0.5
        return np.float32(scale * rng.standard_normal(shape.shape))

    return jax.tree_util.tree_map_with_path(leaf, shapes_of(module, images)["params"])


def theirs(params, images, labels):
    """Return logits, and the gradient of the mean cross entropy, in float64.

    Layers have PyTorch's order: convolution with bias, ReLU, pooling.
    """
    wide = jax.tree.map(
        lambda leaf: torch.tensor(np.asarray(leaf, np.float64), requires_grad=True), params
    )
    x = torch.tensor(np.asarray(images, np.float64))[:, None]
    for name in ("conv0", "conv1"):
        kernel = wide[name]["kernel"].permute(3, 2, 0, 1)
        x = F.max_pool2d(torch.relu(F.conv2d(x, kernel, wide[name]["bias"], padding=2)), 2)
    x = x.permute(0, 2, 3, 1).flatten(1)
    x = torch.relu(x @ wide["dense"]["kernel"] + wide["dense"]["bias"])
    logits = x @ wide["head"]["kernel"] + wide["head"]["bias"]
    F.cross_entropy(logits, torch.tensor(labels)).backward()
    return logits.detach().numpy(), jax.tree.map(lambda leaf: leaf.grad.numpy(), wide)


@pytest.mark.parametrize(("by_patches", "batched"), [(True, jax.vmap), (True, None), (False, None)])
def test_logits_and_gradients_are_those_of_pytorch(by_patches, batched):
    """Of two trials, side by side or in a loop, where a compiler might round a maximum twice."""
    module = make_simple_cnn(0.125, by_patches=by_patches)
    rng = np.random.default_rng(1)
    images = rng.random((2, 4, 12, 12)).astype(np.float32)
    labels = rng.integers(0, 10, (2, 4))
    params = [drawn(module, images[0], seed) for seed in range(2)]

    def loss(params, images, labels):
        logits = module.apply({"params": params}, images, train=False)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
        return -jnp.mean(picked), logits

    def one(trial):
        return jax.grad(loss, has_aux=True)(*trial)

    trials = (jax.tree.map(lambda *leaves: np.stack(leaves), *params), images, labels)
    run = batched(one) if batched else lambda trials: jax.lax.map(one, trials)
    gradients, logits = jax.jit(run)(trials)
    for number in range(2):
        wanted, by_params = theirs(params[number], images[number], labels[number])
        np.testing.assert_allclose(logits[number], wanted, rtol=1e-4, atol=1e-5)
        for layer, leaves in by_params.items():
            for name, leaf in leaves.items():
                ours = gradients[layer][name][number]
                error = np.abs(ours - leaf).max() / np.abs(leaf).max()
                assert error < 1e-4, (layer, name)


def test_dropout_lies_between_the_hidden_layer_and_the_head():
    """With the identity as head, logits are what the head sees."""
    module = SimpleCNN(num_classes=16, widths=(2,), hidden=16)
    images = np.random.default_rng(0).random((64, 4, 4)).astype(np.float32)
    params = drawn(module, images)
    params["head"] = {"kernel": np.eye(16, dtype=np.float32), "bias": np.zeros(16, np.float32)}
    params["dense"]["bias"] += 1
    model = from_linen(module)
    hidden, _ = model.apply(params, {}, images, False)
    dropped, _ = model.apply(params, {}, images, True, jax.random.key(0))
    kept = dropped != 0
    alive = hidden > 0
    assert alive.mean() > 0.5
    assert 0.55 < kept[alive].mean() < 0.65
    np.testing.assert_allclose(dropped[kept], hidden[kept] / 0.6, rtol=1e-4)


@pytest.mark.parametrize(
    ("width", "widths", "hidden"), [(None, (32, 64), 1024), (0.25, (8, 16), 256)]
)
def test_parameter_counts(width, widths, hidden):
    """Those of the layers in zalandoresearch/fashion-mnist@55506a9:benchmark/convnet.py."""
    network = make_network(ModelConfig("simple_cnn", width_coefficient=width), outputs=10)
    leaves = jax.tree.leaves(shapes_of(network, jnp.zeros((1, 28, 28))))
    inputs = (1, *widths)
    convolutions = sum((25 * n + 1) * m for n, m in zip(inputs, widths, strict=False))
    rest = (7 * 7 * widths[-1] + 1) * hidden + (hidden + 1) * 10
    assert sum(leaf.size for leaf in leaves) == convolutions + rest
    if width is None:
        assert convolutions + rest == 3_274_634


def test_kernels_start_uniform_within_glorot_s_bound_and_biases_at_zero():
    params = SimpleCNN(widths=(4, 8), hidden=16).init(
        jax.random.key(0), jnp.zeros((1, 8, 8)), train=False
    )["params"]
    fans = {"conv0": (25, 100), "conv1": (100, 200), "dense": (32, 16), "head": (16, 10)}
    for layer, (fan_in, fan_out) in fans.items():
        bound = np.sqrt(6 / (fan_in + fan_out))
        assert 0.8 * bound < np.abs(params[layer]["kernel"]).max() <= bound
        assert not params[layer]["bias"].any()


def test_an_image_that_cannot_be_halved_is_refused():
    with refused("image_size", (28, 30), "mismatch"):
        shapes_of(SimpleCNN(), jnp.zeros((1, 28, 30)))
