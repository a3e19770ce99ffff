"""Folding changes only the layout of images: layers and networks equal the unfolded ones."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiling import QUICKLY
from refusal import numbers_in, refused

import lbopt
from lbopt import replicas
from lbopt.models import EfficientNet, ResNet, Stage, _fold
from lbopt.models._fold import Fold
from lbopt.models._randomness import StochasticDepth

HEIGHT = 6
WIDTH = 24
CHANNELS = 3
OUT = 5


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).standard_normal((4, HEIGHT, WIDTH, CHANNELS)).astype(np.float32)


def test_neighbours_share_the_last_axis_slowest(images):
    columns = _fold.fold_columns(images, 4)
    examples = _fold.fold_examples(jnp.asarray(images), 2)
    for column, example in itertools.product(range(4), range(2)):
        np.testing.assert_array_equal(
            columns[..., 3 * column : 3 * column + 3], images[:, :, column::4]
        )
        np.testing.assert_array_equal(
            examples[..., 3 * example : 3 * example + 3], images[example::2]
        )
    np.testing.assert_array_equal(_fold.unfold_columns(columns, 4), images)
    np.testing.assert_array_equal(_fold.unfold_examples(examples, 2), images)


def in_float64(x, kernel, stride, padding):
    """Convolve by the definition, in float64."""
    size = kernel.shape[0]
    x = np.pad(x.astype(np.float64), ((0, 0), padding, padding, (0, 0)))
    rows, columns = ((side - size) // stride + 1 for side in x.shape[1:3])
    y = np.zeros((len(x), rows, columns, kernel.shape[-1]))
    for row, column in itertools.product(range(size), range(size)):
        part = x[:, row : row + stride * rows : stride, column : column + stride * columns : stride]
        y += part[:, :rows, :columns] @ kernel[row, column].astype(np.float64)
    return y


@pytest.mark.everyday("2-2-4", "2-1-2", "1-2-1", "1-1-4")
@pytest.mark.parametrize("columns_out", [1, 2, 4])
@pytest.mark.parametrize("columns_in", [1, 2, 4])
@pytest.mark.parametrize("stride", [1, 2])
def test_folded_columns_are_convolved_alike(images, stride, columns_in, columns_out):
    tried = 0
    for size in (1, 2, 3, 5, 7):
        for padding in {(size // 2, size // 2), (max(0, size // 2 - 1), size // 2), (0, 0)}:
            width = (WIDTH + sum(padding) - size) // stride + 1
            if (
                stride * columns_out % columns_in
                or width % columns_out
                or HEIGHT + sum(padding) < size
            ):
                continue

            kernel = (
                np.random.default_rng(size)
                .standard_normal((size, size, CHANNELS, OUT))
                .astype(np.float32)
            )
            folded = _fold.fold_columns(jnp.asarray(images), columns_in)
            found = _fold.convolve(
                folded, jnp.asarray(kernel), stride, (padding, padding), columns_in, columns_out
            )

            expected = in_float64(images, kernel, stride, padding)
            np.testing.assert_allclose(
                _fold.unfold_columns(found, columns_out), expected, rtol=1e-5, atol=2e-5
            )
            tried += 1

    assert tried >= 2 or stride * columns_out % columns_in


@pytest.mark.parametrize(("size", "stride"), [(1, 1), (3, 2)])
def test_folded_examples_are_convolved_alike(images, size, stride):
    kernel = (
        np.random.default_rng(size).standard_normal((size, size, CHANNELS, OUT)).astype(np.float32)
    )
    folded = _fold.fold_examples(jnp.asarray(images), 2)
    found = _fold.convolve(folded, jnp.asarray(kernel), stride, "SAME", examples=2)
    padding = (0, size // 2) if stride == 2 else (size // 2, size // 2)
    expected = in_float64(images, kernel, stride, padding)
    np.testing.assert_allclose(_fold.unfold_examples(found, 2), expected, rtol=1e-5, atol=2e-5)


def test_both_folds_are_convolved_alike(images):
    kernel = np.random.default_rng(9).standard_normal((3, 3, CHANNELS, OUT)).astype(np.float32)
    folded = _fold.fold_columns(_fold.fold_examples(jnp.asarray(images), 2), 4)
    found = _fold.unfold_columns(
        _fold.convolve(folded, jnp.asarray(kernel), 2, "SAME", 4, 2, examples=2), 2
    )
    np.testing.assert_allclose(
        _fold.unfold_examples(found, 2), in_float64(images, kernel, 2, (0, 1)), rtol=1e-5, atol=2e-5
    )


@pytest.mark.parametrize(
    ("stride", "columns_in", "columns_out"), [(1, 2, 2), (2, 2, 1), (2, 4, 2), (2, 1, 2), (2, 4, 4)]
)
def test_subsampling(images, stride, columns_in, columns_out):
    if columns_out == 4:
        images = np.concatenate([images, images[:, :, :8]], axis=2)
    folded = _fold.fold_columns(jnp.asarray(images), columns_in)
    found = _fold.unfold_columns(
        _fold.subsample(folded, stride, columns_in, columns_out), columns_out
    )
    np.testing.assert_array_equal(found, images[:, ::stride, ::stride])


@pytest.mark.parametrize(
    ("width", "channels", "columns"),
    [(56, 64, 2), (28, 128, 1), (57, 16, 1), (24, 16, 8), (24, 17, 4), (8, 2, 8)],
)
def test_columns_fill_the_lanes_and_divide_the_width(width, channels, columns):
    assert _fold.best_columns(width, channels) == columns


@pytest.mark.everyday("how0-*", "how1-replicas:2", "how2-tiles*")
@pytest.mark.parametrize("scope", ["global", "examples:4", "replicas:2", "local", "tiles:2x1@2x2"])
@pytest.mark.parametrize("how", [Fold(columns=4), Fold(examples=2), Fold(columns=2, examples=2)])
def test_batch_norm_sees_through_a_fold(how, scope):
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((16, 2, 4, 3)) * rng.uniform(0.5, 2, (16, 1, 1, 3))).astype(np.float32)
    weights = rng.standard_normal(x.shape).astype(np.float32)
    variables = {
        "params": {"scale": jnp.array([1.5, -0.5, 2.0]), "bias": jnp.array([0.1, 0.2, 0.3])},
        "batch_stats": {"mean": jnp.full(3, 5.0), "var": jnp.full(3, 3.0)},
    }

    def folded(array):
        return _fold.fold_columns(
            _fold.fold_examples(jnp.asarray(array), how.examples), how.columns
        )

    def total(variables, x, weights, how, train):
        module = lbopt.BatchNorm(scope, unbiased_running_var=True, fold=how)
        with replicas.tracing_for(4):
            y, state = module.apply(variables, x, not train, mutable=["batch_stats"])
        return jnp.sum(weights * jnp.tanh(y)), state

    def of(x, weights, how, train):
        run = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True), static_argnums=(3, 4))
        (value, state), (d_variables, d_x) = run(variables, x, weights, how, train)
        return value, state, d_variables["params"], d_x

    for train in (True, False):
        *expected, d_x = of(x, weights, Fold(), train)
        *found, d_folded = of(folded(x), folded(weights), how, train)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), found, expected
        )
        np.testing.assert_allclose(d_folded, folded(d_x), rtol=2e-4, atol=2e-5)


def test_a_group_holds_whole_folds():
    module = lbopt.BatchNorm("examples:2", fold=Fold(examples=4))
    variables = module.init(jax.random.key(0), jnp.ones((2, 1, 1, 12)), False)
    with refused("stats_scope", "examples:2", "mismatch") as caught:
        module.apply(variables, jnp.ones((2, 1, 1, 12)), False, mutable=["batch_stats"])
    assert numbers_in(caught)[:2] == [2, 4]


def test_stochastic_depth_drops_the_same_examples(images):
    x = jnp.ones((8, 2, 2, 3))
    rngs = {"example": jax.random.key(1)}
    expected = StochasticDepth(0.5).apply({}, x, True, rngs=rngs)
    found = StochasticDepth(0.5, 4).apply({}, _fold.fold_examples(x, 4), True, rngs=rngs)
    assert 0 < np.count_nonzero(expected[:, 0, 0, 0]) < 8
    np.testing.assert_array_equal(_fold.unfold_examples(found, 4), expected)


STAGES = (Stage(3, 1, 1, 16, 2), Stage(5, 2, 1, 64, 2))
NETWORKS = {
    "bottleneck": (
        functools.partial(ResNet, depths=(1, 1), widths=(128, 256), num_classes=5),
        {"fold_columns": True},
    ),
    "space to depth": (
        functools.partial(
            ResNet,
            depths=(1,),
            widths=(64,),
            bottleneck=False,
            num_classes=5,
            stem="space_to_depth",
        ),
        {"fold_columns": True},
    ),
    "efficientnet": (
        functools.partial(
            EfficientNet,
            stages=STAGES,
            head_width=64,
            num_classes=5,
            stochastic_depth_rate=0.4,
        ),
        {"fold_examples": 2},
    ),
}


def assert_gradients(found, expected):
    """Every leaf agrees to 1e-4 of the norm of the whole gradient."""
    size = optax.global_norm(expected)
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        jax.tree.map(lambda a, b: a - b, found, expected)
    ):
        assert np.linalg.norm(leaf) < 1e-4 * size, jax.tree_util.keystr(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_the_same_function(name):
    """With the same parameters, logits, statistics and gradients differ by rounding alone."""
    make, folding = NETWORKS[name]
    x = jax.random.normal(jax.random.key(0), (4, 16, 16, 3))
    init = jax.jit(
        lambda module: module.init(jax.random.key(1), x[:1], train=True),
        static_argnums=0,
        compiler_options=QUICKLY,
    )
    variables = init(make())
    others = init(make(**folding))
    jax.tree.map(np.testing.assert_array_equal, variables, others)
    keys = iter(jax.random.split(jax.random.key(2), 500))
    params = jax.tree.map(
        lambda leaf: leaf + 0.1 * jax.random.normal(next(keys), leaf.shape), variables["params"]
    )

    def results(module):
        def loss(params):
            inputs = {**variables, "params": params}
            rngs = {"example": jax.random.key(3)}
            logits, state = module.apply(inputs, x, train=True, mutable=["batch_stats"], rngs=rngs)
            return jnp.sum(jnp.sin(logits)), (logits, state)

        gradients, (logits, state) = jax.grad(loss, has_aux=True)(params)
        evaluated = module.apply({**state, "params": params}, x, train=False)
        return logits, state, evaluated, gradients

    plain, folded = (
        jax.jit(functools.partial(results, make(**options))).lower() for options in ({}, folding)
    )
    assert plain.as_text() != folded.as_text(), "folding does something"
    plain, folded = (lowered.compile(compiler_options=QUICKLY)() for lowered in (plain, folded))
    *expected, d_expected = plain
    *found, d_found = folded
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected
    )
    assert_gradients(d_found, d_expected)


@pytest.mark.parametrize(("num_examples", "axis_name"), [(16, None), (4, "data")])
def test_examples_fold_within_a_replica(num_examples, axis_name):
    """tests/parallel/test_randomness.py has whole training steps that fold."""
    with replicas.tracing_for(4, axis_name):
        assert _fold.fold_examples(jnp.ones((num_examples, 1, 1, 3)), 4).shape == (
            num_examples // 4,
            1,
            1,
            12,
        )
        with refused("fold_examples", 8, "value") as caught:
            _fold.fold_examples(jnp.ones((num_examples, 1, 1, 3)), 8)
        assert 4 in numbers_in(caught)
        with refused("fold_examples", 0, "value"):
            _fold.fold_examples(jnp.ones((num_examples, 1, 1, 3)), 0)


def test_evaluation_takes_any_number_of_examples():
    network = EfficientNet(stages=STAGES[:1], stem_width=8, head_width=16, fold_examples=8)
    shape = jax.eval_shape(
        lambda: network.init_with_output(jax.random.key(0), jnp.zeros((3, 16, 16, 3)), train=False)[
            0
        ]
    )
    assert shape.shape == (3, 1000)


def test_a_conv_keeps_the_parameters_of_flax(images):
    module = _fold.Conv(OUT, 3, 2, "SAME", nn.initializers.lecun_normal(), jnp.float32)
    theirs = nn.Conv(OUT, (3, 3), (2, 2), use_bias=False)
    variables = theirs.init(jax.random.key(0), images)
    np.testing.assert_allclose(
        module.apply(variables, images), theirs.apply(variables, images), rtol=1e-6, atol=1e-6
    )
