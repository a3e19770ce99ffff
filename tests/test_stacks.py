"""Which leaves are stacks of layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lbopt
from lbopt import stacks

PARAMS = {
    "layers": {"kernel": np.zeros((3, 2, 4)), "bias": np.zeros((3, 4))},
    "head": {"kernel": np.zeros((4, 2)), "scale": np.zeros(())},
}
ONLY_LAYERS = {"layers": {"kernel": 1, "bias": 1}, "head": {"kernel": 0, "scale": 0}}


@pytest.mark.parametrize(
    ("stacked", "expected"),
    [
        (None, {"layers": {"kernel": 0, "bias": 0}, "head": {"kernel": 0, "scale": 0}}),
        (lambda name, leaf: name.startswith("layers/"), ONLY_LAYERS),
        (lambda name, leaf: leaf.ndim == 3, {**ONLY_LAYERS, "layers": {"kernel": 1, "bias": 0}}),
        (lambda name, leaf: 2 if leaf.ndim == 3 else 0, {**ONLY_LAYERS, "layers": {"kernel": 2, "bias": 0}}),
        (lbopt.stacked_paths(r"^layers/"), ONLY_LAYERS),
        ({"layers": {"kernel": True, "bias": True}, "head": {"kernel": False, "scale": False}}, ONLY_LAYERS),
    ],
)
def test_resolve_stacked(stacked, expected):
    assert stacks.resolve_stacked(stacked, PARAMS) == expected


@pytest.mark.parametrize(
    ("stacked", "message"),
    [
        (
            lambda name, leaf: True,
            r"stacked at 'head/scale' is 1, but the leaf has shape \(\): it has no such leading axis",
        ),
        (
            lambda name, leaf: 3 * (name == "layers/bias"),
            r"stacked at 'layers/bias' is 3, but the leaf has shape \(3, 4\)",
        ),
        (lambda name, leaf: "yes", "stacked at 'head/kernel' is 'yes': give a bool or the number"),
        (lambda name, leaf: -1, "is -1: give a bool or the number"),
        (lbopt.stacked_paths("encoder"), r"stacked = stacked_paths\('encoder'\) marks none of the parameters"),
        ({"layers": True}, "stacked has another structure than params"),
    ],
)
def test_resolve_stacked_refuses(stacked, message):
    with pytest.raises(ValueError, match=message):
        stacks.resolve_stacked(stacked, PARAMS)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        return nn.LayerNorm()(nn.Dense(4, kernel_init=init)(x)), None


class Stack(nn.Module):
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(
            Layer,
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return nn.Dense(2, name="head")(scanned(name="layers")(x, None)[0])


def test_metadata_of_a_scanned_flax_model():
    boxed = Stack().init(jax.random.key(0), jnp.zeros((1, 4)))["params"]
    stacked = lbopt.stacked_from_metadata(boxed)
    params = nn.meta.unbox(boxed)
    assert stacks.resolve_stacked(stacked, params)["layers"]["Dense_0"]["kernel"] == 1
    assert params["layers"]["Dense_0"]["kernel"].shape == (3, 4, 4)
    # Leaves that carry no metadata cannot say that they were stacked: state them by path.
    assert stacks.resolve_stacked(stacked, params)["layers"]["Dense_0"]["bias"] == 0
    both = lambda name, leaf: stacked(name, leaf) or lbopt.stacked_paths("^layers/")(name, leaf)  # noqa: E731
    assert stacks.resolve_stacked(both, params)["layers"] == {
        "Dense_0": {"kernel": 1, "bias": 1},
        "LayerNorm_0": {"scale": 1, "bias": 1},
    }


def test_metadata_without_the_axis_or_with_it_elsewhere():
    boxed = Stack().init(jax.random.key(0), jnp.zeros((1, 4)))["params"]
    with pytest.raises(ValueError, match="axis_name = 'stages': no leaf's metadata names that axis"):
        lbopt.stacked_from_metadata(boxed, "stages")
    behind = Stack(axis=1).init(jax.random.key(0), jnp.zeros((1, 4)))["params"]
    with pytest.raises(
        ValueError, match=r"layers/Dense_0/kernel: axes \('embed', 'layers', 'mlp'\): the axis 'layers' must lead"
    ):
        lbopt.stacked_from_metadata(behind)
