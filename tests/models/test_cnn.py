"""The CNN pools before it normalizes; compared with the plain order of layers, op by op."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lbopt.models import CNN

WIDTHS = (6, 12)
HIDDEN = 16
TRIALS = 3
BATCH = 16
MODEL = CNN(widths=WIDTHS, hidden=HIDDEN)
BY_XLA = MODEL.clone(by_patches=False)


class Plain(nn.Module):
    """Flax's layers in the order of the model's definition."""

    @nn.compact
    def __call__(self, x, train):
        x = x[..., None]
        for width in WIDTHS:
            x = nn.Conv(width, (3, 3), use_bias=False)(x)
            x = nn.BatchNorm(not train, momentum=0.9)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(HIDDEN)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


@pytest.fixture(scope="module", autouse=True)
def _as_in_training(op_by_op, optimized):
    """Compile with the fusions that training uses; they are what these tests compare.

    There is nothing to fuse in one operation, so `op_by_op` comes first, compiled quickly.
    """


@pytest.fixture(scope="module")
def trials():
    """Return variables, images and labels of several trials.

    Scales have both signs; biases and statistics differ from zero and one.
    """
    rng = np.random.default_rng(0)

    def trained(path, leaf):
        shape = (TRIALS, *leaf.shape)
        values = {
            "kernel": lambda: rng.standard_normal(shape) / np.sqrt(np.prod(leaf.shape[:-1])),
            "scale": lambda: rng.choice([-1.0, 1.0], shape) * rng.uniform(0.5, 2, shape),
            "bias": lambda: 0.3 * rng.standard_normal(shape),
            "mean": lambda: rng.standard_normal(shape),
            "var": lambda: rng.uniform(0.5, 2, shape),
        }
        return np.float32(values[path[-1].key]())

    images = rng.random((TRIALS, BATCH, 8, 8)).astype(np.float32)
    shapes = jax.eval_shape(functools.partial(MODEL.init, train=True), jax.random.key(0), images[0])
    variables = jax.tree_util.tree_map_with_path(trained, shapes)
    return variables, images, rng.integers(0, 10, (TRIALS, BATCH))


def differentiated(module, variables, images, labels, train=True):
    """Return the loss's gradients by parameters and images, the logits, and the new statistics."""

    def loss(params, images):
        inputs = {"params": params, "batch_stats": variables["batch_stats"]}
        logits, stats = module.apply(inputs, images, train=train, mutable=["batch_stats"])
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
        return -jnp.mean(picked), (logits, stats)

    return jax.grad(loss, (0, 1), has_aux=True)(variables["params"], images)


def one_of(trials, number):
    return jax.tree.map(lambda leaf: leaf[number], trials)


@pytest.fixture(scope="module")
def op_by_op(trials):
    """Return the gradient of each trial by its parameters, compiling each operation separately."""
    with jax.disable_jit():
        return [differentiated(MODEL, *one_of(trials, one))[0][0] for one in range(TRIALS)]


def renamed(tree, old, new):
    """Return nested dicts with `old` replaced in their keys."""
    if not isinstance(tree, dict):
        return tree
    return {name.replace(old, new): renamed(inside, old, new) for name, inside in tree.items()}


@pytest.mark.everyday("train by XLA")
@pytest.mark.parametrize(
    ("model", "train"),
    [(MODEL, True), (MODEL, False), (BY_XLA, True)],
    ids=["train", "evaluate", "train by XLA"],
)
def test_equal_to_the_plain_order_of_layers(trials, model, train):
    differentiate = jax.jit(differentiated, static_argnums=(0, 4))
    for number in range(TRIALS):
        variables, images, labels = one_of(trials, number)
        ours = differentiate(model, variables, images, labels, train)
        (d_params, d_images), aux = differentiate(
            Plain(), renamed(variables, "PatchConv", "Conv"), images, labels, train
        )
        plain = (renamed(d_params, "Conv", "PatchConv"), d_images), aux
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, plain
        )


@pytest.mark.everyday("by patches-vmap-default", "by XLA-vmap-default")
@pytest.mark.parametrize(
    "options", [{}, {"xla_backend_optimization_level": 0}], ids=["default", "level 0"]
)
@pytest.mark.parametrize(
    "batched", [jax.lax.map, lambda fn, inputs: jax.vmap(fn)(inputs)], ids=["map", "vmap"]
)
@pytest.mark.parametrize("model", [MODEL, BY_XLA], ids=["by patches", "by XLA"])
def test_compiled_for_several_trials_the_gradient_is_the_one_op_by_op(
    trials, op_by_op, model, batched, options
):
    """XLA may compute a cheap value twice; the values compared must be equal both times."""
    program = jax.jit(lambda inputs: batched(lambda one: differentiated(model, *one)[0][0], inputs))
    found = program.lower(trials).compile(options)(trials)
    for number, expected in enumerate(op_by_op):
        for layer in ("PatchConv_0", "PatchConv_1"):
            ours = found[layer]["kernel"][number]
            theirs = expected[layer]["kernel"]
            by_channel = np.abs(ours - theirs).max((0, 1, 2)) / np.abs(theirs).max()
            assert by_channel.max() < 1e-4, (layer, number, by_channel)
