"""Optimizers compute the same on shards in `shard_map` and on sharded arrays under `jit`.

The reference is their result on whole arrays.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import lbopt

SPECS = {
    "a": {"kernel": P("x", None), "bias": P()},
    "b": {"kernel": P(None, "x")},
    "stack": {"kernel": P(None, "x", None)},
}
SPLIT = jax.tree.map(lambda spec: spec != P(), SPECS, is_leaf=lambda node: isinstance(node, P))
STACKED = lbopt.stacked_paths("^stack/")
BUILD = {
    "lamb": functools.partial(lbopt.lamb, 0.1, weight_decay=0.1, max_grad_norm=0.5),
    "lamb_layers": functools.partial(lbopt.lamb, 0.1, weight_decay=0.1, stacked=STACKED),
    "lamb_unguarded": functools.partial(lbopt.lamb, 0.1, variant="flax", weight_decay=0.1),
    "lans": functools.partial(lbopt.lans, 0.1, weight_decay=0.1, stacked=STACKED),
    "lars": functools.partial(lbopt.lars, 0.1, weight_decay=0.1, trust_coefficient=0.1),
    "lars_outside": functools.partial(
        lbopt.lars, 0.1, variant="nus", weight_decay=0.1, trust_coefficient=0.1
    ),
    "lars_lamb_paper": functools.partial(lbopt.lars, 0.1, variant="lamb_paper", weight_decay=0.1),
    "hyperball": lambda **where: optax.chain(
        lbopt.cautious(lbopt.scale_by_lars_momentum(0.8), **where),
        lbopt.update_floor(0.3, **where),
        lbopt.relative_update("initial", stacked=STACKED, **where),
        lbopt.scale_by_learning_rate(0.1),
        lbopt.hyperball(stacked=STACKED, **where),
    ),
    "brake": lambda **where: optax.chain(
        lbopt.relative_update(0.5, **where),
        lbopt.scale_by_learning_rate(0.1),
        lbopt.radial_brake(**where),
    ),
}


def tree_of(seed):
    rng = np.random.default_rng(seed)
    shapes = {
        "a": {"kernel": (8, 3), "bias": (5,)},
        "b": {"kernel": (3, 4)},
        "stack": {"kernel": (3, 4, 2)},
    }
    return jax.tree.map(
        lambda shape: np.float32(rng.normal(size=shape)),
        shapes,
        is_leaf=lambda s: isinstance(s, tuple),
    )


PARAMS = tree_of(0)
GRADS = [tree_of(seed) for seed in (1, 2, 3)]


def walk(tx, params, grads):
    """Return (parameters, ratios) after a few steps."""
    state = tx.init(params)
    for gradient in grads:
        updates, state = tx.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    ratios = {
        name: value
        for name, value in lbopt.optimizer_metrics(state).items()
        if "trust_ratio" in name
    }
    return params, ratios


def on_shards(tx, specs=SPECS, check_vma=True):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    inside = jax.shard_map(
        lambda params, grads: walk(tx, params, grads),
        mesh=mesh,
        in_specs=(specs, [specs] * len(GRADS)),
        out_specs=(specs, P()),
        check_vma=check_vma,
    )
    return jax.jit(inside)(PARAMS, GRADS)


def assert_same(ours, expected, limit=2e-6):
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(mine - other) <= limit * np.linalg.norm(other)


@pytest.mark.everyday(
    "lamb-True",
    "lans-True",
    "lars-True",
    "lamb_layers-False",
    "lars_outside-False",
    "lamb_unguarded-False",
    "lars_lamb_paper-True",
)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", BUILD)
def test_inside_shard_map(name, check_vma):
    ours = on_shards(BUILD[name](axis_name="x", sharded_mask=SPLIT), check_vma=check_vma)
    assert_same(ours, walk(BUILD[name](), PARAMS, GRADS))


@pytest.mark.everyday("lamb", "lars", "lamb_layers")
@pytest.mark.parametrize("name", BUILD)
def test_under_jit_on_sharded_arrays(name):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    place = lambda tree: jax.tree.map(  # noqa: E731
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), tree, SPECS
    )
    ours = jax.jit(functools.partial(walk, BUILD[name]()))(
        place(PARAMS), [place(gradient) for gradient in GRADS]
    )
    assert_same(ours, walk(BUILD[name](), PARAMS, GRADS))


def test_norms_of_the_shards_alone_would_be_seen():
    (ours, _) = on_shards(BUILD["lars"](), check_vma=False)
    (expected, _) = walk(BUILD["lars"](), PARAMS, GRADS)
    moved = lambda tree: tree["a"]["kernel"] - PARAMS["a"]["kernel"]  # noqa: E731
    assert np.linalg.norm(moved(ours) - moved(expected)) > 0.01 * np.linalg.norm(moved(expected))


def test_a_whole_leaf_taken_for_split_would_be_seen_by_its_eps():
    """Without eps both norms would be wrong by one factor, and the ratio right by accident."""
    build = functools.partial(
        lbopt.lars, 0.1, trust_ratio_mask=None, trust_coefficient=0.1, eps=1.0, axis_name="x"
    )
    _, wrong = on_shards(build(), check_vma=False)
    _, right = on_shards(build(sharded_mask=SPLIT))
    assert abs(float(wrong["trust_ratio/a/bias"] / right["trust_ratio/a/bias"]) - 1) > 0.1
    assert np.isclose(wrong["trust_ratio/a/kernel"], right["trust_ratio/a/kernel"], rtol=2e-6)


@pytest.mark.slow
def test_clip_counts_a_whole_leaf_once():
    norms = {}
    for split in (None, SPLIT):
        tx = lbopt.clip_by_global_norm(1.0, axis_name="x", sharded_mask=split)
        mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
        inside = lambda grads, tx=tx: tx.update(grads, tx.init(None))[1].global_norm  # noqa: E731
        norms[split is None] = jax.shard_map(
            inside, mesh=mesh, in_specs=(SPECS,), out_specs=P(), check_vma=False
        )(GRADS[0])
    expected = np.sqrt(
        sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(GRADS[0]))
    )
    assert np.isclose(norms[False], expected, rtol=1e-6)
    assert norms[True] > 1.01 * expected


@pytest.mark.everyday("build2")
@pytest.mark.parametrize(
    "build",
    [
        lbopt.monitor_layers,
        functools.partial(lbopt.normalize_gradients, "layer"),
        functools.partial(lbopt.normalize_gradients, "global"),
    ],
)
def test_other_transforms_inside_shard_map(build):
    def outcome(tx, params, gradient):
        updates, state = tx.update(gradient, tx.init(params), params)
        return updates, lbopt.optimizer_metrics(state)

    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    tx = build(axis_name="x", sharded_mask=SPLIT)
    ours = jax.shard_map(
        functools.partial(outcome, tx), mesh=mesh, in_specs=(SPECS, SPECS), out_specs=(SPECS, P())
    )(PARAMS, GRADS[0])
    assert_same(
        ours,
        outcome(build(), jax.tree.map(jnp.asarray, PARAMS), jax.tree.map(jnp.asarray, GRADS[0])),
    )


LARS = BUILD["lars"]()
ON_SHARDS = jax.jit(
    lambda params, grads: jax.shard_map(
        functools.partial(walk, BUILD["lars"](axis_name="x", sharded_mask=SPLIT)),
        mesh=jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,)),
        in_specs=(SPECS, [SPECS]),
        out_specs=(SPECS, P()),
    )(params, grads)
)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**16), st.lists(st.floats(-6, 6), min_size=4, max_size=4))
def test_shards_of_any_size_of_weights_and_gradients(seed, exponents):
    sizes = iter(exponents)
    params = jax.tree.map(lambda leaf: np.float32(10.0 ** next(sizes) * leaf), tree_of(seed))
    grads = [tree_of(seed + 1)]
    ours = ON_SHARDS(params, grads)
    expected = walk(LARS, params, grads)
    for name, ratio in expected[1].items():
        assert np.isclose(ours[1][name], ratio, rtol=2e-6)
    assert_same(ours[0], expected[0])
