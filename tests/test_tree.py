"""Roles of leaves on real Flax modules, masks, names and norms."""

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lbopt
from lbopt import tree


def roles(params):
    return collections.Counter(
        tree.leaf_role(tree.path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    )


def init(module, *inputs):
    return jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs))["params"]


class Network(nn.Module):
    """Every normalization of Flax between two convolutions and a dense layer."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3), name="stem")(x)
        for norm in (
            nn.BatchNorm(use_running_average=True),
            nn.LayerNorm(),
            nn.GroupNorm(2),
            nn.InstanceNorm(),
            nn.RMSNorm(),
        ):
            x = norm(x)
        x = nn.Conv(4, (3, 3), use_bias=False, feature_group_count=4)(x)
        x = nn.LayerNorm(name="ln")(x)
        x = lbopt.BatchNorm(name="bn1")(x, True)
        return nn.Dense(3)(x.mean((1, 2)))


MODULES = {
    "dense": (nn.Dense(3), (np.zeros((2, 4)),), {"weight": 1, "bias": 1}),
    "conv": (nn.Conv(3, (3, 3)), (np.zeros((2, 5, 5, 4)),), {"weight": 1, "bias": 1}),
    "embed": (nn.Embed(5, 3), (np.zeros((2,), int),), {"weight": 1}),
    "attention": (nn.MultiHeadDotProductAttention(2), (np.zeros((2, 5, 4)),), {"weight": 4, "bias": 4}),
    "lstm": (nn.RNN(nn.LSTMCell(3)), (np.zeros((2, 5, 4)),), {"weight": 8, "bias": 4}),
    "optimized_lstm": (nn.RNN(nn.OptimizedLSTMCell(3)), (np.zeros((2, 5, 4)),), {"weight": 8, "bias": 4}),
    "prelu": (nn.PReLU(), (np.zeros((2, 4), np.float32),), {"vector": 1}),
    "network": (Network(), (np.zeros((2, 8, 8, 3)),), {"weight": 3, "bias": 2, "norm": 13}),
}


@pytest.mark.parametrize("name", MODULES)
def test_roles_of_flax_modules(name):
    module, inputs, expected = MODULES[name]
    params = init(module, *inputs)
    assert roles(params) == expected
    assert sum(jax.tree.leaves(tree.weights_only(params))) == expected.get("weight", 0)


@pytest.mark.parametrize(
    "module",
    [nn.BatchNorm(use_running_average=True), nn.LayerNorm(), nn.GroupNorm(2), nn.RMSNorm()],
    ids=lambda m: type(m).__name__,
)
def test_normalization_without_a_parent_is_never_a_weight(module):
    params = init(module, np.zeros((2, 4)))
    assert set(roles(params)) <= {"norm", "bias"}
    assert not any(jax.tree.leaves(tree.weights_only(params)))


@pytest.mark.parametrize(
    ("name", "ndim", "role"),
    [
        ("BatchNorm_0/bias", 1, "norm"),
        ("block/layer_norm/bias", 1, "norm"),
        ("encoder/final_layer_norm/kernel", 1, "norm"),
        ("batch_normalization_12/beta", 1, "norm"),
        ("ln1/bias", 1, "norm"),
        ("gn_2/offset", 1, "norm"),
        ("SyncBatchNorm_3/scale", 1, "norm"),
        ("pre_norm/w", 2, "norm"),
        ("head/gamma", 1, "norm"),
        ("attention/query/bias", 2, "bias"),
        ("head/b", 1, "bias"),
        ("Dense_0/kernel", 2, "weight"),
        ("normal_dense/kernel", 2, "weight"),
        ("denorm_decoder/kernel", 2, "weight"),
        ("learn/kernel", 2, "weight"),
        ("kernel", 1, "vector"),
        ("logit_temperature", 0, "vector"),
    ],
)
def test_role_of_a_name(name, ndim, role):
    assert tree.leaf_role(name, np.zeros((2,) * ndim)) == role


def test_names_of_dicts_sequences_and_named_tuples():
    state = optax.ScaleByAdamState(count=0, mu={"a": [1, 2]}, nu=(3,))
    assert tree.leaf_names(state) == ["count", "mu/a/0", "mu/a/1", "nu/0"]
    assert tree.leaf_names({"a": optax.MaskedNode(), "b": 1}) == ["b"]


PARAMS = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, {"dense": {"kernel": True, "bias": True}}),
        (True, {"dense": {"kernel": True, "bias": True}}),
        (False, {"dense": {"kernel": False, "bias": False}}),
        ({"dense": {"kernel": False, "bias": True}}, {"dense": {"kernel": False, "bias": True}}),
        (tree.weights_only, {"dense": {"kernel": True, "bias": False}}),
    ],
)
def test_resolve_mask(mask, expected):
    assert tree.resolve_mask(mask, PARAMS, "mask") == expected


def test_resolve_mask_leaves_out_what_optax_masked_took():
    params = {"dense": {"kernel": jnp.ones((2, 3)), "bias": optax.MaskedNode()}}
    for mask in (None, True, tree.weights_only):
        assert tree.resolve_mask(mask, params, "mask") == {"dense": {"kernel": True, "bias": optax.MaskedNode()}}


def test_resolve_mask_of_an_empty_tree():
    assert tree.resolve_mask(tree.weights_only, {}, "mask") == {}


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ({"dense": {"kernel": False, "bias": False}}, "my_mask selects none of the 2 parameters .*pass my_mask=False"),
        (lambda params: jax.tree.map(lambda _: False, params), "my_mask selects none"),
        ({"dense": {"kernel": True}}, "my_mask has another structure than params .*dense/bias"),
        ({"dense": {"kernel": True, "bias": 1}}, "my_mask at 'dense/bias' is 1: give True or False"),
        ([True, True], "my_mask has another structure"),
    ],
)
def test_resolve_mask_refuses(mask, message):
    with pytest.raises(ValueError, match=message):
        tree.resolve_mask(mask, PARAMS, "my_mask")


def test_l2_norm_of_bf16_is_the_fp32_norm_of_its_values():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(64, 33)), jnp.bfloat16)
    exact = np.linalg.norm(np.asarray(x, np.float64))
    norm = tree.l2_norm(x)
    assert norm.dtype == jnp.float32
    assert abs(norm - exact) <= 1e-6 * exact
    assert abs(float(jnp.linalg.norm(x)) - exact) > 1e-4 * exact, "this case cannot tell narrow norms from wide ones"


def test_l2_norm_of_fp16_does_not_overflow():
    assert tree.l2_norm(jnp.full(4, 30000, jnp.float16)) == 60000


@pytest.mark.parametrize("narrow", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_wide_dtype(narrow):
    assert tree.wide_dtype(narrow) == jnp.float32
    assert tree.wide_dtype(jnp.float64) == jnp.float64


def test_l2_norm_keeps_x64():
    with jax.enable_x64(True):
        norm = tree.l2_norm(jnp.asarray([1.0, 1e-5], jnp.float64))
        assert norm.dtype == jnp.float64
        assert abs(norm - np.sqrt(1 + 1e-10)) <= 1e-15


def test_unzip_pairs_keeps_tuples_and_masked_nodes_apart():
    like = {"a": (1, 2), "b": optax.MaskedNode()}
    pairs = {"a": ((10, "x"), (20, optax.MaskedNode())), "b": optax.MaskedNode()}
    assert tree.unzip_pairs(like, pairs) == (
        {"a": (10, 20), "b": optax.MaskedNode()},
        {"a": ("x", optax.MaskedNode()), "b": optax.MaskedNode()},
    )
