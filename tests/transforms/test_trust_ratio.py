"""The ratio in the state against NumPy: precision, zero norms, bounds, denominators, masks."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

import lbopt

few = settings(max_examples=20, deadline=None, derandomize=True, database=None)
sizes = st.floats(-4, 4).map(lambda exponent: 10.0**exponent)
seeds = st.integers(0, 2**16)


def norm(x):
    return np.sqrt(np.sum(np.asarray(x, np.float64) ** 2))


def one(tx, weight, gradient):
    """Return (update, ratio) of a single adapted leaf."""
    params = {"kernel": jnp.asarray(weight)}
    updates, state = tx.update({"kernel": jnp.asarray(gradient)}, tx.init(params), params)
    return updates["kernel"], state.trust_ratio["kernel"]


def pair(seed, shape=(5, 4), dtype=np.float32):
    rng = np.random.default_rng(seed)
    return dtype(rng.normal(size=shape)), dtype(rng.normal(size=shape))


@pytest.mark.parametrize("shape", [(), (7,), (5, 4), (2, 3, 4), (3, 3, 2, 4)], ids=str)
@pytest.mark.parametrize("denominator", ["norm_of_sum", "sum_of_norms"])
def test_ratio_equals_numpy(denominator, shape):
    w, g = pair(1, shape)
    tx = lbopt.scale_by_layerwise_trust_ratio(
        None, 0.3, 0.01, weight_decay=0.2, weight_decay_mask=None, denominator=denominator
    )
    d = g.astype(np.float64) + 0.2 * w
    below = norm(d) if denominator == "norm_of_sum" else norm(g) + 0.2 * norm(w)
    expected = 0.3 * norm(w) / (below + 0.01)
    update, ratio = one(tx, w, g)
    assert ratio.shape == ()
    assert abs(ratio - expected) <= 1e-6 * expected
    assert norm(update - expected * d) <= 1e-6 * norm(expected * d)


def test_state_holds_one_before_the_first_update_and_nothing_where_not_adapted():
    params = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
    state = lbopt.scale_by_layerwise_trust_ratio().init(params)
    assert state.trust_ratio == {"dense/kernel": 1}


@pytest.mark.parametrize("denominator", ["norm_of_sum", "sum_of_norms"])
def test_norms_of_bf16_parameters_are_taken_in_fp32(denominator):
    w, g = (jnp.asarray(x, jnp.bfloat16) for x in pair(3, (64, 64)))
    tx = lbopt.scale_by_layerwise_trust_ratio(weight_decay=0.25, denominator=denominator)
    update, ratio = one(tx, w, g)
    wide_w = np.asarray(w, np.float64)
    wide_g = np.asarray(g, np.float64)
    below = (
        norm(wide_g + 0.25 * wide_w)
        if denominator == "norm_of_sum"
        else norm(wide_g) + 0.25 * norm(wide_w)
    )
    expected = norm(wide_w) / below
    assert (update.dtype, ratio.dtype) == (jnp.bfloat16, jnp.float32)
    assert abs(ratio - expected) <= 1e-6 * expected
    narrow = float(
        optax.safe_norm(w, 0.0) / optax.safe_norm(g + jnp.asarray(0.25, w.dtype) * w, 0.0)
    )
    assert abs(narrow - norm(wide_w) / norm(wide_g + 0.25 * wide_w)) > 1e-4, (
        "this case cannot tell narrow norms from wide ones"
    )


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@pytest.mark.parametrize("denominator", ["norm_of_sum", "sum_of_norms"])
def test_ratio_is_one_on_a_zero_weight(denominator, weight_decay):
    _, g = pair(4)
    tx = lbopt.scale_by_layerwise_trust_ratio(
        trust_coefficient=0.001, weight_decay=weight_decay, denominator=denominator
    )
    update, ratio = one(tx, np.zeros_like(g), g)
    assert ratio == 1
    assert np.array_equal(update, g)


def test_ratio_is_one_on_a_zero_gradient():
    w, _ = pair(5)
    zero = np.zeros_like(w)
    for denominator in ("norm_of_sum", "sum_of_norms"):
        update, ratio = one(lbopt.scale_by_layerwise_trust_ratio(denominator=denominator), w, zero)
        assert ratio == 1
        assert not np.any(update)
    update, ratio = one(
        lbopt.scale_by_layerwise_trust_ratio(
            trust_coefficient=0.01, weight_decay=0.5, denominator="sum_of_norms"
        ),
        w,
        zero,
    )
    assert ratio == 1
    assert np.array_equal(update, np.float32(0.5) * w)
    update, ratio = one(
        lbopt.scale_by_layerwise_trust_ratio(trust_coefficient=0.01, weight_decay=0.5), w, zero
    )
    assert abs(ratio - 0.02) <= 1e-6 * 0.02


@pytest.mark.parametrize("denominator", ["norm_of_sum", "sum_of_norms"])
def test_both_zero_gives_zero_and_no_nan(denominator):
    zero = np.zeros((3, 2), np.float32)
    update, ratio = one(
        lbopt.scale_by_layerwise_trust_ratio(weight_decay=0.1, denominator=denominator), zero, zero
    )
    assert ratio == 1
    assert np.array_equal(update, zero)


@few
@given(
    seeds,
    sizes,
    sizes,
    st.sampled_from([(0.0, 1.0), (0.5, 2.0), (1.0, 1.0), (0.0, 0.0), (3.0, np.inf)]),
)
def test_bounds_hold_and_are_idle_inside(seed, weight_size, update_size, bounds):
    w, g = pair(seed)
    w = np.float32(weight_size * w)
    g = np.float32(update_size * g)
    _, free = one(lbopt.scale_by_layerwise_trust_ratio(), w, g)
    update, ratio = one(lbopt.scale_by_layerwise_trust_ratio(trust_ratio_bounds=bounds), w, g)
    assert ratio == np.clip(free, *np.float32(bounds))
    assert norm(update - np.float64(ratio) * g) <= 1e-6 * norm(update)


def test_bounds_also_hold_for_the_ratio_of_a_zero_norm():
    _, g = pair(6)
    _, ratio = one(
        lbopt.scale_by_layerwise_trust_ratio(trust_ratio_bounds=(0.0, 0.25)), np.zeros_like(g), g
    )
    assert ratio == 0.25


def test_phi_of_a_zero_weight_is_its_lower_bound():
    _, g = pair(7)
    _, ratio = one(
        lbopt.scale_by_layerwise_trust_ratio(weight_norm_bounds=(0.5, 8.0)), np.zeros_like(g), g
    )
    assert abs(ratio - 0.5 / norm(g)) <= 1e-6 * ratio


@few
@given(seeds, sizes)
def test_weight_norm_bounds_are_the_phi_of_the_paper(seed, size):
    w, g = pair(seed)
    w = np.float32(size * w)
    _, ratio = one(lbopt.scale_by_layerwise_trust_ratio(weight_norm_bounds=(0.5, 8.0)), w, g)
    expected = np.clip(norm(w), 0.5, 8.0) / norm(g)
    assert abs(ratio - expected) <= 1e-6 * expected


@few
@given(seeds, st.lists(sizes, min_size=2, max_size=2))
def test_rescaling_the_gradients_of_a_layer_changes_no_step(seed, factors):
    rng = np.random.default_rng(seed)
    params = {
        name: {"kernel": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)} for name in ("a", "b")
    }
    gradients = [{name: {"kernel": rng.normal(size=(3, 4))} for name in params} for _ in range(3)]

    for tx in (lbopt.lamb(0.1, eps=0.0), lbopt.lars(0.1, trust_coefficient=0.1)):

        def descend(scale, tx=tx):
            current = params
            state = tx.init(params)
            for gradient in gradients:
                scaled = {
                    name: {"kernel": jnp.float32(factor * gradient[name]["kernel"])}
                    for name, factor in zip(params, scale, strict=True)
                }
                updates, state = tx.update(scaled, state, current)
                current = optax.apply_updates(current, updates)
            return current

        plain = descend((1.0, 1.0))
        scaled = descend(factors)
        for name in params:
            moved = norm(plain[name]["kernel"] - params[name]["kernel"])
            assert moved > 0.01
            assert norm(scaled[name]["kernel"] - plain[name]["kernel"]) <= 1e-5 * moved


def base_lamb(*decay):
    return optax.chain(lbopt.scale_by_lamb_moments(), *decay, lbopt.scale_by_learning_rate(0.1))


def base_lars():
    return optax.chain(lbopt.scale_by_learning_rate(0.1), lbopt.scale_by_lars_momentum())


NOT_ADAPTED = {
    "lamb": (lbopt.lamb, {"weight_decay_mask": False}, base_lamb),
    "lamb_decayed": (
        lbopt.lamb,
        {"weight_decay_mask": None},
        lambda: base_lamb(optax.add_decayed_weights(0.1)),
    ),
    "lars": (lbopt.lars, {"weight_decay_mask": False}, base_lars),
    "lars_decayed": (
        lbopt.lars,
        {"weight_decay_mask": None},
        lambda: optax.chain(optax.add_decayed_weights(0.1), base_lars()),
    ),
}


@pytest.mark.parametrize("mask", [False, {"kernel": True, "bias": False}], ids=["none", "kernel"])
@pytest.mark.parametrize("case", NOT_ADAPTED)
@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@given(seed=seeds)
def test_leaves_that_are_not_adapted_equal_the_base_optimizer_bit_for_bit(case, mask, seed):
    build, options, base = NOT_ADAPTED[case]
    rng = np.random.default_rng(seed)
    trees = [
        {"kernel": np.float32(rng.normal(size=(4, 3))), "bias": np.float32(rng.normal(size=3))}
        for _ in range(4)
    ]
    params, *gradients = [
        {name: jnp.asarray(leaf) for name, leaf in leaves.items()} for leaves in trees
    ]
    ours = build(0.1, weight_decay=0.1, trust_ratio_mask=mask, **options)
    base = base()
    state = ours.init(params)
    base_state = base.init(params)
    for gradient in gradients:
        updates, state = ours.update(gradient, state, params)
        expected, base_state = base.update(gradient, base_state, params)
    assert np.array_equal(updates["bias"], expected["bias"])
    assert np.array_equal(updates["kernel"], expected["kernel"]) == (mask is False)


def test_lars_on_leaves_that_are_not_adapted_is_sgd_with_momentum():
    w, g = pair(9)
    ours = lbopt.lars(0.1, trust_ratio_mask=False)
    sgd = optax.sgd(0.1, momentum=0.9)
    state = ours.init({"kernel": w})
    sgd_state = sgd.init({"kernel": w})
    for _ in range(3):
        updates, state = ours.update({"kernel": jnp.asarray(g)}, state, {"kernel": jnp.asarray(w)})
        expected, sgd_state = sgd.update({"kernel": jnp.asarray(g)}, sgd_state)
    assert norm(updates["kernel"] - expected["kernel"]) <= 1e-6 * norm(expected["kernel"])


@pytest.mark.parametrize("placement", ["outside", "norm_only", "before"])
def test_where_the_decay_goes(placement):
    w, g = pair(11)
    tx = lbopt.scale_by_layerwise_trust_ratio(weight_decay=0.5, weight_decay_placement=placement)
    update, ratio = one(tx, w, g)
    decayed = g + 0.5 * np.float64(w)
    expected_ratio = norm(w) / norm(decayed if placement == "norm_only" else g)
    expected = expected_ratio * g + (0.5 * np.float64(w) if placement == "outside" else 0)
    assert abs(ratio - expected_ratio) <= 1e-6 * expected_ratio
    assert norm(update - expected) <= 1e-6 * norm(expected)


def test_another_ratio_where_a_norm_is_zero():
    _, g = pair(12)
    update, ratio = one(
        lbopt.scale_by_layerwise_trust_ratio(zero_norm_ratio=0.25), np.zeros_like(g), g
    )
    assert ratio == 0.25
    assert np.array_equal(update, 0.25 * g)


@pytest.mark.parametrize("per", ["layer", "global"])
@pytest.mark.parametrize("stage", ["after_clip", "before_clip"])
def test_stage_of_the_normalisation_of_gradients(stage, per):
    """The clip's log has the norms of its input: raw gradients or normalised ones."""
    params = {name: {"kernel": jnp.asarray(pair(seed)[0])} for name, seed in (("a", 13), ("b", 14))}
    grads = {
        name: {"kernel": jnp.asarray(3 * pair(seed)[1])} for name, seed in (("a", 15), ("b", 16))
    }
    tx = lbopt.lamb(
        0.1, max_grad_norm=0.5, gradient_normalization=per, gradient_normalization_stage=stage
    )
    _, state = tx.update(grads, tx.init(params), params)
    whole = np.sqrt(sum(norm(leaf["kernel"]) ** 2 for leaf in grads.values()))
    seen = whole if stage == "after_clip" else np.sqrt(2) if per == "layer" else 1.0
    assert np.isclose(lbopt.optimizer_metrics(state)["gradient_norm"], seen, rtol=1e-6)
    moments = next(link for link in state if hasattr(link, "mu"))
    entering = np.sqrt(sum(norm(leaf["kernel"]) ** 2 for leaf in moments.mu.values())) / 0.1
    assert np.isclose(
        entering,
        0.5 if stage == "before_clip" else np.sqrt(2) if per == "layer" else 1.0,
        rtol=1e-5,
    )
