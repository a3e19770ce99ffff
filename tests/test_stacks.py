"""Detection of leaves that are stacks of layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from refusal import refused

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
        (
            lambda name, leaf: 2 if leaf.ndim == 3 else 0,
            {**ONLY_LAYERS, "layers": {"kernel": 2, "bias": 0}},
        ),
        (lbopt.stacked_paths(r"^layers/"), ONLY_LAYERS),
        (
            {"layers": {"kernel": True, "bias": True}, "head": {"kernel": False, "scale": False}},
            ONLY_LAYERS,
        ),
    ],
)
def test_resolve_stacked(stacked, expected):
    assert stacks.resolve_stacked(stacked, PARAMS) == expected


@pytest.mark.parametrize(
    ("stacked", "field", "code", "fact"),
    [
        (lambda name, leaf: True, "stacked/head/scale", "value", "shape ()"),
        (lambda name, leaf: 3 * (name == "layers/bias"), "stacked/layers/bias", "value", "(3, 4)"),
        (lambda name, leaf: "yes", "stacked/head/kernel", "type", ""),
        (lambda name, leaf: -1, "stacked/head/kernel", "type", ""),
        (lbopt.stacked_paths("encoder"), "stacked", "value", "head/kernel, "),
        ({"layers": True}, "stacked", "type", " at head/kernel, head/scale;"),
        (lbopt.stacked_paths("^layers/", "^blocks/"), "stacked", "value", "'^blocks/'"),
        (lambda name, leaf: None, "stacked/head/kernel", "type", ""),
        (lambda params: True, "stacked", "type", "a function"),
        (lambda name, leaf: stacks.LayerAxes((-3,)), "stacked/head/kernel", "value", "(4, 2)"),
    ],
)
def test_resolve_stacked_refuses(stacked, field, code, fact):
    with refused(field, code=code) as caught:
        stacks.resolve_stacked(stacked, PARAMS)
    assert fact in caught.value.reason


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
    # Leaves without metadata do not show that they were stacked: name them by path.
    assert stacks.resolve_stacked(stacked, params)["layers"]["Dense_0"]["bias"] == 0

    def both(name, leaf):
        return stacked(name, leaf) or lbopt.stacked_paths("^layers/")(name, leaf)

    assert stacks.resolve_stacked(both, params)["layers"] == {
        "Dense_0": {"kernel": 1, "bias": 1},
        "LayerNorm_0": {"scale": 1, "bias": 1},
    }


def test_metadata_without_the_axis_or_with_it_elsewhere():
    boxed = Stack().init(jax.random.key(0), jnp.zeros((1, 4)))["params"]
    with refused("axis_name", "stages", "missing"):
        lbopt.stacked_from_metadata(boxed, "stages")
    behind = Stack(axis=1).init(jax.random.key(0), jnp.zeros((1, 4)))["params"]
    assert lbopt.stacked_from_metadata(behind)("layers/Dense_0/kernel", None).axes == (1,)


def test_names_that_flax_wrote_before_the_last_axis_are_refused():
    def boxed(axis, *shapes):
        boxes = {}
        for number, shape in enumerate(shapes):
            names = ["in", "out"][-len(shape) :]
            names.insert(axis, "layers")  # as Flax does, also for -1
            shape = np.insert(shape, axis % (len(shape) + 1), 3)
            boxes[f"leaf{number}"] = nn.Partitioned(np.zeros(shape), tuple(names))
        return boxes

    for shapes in ([(4, 4), (4,)], [(4, 5), (5, 4)]):
        with refused("axis_name", "layers", "value") as caught:
            lbopt.stacked_from_metadata(boxed(-1, *shapes))
        assert "axis=-1)" in caught.value.reason
        for axis in (0, 1):
            stacked = lbopt.stacked_from_metadata(boxed(axis, *shapes))
            assert {axes.axes for axes in stacked.found.values()} == {(axis,)}
    last = {
        "layers": {"kernel": np.zeros((4, 5, 3)), "bias": np.zeros((5, 3))},
        "head": np.zeros(2),
    }
    axes = stacks.resolve_stacked(lbopt.stacked_paths("^layers/", axis=-1), last)
    assert [leaf.axes for leaf in jax.tree.leaves(axes)] == [(), (1,), (2,)]


MOVED = {  # axis 1 counts the layers
    "layers": {"kernel": np.zeros((2, 3, 4)), "bias": np.zeros((4, 3))},
    "head": {"kernel": np.zeros((4, 2))},
}
FIRST = lbopt.stacked_paths("^layers/")
SECOND = lbopt.stacked_paths("^layers/", axis=1)
ON_STACKS = {
    "lamb": lambda stacked: lbopt.lamb(0.1, weight_decay=0.1, max_grad_norm=1.0, stacked=stacked),
    "lars": lambda stacked: lbopt.lars(0.1, weight_decay=0.1, stacked=stacked),
    "lars_flax": lambda stacked: lbopt.lars(
        0.1, weight_decay=0.1, variant="flax", nesterov=True, stacked=stacked
    ),
    "lans": lambda stacked: lbopt.lans(0.1, weight_decay=0.1, stacked=stacked),
    "normalize": lambda stacked: lbopt.normalize_gradients(stacked=stacked),
    "monitor": lambda stacked: lbopt.monitor_layers(stacked),
}


@pytest.mark.parametrize("name", ON_STACKS)
def test_layers_along_another_axis_are_what_they_are_along_the_first(name):
    rng = np.random.default_rng(0)
    moved, gradient = (
        jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.bfloat16), MOVED)
        for _ in range(2)
    )

    def front(tree):
        return {
            **tree,
            "layers": jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), tree["layers"]),
        }

    def run(stacked, params, grads):
        tx = ON_STACKS[name](stacked)
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(grads, state, params)
        return updates, lbopt.optimizer_metrics(state)

    ours, metrics = run(SECOND, moved, gradient)
    theirs, expected = run(FIRST, front(moved), front(gradient))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-7), front(ours), theirs)
    assert metrics.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-5)
    if name == "lamb":
        assert {"trust_ratio/layers/kernel[2]", "trust_ratio/head/kernel"} <= metrics.keys()
        assert "trust_ratio/layers/kernel[3]" not in metrics


def test_the_axis_of_the_layers_is_checked():
    with refused("axis", True, "type"):
        lbopt.stacked_paths("^layers/", axis=True)
    disagree = {"layers": {"kernel": np.zeros((2, 3, 4)), "bias": np.zeros((4, 3))}}
    with refused("stacked", FIRST, "mismatch") as caught:
        stacks.resolve_stacked(FIRST, disagree)
    for fact in ("4 at 'layers/bias'", "2 at 'layers/kernel'", "axis=1)"):
        assert fact in caught.value.reason
    several = {
        "encoder": {"layers": {"kernel": np.zeros((2, 3))}},
        "decoder": {"layers": {"kernel": np.zeros((6, 3))}},
    }
    assert jax.tree.leaves(stacks.resolve_stacked(lbopt.stacked_paths("layers/"), several)) == [
        1,
        1,
    ]
    with refused("stacked/a", stacks.LayerAxes((1,)), "value"):
        stacks.resolve_stacked(lbopt.stacked_paths("", axis=1), {"a": np.zeros(3)})
    with refused("stacked/layers/bias", stacks.LayerAxes((1,)), "value"):
        lbopt.powersgd(1, stacked=SECOND).init(MOVED, 2)


def test_the_axis_is_read_from_the_metadata_of_nnx():
    class Block(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("in", "out"))
            self.linear = nnx.Linear(4, 4, kernel_init=init, rngs=rngs)

    with nnx.use_eager_sharding(False):

        @nnx.split_rngs(splits=3)
        @nnx.vmap(
            axis_size=3, in_axes=0, out_axes=1, transform_metadata={nnx.PARTITION_NAME: "layers"}
        )
        def make(rngs):
            return Block(rngs)

        state = nnx.state(make(nnx.Rngs(0)), nnx.Param)
    stacked = lbopt.stacked_from_metadata(state)
    assert stacked("linear/kernel", None).axes == (1,)
    assert stacked("linear/bias", None) == 0
