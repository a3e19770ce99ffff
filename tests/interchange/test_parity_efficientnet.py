"""EfficientNet agrees with `transformers` on the same weights, in evaluation and training."""

import functools

import jax
import numpy as np
import pytest
import torch_networks as torch_side

from lbopt.models import EFFICIENTNET_SIZES, EfficientNet, make_efficientnet, symmetric_blocks

B0 = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}
B2 = {"width_coefficient": 1.1, "depth_coefficient": 1.2, "hidden_dim": 1408}
PADDING = {
    "b0": (),
    "b1": (16,),
    "b2": (5, 8, 16),
    "b3": (5, 18),
    "b4": (6,),
    "b5": (13, 27),
    "b6": (31,),
    "b7": (18,),
}
"""`depthwise_padding` in the configs of the published weights (google/efficientnet-b0 to b7)."""
PARAMETERS = {"b0": 5_288_548, "b1": 7_794_184, "b2": 9_109_994, "b5": 30_389_784}
"""Parameter counts of torchvision's and Keras' networks with 1000 classes."""


@pytest.mark.parametrize("size", PADDING)
def test_padding_follows_from_the_image_size(size):
    shape = EFFICIENTNET_SIZES[size]
    assert symmetric_blocks(make_efficientnet(size), shape.image_size) == PADDING[size]


@pytest.mark.parametrize("size", PARAMETERS)
def test_published_sizes(size):
    x = jax.ShapeDtypeStruct((1, 64, 64, 3), np.float32)
    shapes = jax.eval_shape(
        functools.partial(make_efficientnet(size).init, train=False), jax.random.key(0), x
    )
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes["params"])) == PARAMETERS[size]


def _slim(side, depth=0.1):
    """Return a PyTorch network; with depth .1 it has one block per stage, with .5 up to two."""
    shape = {"width_coefficient": 0.25, "depth_coefficient": depth}
    padding = symmetric_blocks(EfficientNet(**shape), side)
    return torch_side.efficientnet(**shape, hidden_dim=320, depthwise_padding=list(padding))


# At side 64 all sides are even; at the others, some of the four strided blocks see odd ones.
@pytest.mark.parametrize(("side", "odd"), [(64, 0), (68, 3), (86, 2)])
def test_evaluation(side, odd, moved, evaluated):
    model = _slim(side)
    module, variables = moved(model)
    assert len(module.symmetric_blocks) == odd
    x = torch_side.images(side)
    theirs = torch_side.classify(model, x)
    assert torch_side.spread(theirs) > 0.05
    np.testing.assert_allclose(evaluated(module, variables, x), theirs, rtol=0, atol=1e-4)


def test_another_size_than_the_list_is_for(moved, evaluated):
    model = _slim(64)
    module, variables = moved(model)
    x = torch_side.images(68)
    np.testing.assert_allclose(
        evaluated(module, variables, x), torch_side.classify(model, x), rtol=0, atol=1e-4
    )


@pytest.mark.everyday("*b0*")
@pytest.mark.parametrize(("shape", "size", "side"), [(B0, "b0", 64), (B2, "b2", 260)])
def test_published_networks(shape, size, side, moved, evaluated):
    model = torch_side.efficientnet(side, **shape, depthwise_padding=list(PADDING[size]))
    _, variables = moved(model)
    # Ours pads by the actual size, theirs by a list for the nominal size.
    assert sum(leaf.size for leaf in jax.tree.leaves(variables["params"])) == torch_side.count(
        model
    )
    x = torch_side.images(side, batch=2 if side < 100 else 1)
    ours = evaluated(make_efficientnet(size, num_classes=7), variables, x)
    theirs = torch_side.classify(model, x)
    assert np.std(theirs) > 0.1
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def test_training(moved, trained):
    # `transformers` passes TensorFlow's momentum .99 to PyTorch; it should be .01: correct it.
    model = torch_side.unbiased(_slim(68, 0.5).train())
    module, variables = moved(model)
    x = torch_side.images(68, batch=6)
    ours, batch_stats = trained(module, variables, x)
    np.testing.assert_allclose(ours, torch_side.classify(model, x), rtol=0, atol=1e-4)
    after = moved(model)[1]["batch_stats"]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), batch_stats, after
    )
    moves = jax.tree.map(lambda a, b: np.abs(a - b).max(), after, variables["batch_stats"])
    assert min(jax.tree.leaves(moves)) > 1e-5
