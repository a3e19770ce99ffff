"""ResNet agrees with `transformers` on the same weights, in evaluation and in training."""

import functools

import jax
import numpy as np
import pytest
import torch_networks as torch_side

from lbopt.models import make_resnet

SMALL = {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [2, 1]}
SIZES = {
    "bottleneck": {**SMALL},
    "basic": {**SMALL, "layer_type": "basic"},
    # In a basic network the first stage has no shortcut convolution if widths agree.
    "basic-equal": {**SMALL, "layer_type": "basic", "hidden_sizes": [8, 16]},
    "18": {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"},
    "50": {},
}
PARAMETERS = {
    "18": 11_689_512,
    "34": 21_797_672,
    "50": 25_557_032,
    "101": 44_549_160,
    "152": 60_192_808,
}
"""Parameter counts of torchvision's networks with 1000 classes."""


def side(name):
    return 64 if name in PARAMETERS else 32


@pytest.mark.everyday("18", "bottleneck", "basic*")
@pytest.mark.parametrize("name", SIZES)
def test_evaluation(name, moved, evaluated):
    model = torch_side.resnet(**SIZES[name])
    module, variables = moved(model)
    x = torch_side.images(side(name))
    theirs = torch_side.classify(model, x)
    ours = evaluated(module, variables, x)
    assert torch_side.spread(theirs) > 0.02
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    assert sum(leaf.size for leaf in jax.tree.leaves(variables["params"])) == torch_side.count(
        model
    )


@pytest.mark.everyday("basic")
@pytest.mark.parametrize("name", ["basic", "50"])
def test_the_folded_stem(name, moved, evaluated):
    model = torch_side.resnet(**SIZES[name])
    module, variables = moved(model)
    x = torch_side.images(side(name))
    ours = evaluated(module.clone(stem="space_to_depth"), variables, x)
    np.testing.assert_allclose(ours, torch_side.classify(model, x), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["bottleneck", "basic"])
def test_training(name, moved, trained):
    """Batch statistics use the unbiased variance (n - 1 degrees of freedom), as in PyTorch."""
    model = torch_side.unbiased(torch_side.resnet(**SIZES[name]).train())
    module, variables = moved(model)
    x = torch_side.images(side(name), batch=6)
    ours, batch_stats = trained(module, variables, x)
    np.testing.assert_allclose(ours, torch_side.classify(model, x), rtol=0, atol=1e-4)
    after = moved(model)[1]["batch_stats"]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), batch_stats, after
    )
    moves = jax.tree.map(lambda a, b: np.abs(a - b).max(), after, variables["batch_stats"])
    assert min(jax.tree.leaves(moves)) > 1e-3


@pytest.mark.slow
def test_training_of_fifty_layers(moved, trained):
    """Batch norms amplify rounding: from fp64, fp32 logits are 3e-4 (PyTorch) and 2e-4 (lbopt)."""
    model = torch_side.resnet().train()
    module, variables = moved(model)
    x = torch_side.images(64, batch=6)
    ours, _ = trained(module, variables, x)
    exact = torch_side.classify(model.double(), x)
    np.testing.assert_allclose(ours, exact, rtol=0, atol=1e-4 * np.abs(exact).max())


def test_one_channel(moved, evaluated):
    model = torch_side.resnet(**SIZES["basic"], num_channels=1)
    module, variables = moved(model)
    x = torch_side.images(32, channels=1)
    theirs = torch_side.classify(model, x)
    np.testing.assert_allclose(evaluated(module, variables, x), theirs, rtol=0, atol=1e-4)
    np.testing.assert_allclose(evaluated(module, variables, x[..., 0]), theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", PARAMETERS)
def test_published_sizes(size):
    x = jax.ShapeDtypeStruct((1, 64, 64, 3), np.float32)
    shapes = jax.eval_shape(
        functools.partial(make_resnet(size).init, train=False), jax.random.key(0), x
    )
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes["params"])) == PARAMETERS[size]
