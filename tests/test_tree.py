"""Names and norms of trees."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from refusal import refused

from lbopt import masks, tree


def test_names_of_dicts_sequences_and_named_tuples():
    state = optax.ScaleByAdamState(count=0, mu={"a": [1, 2]}, nu=(3,))
    assert tree.leaf_names(state) == ["count", "mu/a/0", "mu/a/1", "nu/0"]
    assert tree.leaf_names({"a": optax.MaskedNode(), "b": 1}) == ["b"]


def test_l2_norm_of_bf16_is_the_fp32_norm_of_its_values():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(64, 33)), jnp.bfloat16)
    exact = np.linalg.norm(np.asarray(x, np.float64))
    norm = tree.l2_norm(x)
    assert norm.dtype == jnp.float32
    assert abs(norm - exact) <= 1e-6 * exact
    assert abs(float(jnp.linalg.norm(x)) - exact) > 1e-4 * exact, (
        "this case cannot tell narrow norms from wide ones"
    )


def test_l2_norm_of_fp16_does_not_overflow():
    assert tree.l2_norm(jnp.full(4, 30000, jnp.float16)) == 60000


SIZES = {
    "ordinary": [1.0],
    "1e20": [1e20],
    "1e34": [2e33],
    "1e-25": [1e-25],
    "1e-30": [1e-30],
    "mixed": [1e-30, 1e20, 1.0],
}
"""Factors of the numbers of four layers, one after another."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("sizes", SIZES)
def test_norms_whose_squares_no_fp32_number_holds(sizes, dtype):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(4, 3, 5)) + (
        1j * rng.normal(size=(4, 3, 5)) if dtype == "complex64" else 0
    )
    x = jnp.asarray(x * np.resize(SIZES[sizes], 4)[:, None, None], dtype)

    exact = np.asarray(x, np.complex128 if dtype == "complex64" else np.float64)
    per_layer = np.sqrt(np.sum(np.abs(exact) ** 2, (1, 2), keepdims=True))

    for wrap in (lambda fn: fn, jax.jit):
        for found, expected in (
            (wrap(tree.l2_norm)(x), np.linalg.norm(exact)),
            (wrap(lambda x: tree.l2_norm(x, (0,)))(x), per_layer),
            (wrap(tree.global_norm)({"a": x[:1], "b": [x[1], x[2:]]}), np.linalg.norm(exact)),
            (
                jax.vmap(lambda x: tree.l2_norm(x, (), "layer"), axis_name="layer")(x),
                np.linalg.norm(exact),
            ),
        ):
            assert found.dtype == jnp.float32
            np.testing.assert_allclose(
                np.asarray(found, np.float64), np.broadcast_to(expected, found.shape), 1e-6, 0
            )


@pytest.mark.parametrize("size", [1e-8, 1.0, 3e4, 1e8])
def test_ordinary_norms_are_the_roots_of_plain_sums_to_the_last_bit(size):
    x = jnp.asarray(size * np.random.default_rng(6).normal(size=(64, 33)), jnp.float32)
    assert tree.l2_norm(x) == jnp.sqrt(jnp.sum(jnp.square(x)))
    assert tree.norm_near_one(x / size) == jnp.sqrt(jnp.sum(jnp.square(x / size)))


def test_norms_of_what_is_not_finite_are_not_finite():
    for bad in (np.inf, -np.inf, np.nan, complex(0, np.inf)):
        assert not np.isfinite(tree.l2_norm(jnp.asarray([1.0, bad])))
    assert (
        tree.l2_norm(jnp.zeros((0, 3))) == tree.global_norm({}) == tree.l2_norm(jnp.zeros(2)) == 0
    )


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


def test_norm_of_a_stack_is_one_per_layer():
    x = np.float32(np.random.default_rng(3).normal(size=(4, 3, 5)))
    norms = tree.l2_norm(jnp.asarray(x), layer_axes=(0,))
    assert norms.shape == (4, 1, 1)
    assert np.allclose(norms[:, 0, 0], [np.linalg.norm(layer) for layer in x], rtol=1e-6)
    assert tree.l2_norm(jnp.asarray(x), layer_axes=(0, 1)).shape == (4, 3, 1)
    assert np.allclose(tree.l2_norm(jnp.asarray(x), layer_axes=(0, 1, 2)), np.abs(x))
    middle = tree.l2_norm(jnp.asarray(x), layer_axes=(1,))
    assert np.allclose(middle, np.linalg.norm(x, axis=(0, 2), keepdims=True), rtol=1e-6)


def test_norm_of_parts_is_summed_over_the_axis():
    x = np.float32(np.random.default_rng(4).normal(size=(4, 6)))
    norms = jax.vmap(lambda part: tree.l2_norm(part, axis_name="parts"), axis_name="parts")(
        jnp.asarray(x)
    )
    assert np.allclose(norms, np.linalg.norm(x), rtol=1e-6)


def test_the_inside_of_a_box_has_the_name_of_the_box():
    """Boxed Flax parameters and NNX variables have the same names as without boxes."""
    linen = nn.Dense(3, kernel_init=nn.with_partitioning(nn.initializers.ones, ("a", "b"))).init(
        jax.random.key(0), jnp.ones((1, 2))
    )["params"]
    assert tree.leaf_names(linen) == ["bias", "kernel"]
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)
    assert tree.leaf_names(state) == ["bias", "kernel"]
    chosen = masks.resolve_mask(masks.weights_only, {"head": state}, "mask")
    assert jax.tree.leaves(chosen) == [False, True]
    attention = {"attention": {"value": {"bias": 0, "kernel": 1}}}
    assert tree.leaf_names(attention) == ["attention/value/bias", "attention/value/kernel"]


class Unreadable:
    """A callable whose signature cannot be read."""

    __signature__ = 3

    def __call__(self, params):
        return params


def takes_two(params, state):
    return params, state


@pytest.mark.parametrize(
    "fn",
    [
        takes_two,
        functools.partial(takes_two, 1, 2, 3),
        functools.partial(takes_two, other=1),
        functools.partial(takes_two, 1, params=2),
        lambda: None,
        Unreadable(),
    ],
)
def test_a_function_of_other_arguments_is_refused(fn):
    with refused("mask", fn, "type"):
        tree.check_takes(fn, 1, "mask", "the parameters")


@pytest.mark.parametrize(
    "fn",
    [
        functools.partial(takes_two, 1),
        functools.partial(takes_two, state=1),
        lambda *args: args,
        getattr,
        max,
        functools.partial(max, 1),
    ],
)
def test_a_function_of_these_arguments_or_without_a_signature_is_taken(fn):
    tree.check_takes(fn, 1, "mask", "the parameters")


@pytest.mark.parametrize(
    ("given", "places"),
    [
        ({"a": 1}, "b/c"),
        ({"a": 1, "b": {"c": 1, "d": 1}}, "b/d"),
        ({"a": 1, "b": [1]}, "b/0, b/c"),
        ({"a": 1, "b": (), "x": 1, "y": 1, "z": 1}, "b/c, x, y, z"),
    ],
)
def test_a_refusal_of_a_structure_names_the_leaves_that_differ(given, places):
    params = {"a": 1, "b": {"c": 1}}
    for check in (tree.check_structure, tree.spread):
        with refused("updates", code="type") as caught:
            check(given, params, "updates")
        assert re.search(rf"\w {places};", caught.value.reason)
