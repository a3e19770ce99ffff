"""ResNet and EfficientNet: initialisation, dtypes, the folded stem, unsuitable images."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import QUICKLY
from refusal import refused

import lbopt
from lbopt.models import ResNet, _efficientnet, _stem, from_linen, make_resnet

SMALL = {
    "basic": ResNet(depths=(1, 1), widths=(8, 16), bottleneck=False, stem_width=8, num_classes=5),
    "bottleneck": ResNet(depths=(2, 1), widths=(16, 32), stem="conv3", stem_width=8, num_classes=5),
    "efficientnet": _efficientnet.EfficientNet(
        stages=(_efficientnet.Stage(3, 1, 1, 16, 1), _efficientnet.Stage(5, 2, 4, 16, 2)),
        stem_width=8,
        head_width=32,
        num_classes=5,
    ),
}


@pytest.fixture(scope="module")
def images():
    return jax.random.normal(jax.random.key(9), (4, 16, 16, 3))


@functools.cache
def drawn(name):
    """Return (params, model_state) of a small network."""
    init = jax.jit(from_linen(SMALL[name]).init, compiler_options=QUICKLY)
    return jax.device_get(init(jax.random.key(1), jnp.zeros((1, 16, 16, 3))))


def leaves(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


@pytest.mark.parametrize("name", SMALL)
def test_norms_and_biases_start_plain(name):
    params, state = drawn(name)
    last = {"basic": "norm2", "bottleneck": "norm3", "efficientnet": "none"}[name]
    zeroed = 0
    for path, leaf in leaves(params).items():
        if path.endswith("bias"):
            assert not np.any(leaf), path
        elif path.endswith("scale"):
            zero = f"/{last}/" in path
            zeroed += zero
            np.testing.assert_array_equal(leaf, np.full_like(leaf, 0 if zero else 1), err_msg=path)
    assert zeroed == {"basic": 2, "bottleneck": 3, "efficientnet": 0}[name], "one for each block"
    for path, leaf in leaves(state).items():
        assert np.all(leaf == (1 if path.endswith("var") else 0)), path


def assert_deviation(kernel, expected):
    """The standard deviation is within 3 %, and the mean within 5 standard errors of zero."""
    kernel = np.asarray(kernel, np.float64)
    assert kernel.size >= 4000
    assert abs(kernel.std() / expected - 1) < 0.03
    assert abs(kernel.mean()) < 5 * expected / np.sqrt(kernel.size)


class Evaluated(nn.Module):
    """A module that is called in evaluation mode."""

    network: nn.Module

    def __call__(self, x):
        return self.network(x, False)


def initialised(module, shape):
    return jax.jit(module.init, compiler_options=QUICKLY)(jax.random.key(3), jnp.zeros(shape))[
        "params"
    ]


@pytest.mark.parametrize("size", [1, 3, 7])
def test_resnet_convolutions_are_he_normal_by_fan_out(size):
    """The distribution is normal and not truncated at two deviations."""
    kernel = initialised(_stem.conv(64, size, 1, jnp.float32, "conv"), (1, 8, 8, 64))["kernel"]
    assert kernel.shape == (size, size, 64, 64)
    deviation = np.sqrt(2 / (size * size * 64))
    assert_deviation(kernel, deviation)
    assert np.abs(kernel).max() > 3 * deviation


def test_folded_stem_is_drawn_as_the_plain_one():
    plain = initialised(_stem.WideConv(64), (1, 8, 8, 3))["kernel"]
    folded = initialised(_stem.WideConv(64, folded=True), (1, 8, 8, 3))["kernel"]
    assert plain.shape == folded.shape == (7, 7, 3, 64)
    for kernel in (plain, folded):
        assert_deviation(kernel, np.sqrt(2 / (49 * 64)))


def test_heads():
    """ResNet's head is normal(0, 0.01); EfficientNet's is uniform within 1 / sqrt(classes)."""
    networks = {
        "resnet": ResNet(
            depths=(1,),
            widths=(128,),
            bottleneck=False,
            stem="conv3",
            stem_width=8,
            num_classes=200,
        ),
        "efficientnet": _efficientnet.EfficientNet(
            stages=(_efficientnet.Stage(3, 1, 1, 16, 1),),
            stem_width=8,
            head_width=256,
            num_classes=64,
        ),
    }

    drawn_heads = {
        name: initialised(Evaluated(module), (1, 4, 4, 3))["network"]["head"]["kernel"]
        for name, module in networks.items()
    }

    assert_deviation(drawn_heads["resnet"], 0.01)
    kernel = drawn_heads["efficientnet"]
    assert_deviation(kernel, 1 / np.sqrt(64) / np.sqrt(3))
    assert 0.999 / np.sqrt(64) < np.abs(kernel).max() <= 1 / np.sqrt(64)


def test_efficientnet_kernels():
    """The variance is 2 / fan_out; for a depthwise kernel it is 2 / area."""
    block = _efficientnet.Block(
        _efficientnet.Stage(5, 1, 6, 96, 1),
        "SAME",
        0.25,
        False,
        0.0,
        lbopt.BatchNorm,
        1,
        jnp.float32,
    )
    params = initialised(Evaluated(block), (1, 4, 4, 64))["network"]
    assert_deviation(params["expand_conv"]["kernel"], np.sqrt(2 / 384))
    assert_deviation(params["project_conv"]["kernel"], np.sqrt(2 / 96))
    assert params["depthwise_conv"]["kernel"].shape == (5, 5, 1, 384)
    assert_deviation(params["depthwise_conv"]["kernel"], np.sqrt(2 / 25))
    assert params["squeeze_excite"]["reduce"]["kernel"].shape == (384, 16)
    assert_deviation(params["squeeze_excite"]["reduce"]["kernel"], np.sqrt(2 / 16))
    assert_deviation(params["squeeze_excite"]["expand"]["kernel"], np.sqrt(2 / 384))


def outputs(module, variables, images, train=False):
    params, state = variables
    model = from_linen(module)
    run = jax.jit(
        lambda images: model.apply(params, state, images, train, jax.random.key(0)),
        compiler_options=QUICKLY,
    )
    return jax.device_get(run(images))


def shaken(tree):
    """Move every leaf away from zero and one; variances stay positive."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: leaf + rng.uniform(0.05, 0.3, leaf.shape).astype(np.float32), tree
    )


@pytest.mark.parametrize("train", [True, False])
def test_space_to_depth_is_conv7(train, images):
    """The parameters, logits and statistics are equal, also for images folded beforehand."""
    plain = SMALL["basic"]
    variables = shaken(drawn("basic"))
    folded = plain.clone(stem="space_to_depth")
    expected = outputs(plain, variables, images, train)
    for x in (images, _stem.space_to_depth(images)):
        found = outputs(folded, variables, x, train)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected
        )
    assert np.std(expected[0], axis=0).min() > 1e-3


def test_folding_puts_rows_before_columns_before_channels(images):
    folded = np.asarray(_stem.space_to_depth(images))
    assert folded.shape == (4, 8, 8, 12)
    for row, column, channel in np.ndindex(2, 2, 3):
        np.testing.assert_array_equal(
            folded[..., 6 * row + 3 * column + channel], images[:, row::2, column::2, channel]
        )


def test_gradient_of_the_folded_stem_is_that_of_the_plain_one():
    x = jax.random.normal(jax.random.key(0), (2, 10, 8, 3))
    modules = (_stem.WideConv(4), _stem.WideConv(4, folded=True))
    kernel = jax.random.normal(jax.random.key(1), (7, 7, 3, 4))

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def gradients(kernel, x):
        def loss(kernel, x, module):
            return jnp.sum(jnp.sin(module.apply({"params": {"kernel": kernel}}, x)))

        return [jax.grad(loss, (0, 1))(kernel, x, module) for module in modules]

    plain, folded = gradients(kernel, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), folded, plain)


@pytest.mark.parametrize("name", SMALL)
def test_bf16_keeps_parameters_statistics_and_logits_in_fp32(name, images):
    narrow = SMALL[name].clone(dtype=jnp.bfloat16)
    variables = shaken(drawn(name))
    shapes = jax.eval_shape(from_linen(narrow).init, jax.random.key(0), images)
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype(jnp.float32)}
    options = {"dropout_rate": 0.0, "stochastic_depth_rate": 0.0} if name == "efficientnet" else {}
    ours, theirs = (
        outputs(module.clone(**options), variables, images, True)
        for module in (narrow, SMALL[name])
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(ours)} == {np.dtype(np.float32)}
    gap = np.abs(ours[0] - theirs[0]).max() / np.abs(theirs[0]).max()
    assert 1e-5 < gap < 0.05, gap
    for one, other in zip(jax.tree.leaves(ours[1]), jax.tree.leaves(theirs[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.05, atol=0.05)


FOLDING = make_resnet("50", stem="space_to_depth")


def traced(module, shape):
    return jax.eval_shape(from_linen(module).init, jax.random.key(0), jnp.zeros(shape))


@pytest.mark.parametrize(
    ("module", "shape", "field", "value", "code", "fact"),
    [
        (make_resnet("50"), (1, 31, 64, 3), "image_size", (31, 64), "mismatch", "32 x 32"),
        (
            make_resnet("18", stem="conv3"),
            (1, 8, 7, 3),
            "image_size",
            (8, 7),
            "mismatch",
            "8 x 8",
        ),
        (FOLDING, (1, 15, 16, 12), "image_size", (30, 32), "mismatch", "32 x 32"),
        (FOLDING, (1, 33, 32, 3), "image_size", (33, 32), "value", "'space_to_depth'"),
        (FOLDING, (1, 32, 32, 13), "channels", 13, "value", "4"),
        (
            make_resnet("50", stem="conv5"),
            (1, 32, 32, 3),
            "stem",
            "conv5",
            "choice",
            "conv3, conv7, space_to_depth",
        ),
        (
            _efficientnet.make_efficientnet("b0"),
            (1, 31, 32, 3),
            "image_size",
            (31, 32),
            "mismatch",
            "32 x 32",
        ),
    ],
)
def test_what_cannot_be_is_refused(module, shape, field, value, code, fact):
    with refused(field, value, code) as caught:
        traced(module, shape)
    assert fact in caught.value.reason


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (SMALL["basic"], (2, 8, 8)),
        (SMALL["bottleneck"], (2, 2, 2, 1)),
        (SMALL["efficientnet"], (2, 5, 7)),
        (make_resnet("18", num_classes=5), (2, 33, 47, 3)),
    ],
)
def test_images_of_one_channel_odd_sides_and_no_pixel_to_spare(module, shape):
    variables = traced(module, shape)
    logits, _ = jax.eval_shape(
        lambda variables, x: from_linen(module).apply(*variables, x, False),
        variables,
        jnp.zeros(shape),
    )
    assert (logits.shape, logits.dtype) == ((2, 5), jnp.float32)


def test_symmetric_blocks_are_those_with_an_odd_side():
    """Padding given per block equals the padding that "SAME" computes from the input's sides."""
    network = _efficientnet.EfficientNet(
        stages=(_efficientnet.Stage(3, 2, 1, 8, 1), _efficientnet.Stage(5, 2, 2, 8, 1)),
        stem_width=8,
        head_width=8,
        num_classes=3,
        dropout_rate=0.0,
    )
    x = jax.random.normal(
        jax.random.key(0), (2, 20, 20, 3)
    )  # 20 -> 10 -> 5 -> 3: the second block's input is odd
    assert _efficientnet.symmetric_blocks(network, 20) == (1,)
    variables = jax.jit(from_linen(network).init, compiler_options=QUICKLY)(jax.random.key(0), x)
    variables = shaken(jax.device_get(variables))
    stated = network.clone(symmetric_blocks=(1,))
    np.testing.assert_allclose(
        outputs(stated, variables, x)[0], outputs(network, variables, x)[0], rtol=1e-5, atol=1e-6
    )
    assert _efficientnet.symmetric_blocks(_efficientnet.make_efficientnet("b0"), 224) == ()
