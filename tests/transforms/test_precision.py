"""Only what the user asked to be narrow is narrow: parameters, gradients, moments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lbopt

BUILD = {
    "lamb": lambda **options: lbopt.lamb(0.1, weight_decay=0.25, **options),
    "lans": lambda **options: lbopt.lans(0.1, weight_decay=0.25, **options),
    "lars": lambda **options: lbopt.lars(0.1, weight_decay=0.25, trust_coefficient=0.1, **options),
    "lars_outside": lambda **options: lbopt.lars(0.1, weight_decay=0.25, variant="nus", **options),
}


def tree_of(seed, dtype):
    rng = np.random.default_rng(seed)
    return {"kernel": jnp.asarray(rng.normal(size=(64, 48)), jnp.bfloat16).astype(dtype)}


def run(tx, dtype, steps=4):
    """Return (updates, ratios) of the last of a few updates on fixed parameters."""
    params = tree_of(0, dtype)
    state = tx.init(params)
    for seed in range(1, steps + 1):
        updates, state = tx.update(tree_of(seed, dtype), state, params)
    return updates["kernel"], np.array(
        [value for name, value in lbopt.optimizer_metrics(state).items() if "ratio" in name]
    )


@pytest.mark.parametrize("name", BUILD)
def test_bf16_parameters_and_gradients_give_the_fp32_ratio(name):
    """The values are the same, so that only the arithmetic can differ."""
    update, ratios = run(BUILD[name](), jnp.bfloat16)
    expected, expected_ratios = run(BUILD[name](), jnp.float32)
    assert update.dtype == jnp.bfloat16
    assert np.allclose(ratios, expected_ratios, rtol=1e-6)
    wide = np.asarray(update, np.float64)
    assert np.max(np.abs(wide - expected) / np.abs(expected)) <= 2**-8, (
        "one rounding to bf16 at the end, no more"
    )


def test_rounding_between_the_links_would_be_seen():
    links = (
        lbopt.scale_by_lamb_moments(),
        lbopt.scale_by_layerwise_trust_ratio(weight_decay=0.25),
        lbopt.scale_by_learning_rate(0.1),
    )
    update, ratios = run(optax.chain(*links), jnp.bfloat16)
    expected, expected_ratios = run(BUILD["lamb"](), jnp.float32)
    assert not np.allclose(ratios, expected_ratios, rtol=1e-6)
    assert np.max(np.abs(np.asarray(update, np.float64) - expected) / np.abs(expected)) > 2**-8


@pytest.mark.parametrize(
    ("build", "options", "kept"),
    [
        (BUILD["lamb"], {"mu_dtype": "bfloat16"}, {"bfloat16": 1, "float32": 1}),
        (BUILD["lamb"], {"mu_dtype": "bfloat16", "nu_dtype": jnp.bfloat16}, {"bfloat16": 2}),
        (BUILD["lans"], {"nu_dtype": "bfloat16"}, {"bfloat16": 1, "float32": 1}),
        (BUILD["lars"], {"momentum_dtype": "bfloat16"}, {"bfloat16": 1}),
        (BUILD["lars_outside"], {"momentum_dtype": "bfloat16"}, {"bfloat16": 1}),
        (BUILD["lamb"], {}, {"float32": 2}),
    ],
)
def test_dtype_of_the_kept_moments(build, options, kept):
    tx = build(**options)
    state = tx.init(tree_of(0, jnp.float32))
    for _ in range(2):
        dtypes = [str(leaf.dtype) for leaf in jax.tree.leaves(state) if leaf.ndim == 2]
        assert {dtype: dtypes.count(dtype) for dtype in set(dtypes)} == kept
        _, state = tx.update(tree_of(1, jnp.float32), state, tree_of(0, jnp.float32))


def test_bf16_moments_stay_near_fp32_ones():
    narrow, _ = run(
        lbopt.lamb(0.1, b2=0.9, mu_dtype="bfloat16", nu_dtype="bfloat16"), jnp.float32, steps=20
    )
    wide, _ = run(lbopt.lamb(0.1, b2=0.9), jnp.float32, steps=20)
    error = np.linalg.norm(narrow - wide) / np.linalg.norm(wide)
    assert 1e-4 < error < 0.02


@pytest.mark.slow
def test_second_moment_in_bf16_stops_following_at_b2_near_one():
    """The docstring warns of this: v stops falling although every gradient is zero."""
    params = {"w": jnp.ones(4)}
    kept = {}
    for dtype in ("bfloat16", "float32"):
        tx = lbopt.scale_by_lamb_moments(b2=0.999, nu_dtype=dtype)
        state = tx.init(params)
        _, state = tx.update({"w": jnp.full(4, 8.0)}, state)
        first = float(state.nu["w"][0])
        for _ in range(1000):
            _, state = tx.update({"w": jnp.zeros(4)}, state)
        kept[dtype] = float(state.nu["w"][0]) / first
    assert kept["bfloat16"] == 1
    assert abs(kept["float32"] - 0.999**1000) < 1e-3
