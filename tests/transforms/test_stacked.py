"""A stack of layers gets one ratio per layer, so its updates equal those of separate leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

import lbopt

few = settings(max_examples=10, deadline=None, derandomize=True, database=None)
LAYERS = 4
BUILD = {
    "lamb": lambda **options: lbopt.lamb(0.1, weight_decay=0.1, **options),
    "lamb_clip": lambda **options: lbopt.lamb(0.1, variant="nvlamb", **options),
    "lamb_timm": lambda **options: lbopt.lamb(0.1, variant="timm", **options),
    "lamb_layer_gradients": lambda **options: lbopt.lamb(
        0.1, gradient_normalization="layer", **options
    ),
    "lans": lambda **options: lbopt.lans(0.1, weight_decay=0.1, **options),
    "lars": lambda **options: lbopt.lars(0.1, weight_decay=0.1, trust_coefficient=0.1, **options),
    "lars_outside": lambda **options: lbopt.lars(
        0.1, variant="contrib_2018", trust_coefficient=0.1, **options
    ),
    "lars_flax": lambda **options: lbopt.lars(
        0.1, variant="flax", trust_coefficient=0.1, **options
    ),
    "lars_lamb_paper": lambda **options: lbopt.lars(0.1, variant="lamb_paper", **options),
    "larc": lambda **options: lbopt.lars(0.1, variant="nvcaffe", **options),
}
BUILD_RELATIVE = {
    "radial_brake": lambda **options: optax.chain(
        lbopt.relative_update(**options), lbopt.radial_brake(**options)
    ),
    "update_floor": lambda **options: lbopt.update_floor(0.8, **options),
    "cautious": lambda **options: lbopt.cautious(lbopt.scale_by_lars_momentum(0.8), **options),
    "adamh": lambda **options: lbopt.adamh(0.1, **options),
}


def layers_of(seed):
    """Return [layers] of {"kernel", "bias"} at scales a factor of 10 apart; one is zero."""
    rng = np.random.default_rng(seed)
    scales = np.array([1.0, 0.1, 10.0, 0.0]) if seed == 0 else np.ones(LAYERS)
    return [
        {
            "kernel": jnp.float32(s * rng.normal(size=(3, 4))),
            "bias": jnp.float32(rng.normal(size=4)),
        }
        for s in scales
    ]


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def whole(layers, head):
    return {"stack": stack(layers), "head": head}, {
        **{str(i): layer for i, layer in enumerate(layers)},
        "head": head,
    }


@pytest.mark.parametrize("name", BUILD)
def test_stack_equals_its_layers(name):
    def head(seed):
        return {"kernel": jnp.float32(np.random.default_rng(seed).normal(size=(4, 2)))}

    stacked = BUILD[name](stacked=lbopt.stacked_paths("^stack/"))
    plain = BUILD[name]()
    params, their_params = whole(layers_of(0), head(50))
    state = stacked.init(params)
    their_state = plain.init(their_params)
    for seed in range(1, 6):
        grads, their_grads = whole(layers_of(seed), head(50 + seed))
        updates, state = stacked.update(grads, state, params)
        their_updates, their_state = plain.update(their_grads, their_state, their_params)
        params, their_params = (
            optax.apply_updates(p, u) for p, u in ((params, updates), (their_params, their_updates))
        )
        expected, _ = whole([their_updates[str(i)] for i in range(LAYERS)], their_updates["head"])
        for ours, other in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
            assert np.allclose(ours, other, rtol=2e-6, atol=1e-7 * np.max(np.abs(other)))
    ours = lbopt.optimizer_metrics(state)
    theirs = lbopt.optimizer_metrics(their_state)
    for i in range(LAYERS):
        assert np.isclose(
            ours[f"trust_ratio/stack/kernel[{i}]"], theirs[f"trust_ratio/{i}/kernel"], rtol=2e-6
        )
    assert ours["trust_ratio/head/kernel"].shape == ()


@pytest.mark.filterwarnings("ignore:.*stay zero")
@pytest.mark.parametrize("axis", [0, 1], ids=["layers", "heads"])
@pytest.mark.parametrize("name", BUILD_RELATIVE)
def test_relative_updates_of_a_stack_are_those_of_its_layers(name, axis):
    """Untold, the stack moves otherwise."""
    paths = lbopt.stacked_paths("kernel", axis=axis)
    told, plain, untold = (BUILD_RELATIVE[name](stacked=stacked) for stacked in (paths, None, None))

    def stacked(trees):
        return {"kernel": jnp.stack([tree["kernel"] for tree in trees], axis)}

    params = layers_of(0)
    found = []
    for tx, trees in ((told, map(layers_of, (0, 1, 2))), (untold, map(layers_of, (0, 1, 2)))):
        params, *grads = map(stacked, trees)
        state = tx.init(params)
        for gradient in grads:
            updates, state = tx.update(gradient, state, params)
        found.append(jnp.moveaxis(updates["kernel"], axis, 0))

    expected = []
    for index in range(LAYERS):
        params, *grads = (layers_of(seed)[index] for seed in (0, 1, 2))
        state = plain.init(params)
        for gradient in grads:
            updates, state = plain.update(gradient, state, params)
        expected.append(updates["kernel"])
    np.testing.assert_allclose(found[0], np.stack(expected), rtol=2e-6, atol=1e-6)
    assert not np.allclose(found[1], np.stack(expected), rtol=1e-2, atol=1e-3)


def test_without_being_told_the_stack_is_one_layer():
    params = stack(layers_of(0))
    grads = stack(layers_of(1))
    told, untold = (
        lbopt.scale_by_layerwise_trust_ratio(stacked=stacked).update(
            grads, lbopt.scale_by_layerwise_trust_ratio(stacked=stacked).init(params), params
        )[1]
        for stacked in (lbopt.stacked_paths("."), None)
    )
    assert untold.trust_ratio["kernel"].shape == ()
    ratios = told.trust_ratio["kernel"]
    assert ratios.shape == (LAYERS,)
    assert np.max(ratios) / np.min(ratios) > 50


@few
@given(st.integers(0, 2**16), st.lists(st.floats(-3, 3), min_size=3, max_size=3), st.integers(1, 2))
def test_ratio_of_each_slice_is_the_ratio_of_the_slice(seed, exponents, axes):
    rng = np.random.default_rng(seed)
    scale = 10.0 ** np.array(exponents).reshape(3, 1, 1, 1)
    w = np.float32(scale * rng.normal(size=(3, 2, 4, 3)))
    g = np.float32(rng.normal(size=(3, 2, 4, 3)))
    tx = lbopt.scale_by_layerwise_trust_ratio(stacked=lambda name, leaf: axes, weight_decay=0.1)
    _, state = tx.update(
        {"kernel": jnp.asarray(g)}, tx.init({"kernel": jnp.asarray(w)}), {"kernel": jnp.asarray(w)}
    )
    shape = w.shape[:axes]
    assert state.trust_ratio["kernel"].shape == shape
    one = lbopt.scale_by_layerwise_trust_ratio(weight_decay=0.1)
    for index in np.ndindex(shape):
        leaf = {"kernel": jnp.asarray(w[index])}
        _, alone = one.update({"kernel": jnp.asarray(g[index])}, one.init(leaf), leaf)
        assert np.isclose(
            state.trust_ratio["kernel"][index], alone.trust_ratio["kernel"], rtol=1e-6
        )


def test_bias_of_a_stack_is_still_a_bias():
    params = {"stack": stack(layers_of(0)), "gain": jnp.ones((LAYERS, 3))}
    everything = lbopt.stacked_paths(".")
    state = lbopt.scale_by_layerwise_trust_ratio(stacked=everything).init(params)
    assert set(lbopt.optimizer_metrics(state)) == {
        f"trust_ratio/stack/kernel[{i}]" for i in range(LAYERS)
    }
    untold = lbopt.scale_by_layerwise_trust_ratio().init(params)
    assert "trust_ratio/gain" in lbopt.optimizer_metrics(untold), (
        "a stack of vectors looks like a matrix"
    )
