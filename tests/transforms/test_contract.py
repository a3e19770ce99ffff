"""Every transform under jit, sharding and Optax's wrappers: one table and one set of checks."""

import functools
import re

import boxes
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiling import QUICKLY
from jax.sharding import PartitionSpec
from refusal import ANY, names_in, refused

import lbopt
from lbopt import transforms
from lbopt.transforms._weight_decay import add_weight_decay


def by_shape(params):
    """Return dimension numbers of every leaf of two dimensions or more; masks may hide leaves."""
    numbers = optax.contrib.MuonDimensionNumbers

    def of(leaf):
        return numbers(0, (*range(1, jnp.ndim(leaf)),)) if jnp.ndim(leaf) > 1 else None

    return jax.tree.map(of, params)


# The leaves of all tests here, narrower than `tree_of` makes them.
NARROW = {
    "first": {"kernel": np.ones((8, 2)), "bias": np.ones(2)},
    "norm": {"scale": np.ones(2)},
    "last": {"kernel": np.ones((2, 2, 3)), "bias": np.ones(3)},
    "gain": np.ones(()),
    "w": {"kernel": np.ones((3, 2))},
    "kernel": np.ones((2, 2)),
    "steps": np.ones(()),
}
jit = functools.partial(jax.jit, compiler_options=QUICKLY)
# name -> (factory, options, static_args of inject_hyperparams, whether update needs params)
TABLE = {
    "trust_ratio": (
        lbopt.scale_by_layerwise_trust_ratio,
        {
            "weight_decay": 0.1,
            "trust_coefficient": 0.5,
            "eps": 1e-3,
            "trust_ratio_bounds": (0.1, 3.0),
            "denominator": "sum_of_norms",
        },
        ("trust_ratio_mask", "weight_decay_mask"),
        True,
    ),
    "lamb_moments": (
        lbopt.scale_by_lamb_moments,
        {"b1": 0.8, "b2": 0.9, "eps": 1e-3, "eps_root": 1e-6},
        (),
        False,
    ),
    "lars_momentum": (lbopt.scale_by_lars_momentum, {"momentum": 0.8, "nesterov": True}, (), False),
    "learning_rate": (
        lbopt.scale_by_learning_rate,
        {"learning_rate": lambda count: 0.1 / (1 + count)},
        (),
        False,
    ),
    "lamb": (
        lbopt.lamb,
        {
            "learning_rate": lambda count: 0.1 / (1 + count),
            "b2": 0.9,
            "weight_decay": 0.1,
            "max_grad_norm": 1.5,
        },
        (),
        True,
    ),
    "clip": (lbopt.clip_by_global_norm, {"max_norm": 1.5, "eps": 1e-3}, (), False),
    "lars": (
        lbopt.lars,
        {"learning_rate": 0.1, "weight_decay": 0.1, "trust_coefficient": 0.1, "eps": 1e-4},
        (),
        True,
    ),
    "trust_ratio_of_momentum": (
        lbopt.scale_by_layerwise_trust_ratio,
        {"inner": lbopt.scale_by_lars_momentum(0.8), "denominator": "momentum", "eps": 1e-3},
        (),
        True,
    ),
    "trust_ratio_per_layer": (
        lbopt.scale_by_layerwise_trust_ratio,
        {
            "stacked": lbopt.stacked_paths("kernel"),
            "trust_ratio_mask": None,
            "weight_decay_mask": None,
            "weight_decay": 0.1,
            "weight_decay_placement": "outside",
            "eps": 1e-3,
        },
        ("stacked",),
        True,
    ),
    "larc": (
        lbopt.lars,
        {
            "learning_rate": lambda count: 0.1 / (1 + count),
            "variant": "nvcaffe",
            "weight_decay": 0.1,
            "trust_coefficient": 0.01,
        },
        (),
        True,
    ),
    "lars_flax": (
        lbopt.lars,
        {"learning_rate": 0.1, "variant": "flax", "nesterov": True, "eps": 1e-4},
        (),
        True,
    ),
    "lars_nus": (
        lbopt.lars,
        {"learning_rate": 0.1, "variant": "nus", "weight_decay": 0.1, "eps": 1e-4},
        (),
        True,
    ),
    "lars_timm": (
        lbopt.lars,
        {
            "learning_rate": 0.1,
            "variant": "timm",
            "weight_decay": 0.1,
            "dampening": 0.4,
            "eps": 1e-4,
        },
        (),
        True,
    ),
    "lamb_timm_decoupled": (
        lbopt.lamb,
        {
            "learning_rate": lambda count: 0.1 / (1 + count),
            "variant": "timm",
            "weight_decay_placement": "decoupled",
            "weight_decay": 0.1,
        },
        (),
        True,
    ),
    "lamb_apex_l2": (
        lbopt.lamb,
        {
            "learning_rate": 0.1,
            "variant": "apex",
            "weight_decay_placement": "gradient",
            "weight_decay": 0.1,
            "b2": 0.9,
        },
        (),
        True,
    ),
    "lamb_narrow_moments": (
        lbopt.lamb,
        {"learning_rate": 0.1, "mu_dtype": "bfloat16", "nu_dtype": "bfloat16", "b2": 0.9},
        (),
        True,
    ),
    "lans": (
        lbopt.lans,
        {"learning_rate": lambda count: 0.1 / (1 + count), "b2": 0.9, "weight_decay": 0.1},
        (),
        True,
    ),
    "scale_by_lans": (lbopt.scale_by_lans, {"b1": 0.8, "b2": 0.9, "eps": 1e-3}, (), True),
    "normalize": (
        lbopt.normalize_gradients,
        {"stacked": lbopt.stacked_paths("kernel")},
        ("stacked",),
        False,
    ),
    "add_weight_decay": (add_weight_decay, {"weight_decay": 0.1}, (), True),
    "relative_update": (lbopt.relative_update, {"mask": None}, ("mask",), True),
    "relative_initial": (
        lbopt.relative_update,
        {"scale": "initial", "mask": None, "stacked": lbopt.stacked_paths("kernel")},
        ("scale", "mask", "stacked"),
        True,
    ),
    "relative_fixed": (lbopt.relative_update, {"scale": 0.5}, (), True),
    "hyperball": (
        lbopt.hyperball,
        {"mask": None, "stacked": lbopt.stacked_paths("kernel")},
        ("radius", "mask", "stacked"),
        True,
    ),
    "hyperball_fixed": (lbopt.hyperball, {"radius": 0.5}, (), True),
    "radial_brake": (lbopt.radial_brake, {"outward_scale": 0.3, "inward_scale": 0.6}, (), True),
    "update_floor": (lbopt.update_floor, {"floor": 2.0}, (), True),
    "cautious": (
        lbopt.cautious,
        {"inner": lbopt.scale_by_lars_momentum(0.8), "min_fraction": 0.5},
        (),
        False,
    ),
    "transfer": (
        lbopt.scale_by_transfer,
        {"base_params": NARROW, "inner": lbopt.scale_by_lamb_moments(b2=0.9, eps=1e-3)},
        ("depth",),
        True,
    ),
    "newton_schulz": (
        lbopt.scale_by_newton_schulz,
        {"coefficients": "newton", "steps": 2, "eps": 2.0, "dimension_numbers": by_shape},
        ("coefficients", "steps", "dimension_numbers"),
        False,
    ),
    "matrix_shape": (
        transforms.scale_by_matrix_shape,
        {"rule": "rms", "factor": 0.2, "dimension_numbers": by_shape},
        ("rule", "dimension_numbers"),
        False,
    ),
    "neuron_norm": (
        transforms.scale_by_neuron_norm,
        {"b2": 0.9, "eps": 1e-3, "dimension_numbers": by_shape},
        ("dimension_numbers",),
        False,
    ),
    "muon": (
        lbopt.muon,
        {
            "learning_rate": lambda count: 0.1 / (1 + count),
            "weight_decay": 0.1,
            "products_dtype": None,
            "dimension_numbers": by_shape,
        },
        ("products_dtype", "dimension_numbers"),
        True,
    ),
    "muon_optax": (
        lbopt.muon,
        {"learning_rate": 0.1, "variant": "optax", "steps": 2, "dimension_numbers": by_shape},
        ("products_dtype", "steps", "dimension_numbers"),
        True,
    ),
    "normuon": (
        lbopt.normuon,
        {
            "learning_rate": 0.1,
            "products_dtype": None,
            "steps": 2,
            "dimension_numbers": by_shape,
        },
        ("products_dtype", "steps", "dimension_numbers"),
        True,
    ),
    "muonh": (
        lbopt.muonh,
        {"learning_rate": 0.1, "dimension_numbers": by_shape},
        ("dimension_numbers",),
        True,
    ),
    "scion": (
        lbopt.scion,
        {"learning_rate": 0.1, "products_dtype": None, "dimension_numbers": by_shape},
        ("products_dtype", "dimension_numbers"),
        True,
    ),
    "scale_by_soap": (
        lbopt.scale_by_soap,
        {"b1": 0.8, "b2": 0.9, "eps": 1e-2, "every_steps": 2, "dimension_numbers": by_shape},
        ("every_steps", "dimension_numbers"),
        False,
    ),
    "kl_soap": (
        lbopt.scale_by_soap,
        {"eps": 1e-2, "every_steps": 1, "kl": True, "dimension_numbers": by_shape},
        ("every_steps", "dimension_numbers"),
        False,
    ),
    "scale_by_shampoo": (
        lbopt.scale_by_shampoo,
        {
            "b2": 0.9,
            "eps": 0.1,
            "every_steps": 2,
            "graft_b2": 0.9,
            "graft_eps": 1e-2,
            "dimension_numbers": by_shape,
        },
        ("every_steps", "side", "method", "graft", "dimension_numbers"),
        False,
    ),
    "scale_by_kron": (
        lbopt.scale_by_kron,
        {"b1": 0.8, "preconditioner_rate": 0.1, "dimension_numbers": by_shape},
        ("diagonal", "max_side", "dimension_numbers"),
        False,
    ),
    "scale_by_muown": (
        lbopt.scale_by_muown,
        {
            # An update is the difference of two weights, so a small one is rounded more.
            "learning_rate": lambda count: 1 / (1 + count),
            "momentum": 0.5,
            "b2": 0.9,
            "adam_eps": 1e-2,
            "dimension_numbers": by_shape,
        },
        ("coefficients", "steps", "dtype", "dimension_numbers"),
        True,
    ),
    "muown": (
        lbopt.muown,
        {
            "learning_rate": 0.5,
            "adam_eps": 1e-2,
            "products_dtype": None,
            "dimension_numbers": by_shape,
        },
        ("products_dtype", "dimension_numbers"),
        True,
    ),
    "shampoo": (
        lbopt.shampoo,
        {"learning_rate": 0.1, "every_steps": 2, "eps": 0.1, "dimension_numbers": by_shape},
        ("every_steps", "dimension_numbers"),
        True,
    ),
    "kron": (
        lbopt.kron,
        {"learning_rate": 0.1, "dimension_numbers": by_shape},
        ("dimension_numbers",),
        True,
    ),
    "scale_by_dion": (
        lbopt.scale_by_dion,
        {"momentum": 0.8, "eps": 1.0, "rank": 2, "dimension_numbers": by_shape},
        ("rank", "rank_fraction", "seed", "dimension_numbers"),
        False,
    ),
    "soap": (
        lbopt.soap,
        {"learning_rate": 0.1, "dimension_numbers": by_shape},
        ("dimension_numbers",),
        True,
    ),
    "soaph": (
        lbopt.soaph,
        {"learning_rate": 0.1, "dimension_numbers": by_shape},
        ("dimension_numbers",),
        True,
    ),
    "dion": (
        lbopt.dion,
        {"learning_rate": 0.1, "rank": 2, "dimension_numbers": by_shape},
        ("rank", "seed", "dimension_numbers"),
        True,
    ),
    "nesterov_outer": (
        lbopt.nesterov_outer,
        {
            "inner": lbopt.lamb(0.1, b2=0.9),
            "outer_learning_rate": 0.5,
            "outer_momentum": 0.5,
            "sync_steps": 1,
        },
        ("sync_steps",),
        True,
    ),
    "muloco": (
        lbopt.muloco,
        {
            "learning_rate": 0.1,
            "products_dtype": None,
            "sync_steps": 1,
            "dimension_numbers": by_shape,
        },
        ("products_dtype", "sync_steps", "dimension_numbers"),
        True,
    ),
    "adamh": (
        lbopt.adamh,
        {"learning_rate": 0.1, "b2": 0.9, "eps": 1e-3, "sphere_mask": None},
        ("sphere_mask",),
        True,
    ),
    "compress": (
        lbopt.compress_state,
        {"inner": lbopt.lamb(0.1, b2=0.9), "min_size": 1, "min_length": 1},
        ("format", "min_size", "min_length", "block_size"),
        True,
    ),
    "compress_bf16": (
        lbopt.compress_state,
        {"inner": lbopt.lamb(0.1), "format": "bf16_stochastic", "min_size": 1, "min_length": 1},
        ("format", "min_size", "min_length", "block_size"),
        True,
    ),
    "round": (lbopt.round_stochastically, {"inner": lbopt.lamb(0.1, b2=0.9)}, (), True),
    "compensate": (lbopt.compensate_rounding, {"inner": lbopt.lamb(0.1, b2=0.9)}, (), True),
    "skip": (
        lbopt.skip_bad_updates,
        {
            "inner": lbopt.lamb(0.1, b2=0.9),
            "spike_factor": 5.0,
            "norm_decay": 0.9,
            "warmup_updates": 0,
        },
        (),
        True,
    ),
    "ema": (lbopt.track_ema, {"decay": 0.9, "ramp": False}, (), True),
    "monitor": (
        lbopt.monitor_layers,
        {"stacked": lbopt.stacked_paths("kernel")},
        ("stacked",),
        True,
    ),
}
FREE_BASIS = ("scale_by_soap", "kl_soap", "soap", "soaph")
"""The statistics of their first updates do not determine the eigenbasis of a longer side, so an
update that rounds otherwise takes another basis."""
REFUSES_COMPLEX = (
    *FREE_BASIS,
    "scale_by_dion",
    "dion",
    "scale_by_shampoo",
    "shampoo",
    "scale_by_kron",
    "kron",
    "scale_by_muown",
    "muown",
)
VARIANTS = (
    "lars_flax",
    "lars_nus",
    "lars_timm",
    "lamb_timm_decoupled",
    "lamb_apex_l2",
    "relative_initial",
    "relative_fixed",
    "hyperball_fixed",
    "muon_optax",
    "normuon",
    "scion",
    "kl_soap",
    "soap",
    "soaph",
    "dion",
    "shampoo",
    "kron",
    "muown",
    "radial_brake",
    "update_floor",
    "matrix_shape",
    "neuron_norm",
    "compress_bf16",
    "round",
    "compensate",
    "muonh",
    "scale_by_kron",
    "scale_by_shampoo",
)
"""Rows that are like others for the wrappers: of the same classes with other options, or made by
the same functions."""


def rows(*left_out):
    """Return the names of the table as parameters; those like others are slow."""
    return [
        pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name
        for name in TABLE
        if name not in left_out
    ]


each = pytest.mark.parametrize("name", rows())
determined = pytest.mark.parametrize("name", rows(*FREE_BASIS))
narrow_too = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["fp32", "bf16"])


def annotations(found):
    return getattr(found, "__annotations__", {})


def test_the_table_has_every_transformation_that_is_exported():
    made = {
        name
        for module in (lbopt, transforms)
        for name in module.__all__
        if "GradientTransformation" in str(annotations(getattr(module, name)).get("return", ""))
    }
    known = {factory.__name__ for factory, *_ in TABLE.values()}
    # Three see more than gradients and have tests of their own, as have those for meshes.
    others = {"aggregate", "scale_by_agvm", "track_noise_scale"}
    others |= {"diloco", "shard_matrices"}
    assert made - known == others


STARTS_AT_PARAMS = (
    "ema",
    "hyperball",
    "relative_initial",
    "muonh",
    "adamh",
    "soaph",
    "scale_by_muown",
    "muown",
    "nesterov_outer",
    "muloco",
)
"""Their states are made from the values of the parameters, so shapes are not enough."""
WITHOUT_STATE = (
    "clip",
    "normalize",
    "add_weight_decay",
    "monitor",
    "radial_brake",
    "update_floor",
    "newton_schulz",
    "matrix_shape",
)
"""Their updates read no state."""


def make(name, **others):
    factory, options, _, _ = TABLE[name]
    return factory(**options | others)


def tree_of(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    shapes = {
        "first": {"kernel": (8, 4), "bias": (4,)},
        "norm": {"scale": (4,)},
        "last": {"kernel": (4, 2, 3), "bias": (3,)},
        "gain": (),
    }
    tree = jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), dtype),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    return {
        **tree,
        "gain": jnp.asarray(1 + 0.1 * rng.normal(), dtype),
    }  # a scalar whose sum over steps does not cancel


def run(tx, params, steps=3, update=None):
    """Return the last updates and state after a few steps."""
    state = tx.init(params)
    for step in range(steps):
        updates, state = (update or tx.update)(
            tree_of(100 + step, params["gain"].dtype), state, params
        )
        params = optax.apply_updates(params, updates)
    return updates, state


def assert_close(ours, theirs, limit):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert mine.dtype == other.dtype
        mine = np.asarray(mine, np.float64)
        other = np.asarray(other, np.float64)
        assert np.linalg.norm(mine - other) <= limit * np.linalg.norm(other), (mine, other)


def assert_identical(ours, theirs):
    assert_close(ours, theirs, 0)


def kinds(tree):
    return jax.tree.structure(tree), [
        (leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(tree)
    ]


@each
@narrow_too
def test_update_under_jit_equals_eager(name, dtype):
    tx = make(name)
    params = tree_of(0, dtype)
    eager = run(tx, params, steps=1)
    assert_close(
        run(tx, params, steps=1, update=jit(tx.update)),
        eager,
        1e-6 if dtype == jnp.float32 else 2**-8,
    )


@each
@narrow_too
def test_init_on_shapes_equals_init(name, dtype):
    tx = make(name)
    params = tree_of(0, dtype)
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    real = kinds(tx.init(params))
    assert kinds(jax.eval_shape(tx.init, shapes)) == real
    if name in STARTS_AT_PARAMS:
        with refused("params/first/bias", code="type"):
            tx.init(shapes)
    else:
        assert kinds(tx.init(shapes)) == real


@pytest.mark.parametrize("name", TABLE)
def test_the_arrays_of_a_new_state_can_be_donated(name):
    params = tree_of(0)
    leaves = jax.tree.leaves((params, make(name).init(params)))
    places = [leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.size]
    assert len(places) == len({*places})


@each
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_updates_keep_their_dtype_and_shape(name, dtype):
    params = tree_of(0, dtype)
    updates, _ = run(make(name), params)
    assert kinds(updates) == kinds(params)


@each
@narrow_too
def test_state_keeps_structure_shapes_and_dtypes(name, dtype):
    tx = make(name)
    params = tree_of(0, dtype)
    expected = kinds(tx.init(params))
    for steps in (1, 3):
        assert kinds(run(tx, params, steps)[1]) == expected


# A global norm sees only the leaves of its group, so it correctly differs; its own test is below.
WITHOUT_GLOBAL_NORM = {
    "lamb": lbopt.lamb(0.1, weight_decay=0.1),
    "clip": lbopt.clip_by_global_norm(1e6),
    "lamb_timm_decoupled": lbopt.lamb(
        0.1, variant="timm", weight_decay_placement="decoupled", max_grad_norm=None
    ),
    "lamb_apex_l2": lbopt.lamb(
        0.1, variant="apex", weight_decay_placement="gradient", max_grad_norm=None
    ),
}


def test_a_masked_global_norm_counts_what_it_is_given():
    params = tree_of(0)
    gradient = tree_of(100)
    mask = {key: jax.tree.map(lambda _, key=key: key == "first", params[key]) for key in params}
    updates, _ = run(optax.masked(lbopt.clip_by_global_norm(1.5), mask), params, steps=1)
    norm = np.sqrt(
        sum(
            np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(gradient["first"])
        )
    )
    assert norm > 1.5
    expected = {
        **gradient,
        "first": jax.tree.map(lambda leaf: leaf * np.float32(1.5 / norm), gradient["first"]),
    }
    assert_close(updates, expected, 1e-6)


@each
def test_masked_leaves_are_untouched_and_the_others_unchanged_by_it(name):
    tx = make(name)
    params = tree_of(0)
    tx = WITHOUT_GLOBAL_NORM.get(name, tx)
    mask = {
        "first": {"kernel": True, "bias": True},
        "norm": {"scale": False},
        "last": {"kernel": False, "bias": True},
        "gain": True,
    }
    masked = optax.masked(tx, mask)
    updates, _ = run(masked, params, steps=1)
    plain, _ = run(tx, params, steps=1)
    expected = jax.tree.map(
        lambda chosen, update, gradient: update if chosen else gradient, mask, plain, tree_of(100)
    )
    assert_identical(updates, expected)


@determined
def test_inject_hyperparams_equals_the_plain_transform(name):
    factory, options, static, _ = TABLE[name]
    injected = optax.inject_hyperparams(factory, static_args=static)(**options)
    params = tree_of(0)
    updates, state = run(injected, params, update=jit(injected.update))
    assert set(state.hyperparams) >= {
        key for key, value in options.items() if isinstance(value, float)
    }
    plain, inner = run(make(name), params)
    assert_close(updates, plain, 2e-6)
    assert_close(state.inner_state, inner, 2e-6)


def test_inject_hyperparams_keeps_the_default_masks():
    factory = lbopt.scale_by_layerwise_trust_ratio
    options = {"weight_decay": 0.1}
    updates, _ = run(optax.inject_hyperparams(factory)(**options), tree_of(0), steps=1)
    assert_close(updates, run(factory(**options), tree_of(0), steps=1)[0], 2e-6)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("trust_ratio_mask", lbopt.weights_only),
        ("weight_decay_mask", lbopt.exclude_paths("bias")),
        ("stacked", lbopt.stacked_paths("kernel")),
    ],
)
def test_inject_hyperparams_takes_no_callable_of_ours_for_a_schedule(argument, value):
    injected = optax.inject_hyperparams(lbopt.lamb)(0.1, weight_decay=0.1, **{argument: value})
    with refused("stacked" if argument == "stacked" else "mask", value, "type") as caught:
        injected.init(tree_of(0))
    assert "static_args" in caught.value.reason


# The update of these does not depend on the first number of the table's row.
INJECTED = {
    "trust_ratio": "trust_coefficient",
    "trust_ratio_of_momentum": "trust_coefficient",
    "trust_ratio_per_layer": "trust_coefficient",
    "larc": "trust_coefficient",
    "lamb_moments": "eps",
    "scale_by_lans": "eps",
    "lars_momentum": "momentum",
    "clip": "max_norm",
    "add_weight_decay": "weight_decay",
    "relative_fixed": "scale",
    "hyperball_fixed": "radius",
    "radial_brake": "outward_scale",
    "update_floor": "floor",
    "newton_schulz": "eps",
    "matrix_shape": "factor",
    "neuron_norm": "eps",
    "scale_by_dion": "eps",
    "scale_by_shampoo": "graft_eps",
    "scale_by_kron": "preconditioner_rate",
    "nesterov_outer": "outer_learning_rate",
}


@pytest.mark.parametrize(
    "name",
    rows(
        "soaph",  # its first update does not move matrices
        *(row for row in TABLE if row not in INJECTED and "learning_rate" not in TABLE[row][1]),
    ),
)
def test_injected_hyperparams_take_effect(name):
    factory, options, static, _ = TABLE[name]
    constant = {"learning_rate": 0.1} if "learning_rate" in options else {}
    injected = optax.inject_hyperparams(factory, static_args=static)(**{**options, **constant})
    params = tree_of(0)
    state = injected.init(params)
    before, _ = injected.update(tree_of(100), state, params)
    key = INJECTED.get(name, "learning_rate")
    state.hyperparams[key] = state.hyperparams[key] * 0.5
    after, _ = injected.update(tree_of(100), state, params)
    assert not np.allclose(before["first"]["kernel"], after["first"]["kernel"], rtol=1e-4)


# Five steps of Newton-Schulz amplify rounding by 480; the other rows of its kind take two.
@pytest.mark.parametrize("name", rows(*FREE_BASIS, "muloco"))
def test_multi_steps_equals_one_update_with_the_mean_gradient(name):
    tx = make(name)
    params = tree_of(0)
    several = optax.MultiSteps(tx, every_k_schedule=4)
    gradients = [tree_of(seed) for seed in range(10, 18)]
    state = several.init(params)
    plain_state = tx.init(params)
    update = jit(several.update)
    for start in (0, 4):
        for gradient in gradients[start : start + 4]:
            updates, state = update(gradient, state, params)
        mean = jax.tree.map(lambda *leaves: sum(leaves) / 4, *gradients[start : start + 4])
        expected, plain_state = tx.update(mean, plain_state, params)
        assert_close(updates, expected, 2e-6)
    assert_close(state.inner_opt_state, plain_state, 2e-6)


def test_injected_hyperparams_of_the_passive_ones_are_read():
    injected = optax.inject_hyperparams(lbopt.track_ema)(decay=0.9, ramp=False)
    params = tree_of(0)
    state = injected.init(params)
    state.hyperparams["decay"] = jnp.asarray(0.0)
    _, state = injected.update(tree_of(100), state, params)
    assert_close(lbopt.ema_params(state), optax.apply_updates(params, tree_of(100)), 1e-6)
    injected = optax.inject_hyperparams(lbopt.skip_bad_updates)(
        optax.sgd(0.1), spike_factor=5.0, warmup_updates=0
    )
    _, state = injected.update(tree_of(100), injected.init(params), params)
    for factor, skipped in ((5.0, 0), (0.01, 1)):
        state.hyperparams["spike_factor"] = jnp.asarray(factor)
        _, after = jit(injected.update)(
            tree_of(101), state, params
        )  # a constant factor below 1 would be refused
        assert after.inner_state.skipped_spikes == skipped


@pytest.mark.everyday("lamb", "lars", "skip")
@determined
def test_schedule_free_runs_on_it_under_jit(name):
    params = tree_of(0)
    tx = optax.contrib.schedule_free(make(name), learning_rate=0.1, b1=0.9)
    eager, jitted = (
        optax.contrib.schedule_free_eval_params(run(tx, params, update=update)[1], params)
        for update in (None, jit(tx.update))
    )
    assert kinds(jitted) == kinds(params)
    assert_close(jitted, eager, 1e-5)
    assert any(
        np.any(leaf != p)
        for leaf, p in zip(jax.tree.leaves(jitted), jax.tree.leaves(params), strict=True)
    )


def test_schedule_free_with_ours_equals_schedule_free_with_optax():
    params = tree_of(0)
    ours, theirs = (
        run(optax.contrib.schedule_free(base, learning_rate=0.1, b1=0.9), params)[0]
        for base in (
            lbopt.lamb(0.1, weight_decay=0.1, variant="optax"),
            optax.lamb(0.1, weight_decay=0.1),
        )
    )
    assert_close(ours, theirs, 2e-5)


@each
def test_multi_transform_equals_the_transform_on_its_group(name):
    tx = make(name)
    params = tree_of(0)
    labels = {"first": "ours", "norm": "none", "last": "none", "gain": "none"}
    labels = {key: jax.tree.map(lambda _, label=labels[key]: label, params[key]) for key in params}
    updates, _ = run(
        optax.multi_transform({"ours": tx, "none": optax.set_to_zero()}, labels), params, steps=1
    )
    group = {"first": params["first"]}
    gradient = {"first": tree_of(100)["first"]}
    expected, _ = tx.update(gradient, tx.init(group), group)
    assert_identical({"first": updates["first"]}, expected)
    assert all(
        not np.any(leaf)
        for key in ("norm", "last", "gain")
        for leaf in jax.tree.leaves(updates[key])
    )


@pytest.mark.everyday("lamb", "lars", "monitor", "learning_rate", "clip")
@pytest.mark.parametrize(
    "name", [name for name in TABLE if name != "skip"]
)  # "skip" acts before optax can
def test_apply_if_finite_skips_a_bad_update_and_no_other(name):
    tx = make(name)
    params = tree_of(0)
    guarded = optax.apply_if_finite(tx, max_consecutive_errors=3)
    good, state = run(guarded, params, steps=1)
    expected, inner = run(tx, params, steps=1)
    assert_close(good, expected, 1e-6)
    bad = tree_of(100)
    bad["last"]["kernel"] = bad["last"]["kernel"].at[0, 0, 0].set(jnp.nan)
    updates, after = guarded.update(bad, state, params)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(updates))
    assert_identical(after.inner_state, state.inner_state)
    assert_close(after.inner_state, inner, 1e-6)
    assert not after.last_finite


@each
def test_params_none(name):
    tx = make(name)
    params = tree_of(0)
    gradient = tree_of(100)
    if TABLE[name][3]:
        with refused("params", None, "missing"):
            tx.update(gradient, tx.init(params), None)
    else:
        assert_identical(
            tx.update(gradient, tx.init(params), None), tx.update(gradient, tx.init(params), params)
        )


def without_types(state):
    """Return a state in the form that Orbax restores without a target: dictionaries and lists."""
    if hasattr(state, "_asdict"):
        return {name: without_types(part) for name, part in state._asdict().items()}
    return [without_types(part) for part in state] if isinstance(state, tuple) else state


@each
def test_a_state_without_its_types_or_of_other_parameters_is_refused_in_one_line(name):
    tx = make(name)
    params = tree_of(0)
    gradient = tree_of(100)
    state = tx.init(params)
    if name not in WITHOUT_STATE:
        with refused("opt_state", code="type"):
            tx.update(gradient, without_types(state), params)
    if any(leaf.shape == params["first"]["kernel"].shape for leaf in jax.tree.leaves(state)):
        with refused("updates/last/bias", code="type") as caught:
            tx.update(
                gradient,
                tx.init({**params, "last": {**params["last"], "bias": jnp.ones(1)}}),
                params,
            )
        assert re.findall(r"\(\d,\)", caught.value.reason) == ["(3,)", "(1,)"]


@each
def test_input_trees_are_not_changed(name):
    tx = make(name)
    params = tree_of(0)
    gradient = tree_of(100)
    state = tx.init(params)
    tx.update(gradient, state, params)
    assert_identical((params, gradient), (tree_of(0), tree_of(100)))
    assert_identical(state, tx.init(params))


OF_MODULI = {
    "lamb_moments",
    "lamb",
    "lamb_timm_decoupled",
    "lamb_apex_l2",
    "lans",
    "scale_by_lans",
    "skip",
    "transfer",
    "newton_schulz",
    "matrix_shape",
    "neuron_norm",
    "nesterov_outer",
    "muloco",
    "muon",
    "muon_optax",
    "normuon",
    "muonh",
    "scion",
    "adamh",
    "compress",
    "compress_bf16",
    "round",
    "compensate",
}
"""Transforms that divide by the root of a mean of |g|^2, or take complex matrices as such."""
REAL_ONLY = {
    "lamb_narrow_moments": ("mu_dtype", "bfloat16"),
    "lars_nus": ("update_bounds", (-10.0, 10.0)),
}


@each
def test_complex_leaves_count_by_their_moduli_or_are_refused_by_name(name):
    """Where no number is divided by its own size, a + bi equals two parameters a and b."""
    parts = {
        "w": {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 2)), jnp.float32)}
    }
    grads = {
        "w": {"kernel": jnp.asarray(np.random.default_rng(1).normal(size=(3, 4, 2)), jnp.float32)}
    }
    joined, gradient = (
        jax.tree.map(lambda x: jax.lax.complex(x[..., 0], x[..., 1]), tree)
        for tree in (parts, grads)
    )
    tx = make(name)
    if name in REFUSES_COMPLEX:
        with refused("params/w/kernel", code="type"):
            tx.init(joined)
        return
    if name in REAL_ONLY:
        with refused(*REAL_ONLY[name], "conflict") as caught:
            tx.update(gradient, tx.init(joined), joined)
        assert {"w/kernel", "complex64"} <= names_in(caught)
        return
    ours, state = tx.update(gradient, tx.init(joined), joined)
    assert kinds(state) == kinds(tx.init(joined))

    def apart(tree):
        return jax.tree.map(
            lambda x: jnp.stack([x.real, x.imag], -1) if jnp.iscomplexobj(x) else x, tree
        )

    if name not in OF_MODULI:
        theirs, expected = tx.update(grads, tx.init(parts), parts)
        assert_close(apart(ours), theirs, 1e-6)
        assert_close(apart(state), expected, 1e-6)
        return
    turned = jax.tree.map(lambda x: x * 1j, (gradient, joined))
    updates, _ = tx.update(turned[0], tx.init(turned[1]), turned[1])
    assert_close(apart(jax.tree.map(lambda x: x * -1j, updates)), apart(ours), 1e-6)
    real, gradient = (jax.tree.map(lambda x: x[..., 0], tree) for tree in (parts, grads))
    joined = jax.tree.map(lambda x: x.astype(jnp.complex64), real)
    updates, _ = tx.update(
        jax.tree.map(lambda x: x.astype(jnp.complex64), gradient), tx.init(joined), joined
    )
    expected, _ = tx.update(gradient, tx.init(real), real)
    assert_close(apart(updates), jax.tree.map(lambda x: jnp.stack([x, 0 * x], -1), expected), 1e-6)


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_complex_leaves_beside_real_ones_equal_optax(name):
    def draw(seed):
        rng = np.random.default_rng(seed)
        return {
            "kernel": rng.normal(size=(4, 3)) + 1j * rng.normal(size=(4, 3)),
            "other": rng.normal(size=(5, 2)),
        }

    with jax.enable_x64(True):
        ours = getattr(lbopt, name)(0.1, weight_decay=0.1, variant="optax")
        theirs = getattr(optax, name)(0.1, weight_decay=0.1)
        ends = []
        for tx in (ours, theirs):
            params = jax.tree.map(jnp.asarray, draw(0))
            state = tx.init(params)
            update = jax.jit(tx.update)
            for step in range(20):
                updates, state = update(jax.tree.map(jnp.asarray, draw(1 + step)), state, params)
                params = optax.apply_updates(params, updates)
            ends.append(params)
        for leaf in ends[1]:
            assert np.linalg.norm(ends[0][leaf] - ends[1][leaf]) <= 1e-10 * np.linalg.norm(
                ends[1][leaf]
            )
        with refused("updates/kernel", code="type") as caught:
            ours.update(jax.tree.map(jnp.real, params), ours.init(params), params)
        assert re.findall("[a-z]+[0-9]+", caught.value.reason) == ["float64", "complex128"]


@each
@pytest.mark.parametrize(
    ("param", "gradient"),
    [
        (np.int32(0), np.zeros((), jax.dtypes.float0)),
        (np.int32(0), np.int32(0)),
        (1.0, 1.0),
        (np.float32(1), 1.0),
    ],
    ids=["float0", "int32", "number", "numeric_gradient"],
)
def test_leaves_that_are_no_floating_point_arrays_are_refused_by_name(name, param, gradient):
    tx = make(name)
    params = {"kernel": jnp.ones((4, 4)), "steps": param}
    with refused(ANY, code="type") as caught:
        tx.update({"kernel": jnp.ones((4, 4)), "steps": gradient}, tx.init(params), params)
    assert caught.value.field in ("params/steps", "updates/steps")


@pytest.mark.parametrize(
    ("factory", "options", "argument"),
    [
        (lbopt.lamb, {"learning_rate": 0.1, "mu_dtype": jnp.bfloat16}, "mu_dtype"),
        (lbopt.lamb, {"learning_rate": 0.1, "nu_dtype": jnp.float16}, "nu_dtype"),
        (lbopt.lans, {"learning_rate": 0.1, "mu_dtype": jnp.bfloat16}, "mu_dtype"),
        (lbopt.lars, {"learning_rate": 0.1, "momentum_dtype": jnp.bfloat16}, "momentum_dtype"),
        (lbopt.track_ema, {"ema_dtype": jnp.bfloat16}, "ema_dtype"),
    ],
)
def test_an_injected_dtype_is_refused_and_kept_if_it_is_static(factory, options, argument):
    params = tree_of(0)
    with refused(argument, code="type") as caught:
        optax.inject_hyperparams(factory)(**options).init(params)
    assert f'static_args=("{argument}",)' in caught.value.reason
    state = optax.inject_hyperparams(factory, static_args=(argument,))(**options).init(params)
    assert jnp.dtype(options[argument]) in {
        leaf.dtype for leaf in jax.tree.leaves(state.inner_state)
    }


@pytest.mark.parametrize("argument", ["mu_dtype", "nu_dtype"])
def test_moments_in_eight_bits_are_refused(argument):
    with refused(argument, "float8_e4m3fn", "value"):
        lbopt.lamb(0.1, **{argument: "float8_e4m3fn"})


@each
def test_injected_numbers_in_bf16_are_refused_and_those_in_fp32_kept(name):
    factory, options, static, _ = TABLE[name]
    has_numbers = any(isinstance(value, float) for value in options.values())
    params = tree_of(0, jnp.bfloat16)
    for dtype in (jnp.bfloat16, jnp.complex64) if has_numbers else ():
        with refused(ANY, code="type") as caught:
            optax.inject_hyperparams(factory, static_args=static)(**options).init(tree_of(0, dtype))
        assert caught.value.value.dtype == dtype
    wide = optax.inject_hyperparams(factory, static_args=static, hyperparam_dtype=jnp.float32)(
        **options
    )
    updates, _ = run(wide, params, steps=1)
    assert_close(updates, run(make(name), params, steps=1)[0], 2**-8)


@each
def test_strict_promotion_changes_nothing(name):
    factory, options, _, _ = TABLE[name]
    if callable(options.get("learning_rate")):  # the table's own schedule divides by an integer
        options = {**options, "learning_rate": lbopt.warmup_schedule(0.1, 2, 8, decay="cosine")}

    tx = factory(**options)
    params = tree_of(0, jnp.bfloat16)
    gradient = tree_of(100, jnp.bfloat16)
    expected = tx.update(gradient, tx.init(params), params)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert_identical(tx.update(gradient, tx.init(params), params), expected)

        for dtype in (
            jnp.float8_e5m2,
            jnp.float4_e2m1fn,
            *[jnp.complex64][name in {*REAL_ONLY, *REFUSES_COMPLEX} :],
        ):
            params = jax.tree.map(
                lambda p, dtype=dtype: jax.ShapeDtypeStruct(p.shape, dtype), params
            )
            state = jax.eval_shape(tx.init, params)
            assert kinds(jax.eval_shape(tx.update, params, state, params)) == kinds((params, state))

        with jax.enable_x64(True):
            params = {**tree_of(0, jnp.float64), "norm": tree_of(0)["norm"]}
            state = jax.eval_shape(tx.init, params)
            after = jax.eval_shape(tx.update, params, state, params)
            assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [
                leaf.dtype for leaf in jax.tree.leaves((params, state))
            ]


SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
OF_A_STEP = {
    "noise_scale": (
        lbopt.track_noise_scale(64),
        {"small_square_norm": SCALAR, "num_small": SCALAR},
    ),
    "agvm": (
        lbopt.scale_by_agvm({"all": ""}),
        {"agvm_scale": {"all": SCALAR}, "agvm_phi": {"all": SCALAR}},
    ),
}
"""Transforms whose update needs a step's measurements."""


@pytest.mark.parametrize("name", [*rows(), *OF_A_STEP])
@pytest.mark.parametrize("kind", boxes.KINDS)
def test_the_state_of_parameters_in_boxes_can_be_sharded_as_they_are(name, kind):
    others = {"base_params": boxes.boxed(kind, NARROW)} if name == "transfer" else {}
    tx, extra = (make(name, **others), {}) if name in TABLE else OF_A_STEP[name]
    params = boxes.boxed(kind, tree_of(0))
    shapes = jax.eval_shape(tx.init, params)
    boxes.check_ranks(kind, shapes)
    after = jax.eval_shape(tx.update, params, shapes, params, **extra)[1]
    assert (jax.tree.leaves(after), jax.tree.structure(after)) == (
        jax.tree.leaves(shapes),
        jax.tree.structure(shapes),
    )


SPLIT = (
    "muloco",
    "muon",
    "muon_optax",
    "normuon",
    "muonh",
    "scion",
    "soap",
    "soaph",
    "dion",
    "shampoo",
    "kron",
    "muown",
)
"""Optimizers of groups: `optax.masked` takes leaves out of their states."""


@pytest.mark.parametrize("name", SPLIT)
def test_tree_map_params_works_on_split_optimizers(name):
    """With further trees it does not, as for every optimizer that is made of `optax.masked`."""
    tx = make(name)
    state = jax.eval_shape(tx.init, tree_of(0))
    mapped = optax.tree_utils.tree_map_params(
        tx, lambda leaf: str(leaf.shape), state, transform_non_params=lambda _: None
    )
    assert {"(8, 4)", "(4, 2, 3)", "(4,)"} <= set(jax.tree.leaves(mapped))


@pytest.mark.parametrize("name", rows(*SPLIT))
def test_tree_map_params_finds_what_is_like_the_parameters(name):
    tx = make(name)
    params = tree_of(0)
    state = jax.eval_shape(tx.init, params)
    specs = jax.tree.map(lambda p: PartitionSpec(*boxes.AXES[: p.ndim]), params)
    mapped = optax.tree_utils.tree_map_params(
        tx,
        lambda leaf, p: leaf.shape == p.shape,
        state,
        params,
        transform_non_params=lambda _: None,
    )
    assert all(jax.tree.leaves(mapped))
    shardings = optax.tree_utils.tree_map_params(
        tx, lambda _, spec: spec, state, specs, transform_non_params=lambda _: PartitionSpec()
    )
    for spec, part in zip(
        jax.tree.leaves(shardings), jax.tree.structure(shardings).flatten_up_to(state), strict=True
    ):
        assert all(len(spec) <= leaf.ndim for leaf in jax.tree.leaves(part))
