"""`optimizer_metrics` finds the rate and the ratios under every wrapper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from refusal import refused

import lbopt

RNG = np.random.default_rng(12)
PARAMS = {
    name: {"kernel": jnp.asarray(RNG.normal(size=(3, 4)), jnp.float32), "bias": jnp.ones(4)}
    for name in ("a", "b")
}
GRADS = {
    name: {"kernel": jnp.asarray(RNG.normal(size=(3, 4)), jnp.float32), "bias": jnp.ones(4)}
    for name in ("a", "b")
}


def expected(name, coefficient=0.01):
    return (
        coefficient * np.linalg.norm(PARAMS[name]["kernel"]) / np.linalg.norm(GRADS[name]["kernel"])
    )


def base(rate=0.25):
    return lbopt.lars(rate, trust_coefficient=0.01)


WRAPPED = {
    "bare": (base, 1),
    "chain": (lambda: optax.chain(optax.identity(), optax.chain(base(), optax.identity())), 1),
    "masked": (lambda: optax.masked(base(), jax.tree.map(lambda _: True, PARAMS)), 1),
    "inject_hyperparams": (
        lambda: optax.inject_hyperparams(lbopt.lars)(0.25, trust_coefficient=0.01),
        1,
    ),
    "apply_if_finite": (lambda: optax.apply_if_finite(base(), 3), 1),
    "multi_steps": (lambda: optax.MultiSteps(base(), 2), 2),
    "multi_transform": (
        lambda: optax.multi_transform({"all": base()}, jax.tree.map(lambda _: "all", PARAMS)),
        1,
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_under_a_wrapper(wrapper):
    make, calls = WRAPPED[wrapper]
    tx = make()
    state = tx.init(PARAMS)
    assert lbopt.optimizer_metrics(state)["learning_rate"] == 0
    for _ in range(calls):
        _, state = tx.update(GRADS, state, PARAMS)
    metrics = lbopt.optimizer_metrics(state)
    assert metrics.keys() == {"learning_rate", "trust_ratio/a/kernel", "trust_ratio/b/kernel"}
    assert metrics["learning_rate"] == 0.25
    for name in ("a", "b"):
        assert abs(metrics[f"trust_ratio/{name}/kernel"] - expected(name)) <= 1e-6 * expected(name)


def test_two_groups_of_multi_transform_have_two_rates_and_disjoint_ratios():
    labels = {name: {"kernel": name, "bias": name} for name in PARAMS}
    tx = optax.multi_transform(
        {"a": base(0.25), "b": lbopt.lars(0.5, trust_coefficient=0.02)}, labels
    )
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    metrics = lbopt.optimizer_metrics(state)
    assert metrics.keys() == {
        "learning_rate",
        "learning_rate_1",
        "trust_ratio/a/kernel",
        "trust_ratio/b/kernel",
    }
    assert (metrics["learning_rate"], metrics["learning_rate_1"]) == (0.25, 0.5)
    assert abs(metrics["trust_ratio/a/kernel"] - expected("a")) <= 1e-6 * expected("a")
    assert abs(metrics["trust_ratio/b/kernel"] - expected("b", 0.02)) <= 1e-6 * expected("b", 0.02)


def test_masked_out_layers_have_no_ratio():
    tx = optax.masked(
        base(), {"a": {"kernel": True, "bias": True}, "b": {"kernel": False, "bias": False}}
    )
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    assert lbopt.optimizer_metrics(state).keys() == {"learning_rate", "trust_ratio/a/kernel"}


def test_rate_is_the_one_that_was_applied():
    rates = jnp.asarray([0.5, 0.125, 0.0625])
    tx = lbopt.scale_by_learning_rate(lambda count: rates[count])
    state = tx.init(PARAMS)
    for rate in rates:
        updates, state = tx.update(GRADS, state)
        assert lbopt.optimizer_metrics((state,)) == {"learning_rate": rate}
        assert np.array_equal(updates["a"]["kernel"], -rate * GRADS["a"]["kernel"])


def test_works_inside_jit_and_on_a_foreign_state():
    tx = base()
    state = tx.init(PARAMS)
    inside = jax.jit(lambda state: lbopt.optimizer_metrics(tx.update(GRADS, state, PARAMS)[1]))(
        state
    )
    assert inside.keys() == {"learning_rate", "trust_ratio/a/kernel", "trust_ratio/b/kernel"}
    assert lbopt.optimizer_metrics(optax.adam(0.1).init(PARAMS)) == {}


def test_norms_of_every_layer_and_their_quotient():
    tx = optax.chain(base(), lbopt.monitor_layers())
    updates, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    metrics = lbopt.optimizer_metrics(state)
    for name in ("a/kernel", "a/bias", "b/kernel", "b/bias"):
        module, leaf = name.split("/")
        weight, update = (np.linalg.norm(tree[module][leaf]) for tree in (PARAMS, updates))
        assert np.isclose(metrics[f"weight_norm/{name}"], weight, rtol=1e-6)
        assert np.isclose(metrics[f"update_norm/{name}"], update, rtol=1e-6)
        assert np.isclose(metrics[f"update_over_weight/{name}"], update / weight, rtol=1e-6)


def test_norms_before_the_first_update_and_of_zero_weights_are_zero():
    params = {"kernel": jnp.zeros((2, 2))}
    tx = lbopt.monitor_layers()
    state = tx.init(params)
    assert all(value == 0 for value in lbopt.optimizer_metrics(state).values())
    _, state = tx.update({"kernel": jnp.ones((2, 2))}, state, params)
    assert {name: float(value) for name, value in lbopt.optimizer_metrics(state).items()} == {
        "weight_norm/kernel": 0,
        "update_norm/kernel": 2,
        "update_over_weight/kernel": 2,
    }


def test_layers_of_a_stack_are_numbered():
    params = {"stack": {"kernel": jnp.stack([jnp.full((2, 2), size) for size in (1.0, 2.0, 3.0)])}}
    tx = lbopt.monitor_layers(lbopt.stacked_paths("stack"))
    _, state = tx.update(params, tx.init(params), params)
    metrics = lbopt.optimizer_metrics(state)
    assert [float(metrics[f"weight_norm/stack/kernel[{i}]"]) for i in range(3)] == [2.0, 4.0, 6.0]


def test_both_ratios_of_lans_are_shown():
    tx = lbopt.lans(0.25)
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    assert {name.split("/")[0] for name in lbopt.optimizer_metrics(state)} == {
        "learning_rate",
        "trust_ratio",
        "trust_ratio_1",
    }


def test_momentum_inside_the_ratio_is_no_obstacle():
    tx = lbopt.scale_by_layerwise_trust_ratio(
        inner=optax.chain(lbopt.clip_by_global_norm(1.0), lbopt.monitor_layers())
    )
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    assert {"gradient_norm", "weight_norm/a/kernel", "trust_ratio/a/kernel"} <= set(
        lbopt.optimizer_metrics(state)
    )


def test_metrics_and_averages_come_out_of_the_state_of_an_nnx_optimizer():
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    tx = optax.chain(lbopt.lamb(0.5), lbopt.track_ema(0.9, ramp=False), lbopt.monitor_layers())
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    grads = nnx.grad(lambda model: jnp.square(model(jnp.ones((3, 4))) - 1).mean())(model)
    optimizer.update(model, grads)

    for state in (optimizer.opt_state, nnx.state(optimizer)):
        metrics = lbopt.optimizer_metrics(state)
        assert f"{metrics['learning_rate']:.2f}" == "0.50"
        assert np.isclose(
            metrics["weight_norm/kernel"], np.linalg.norm(before["kernel"]), rtol=1e-6
        )
        assert "trust_ratio/kernel" in metrics

        after = nnx.state(model, nnx.Param)
        averaged = lbopt.ema_params(state, like=after)
        assert jax.tree.structure(averaged) == jax.tree.structure(after)
        expected = jax.tree.map(
            lambda old, new: 0.9 * old + 0.1 * new, before, nnx.to_pure_dict(after)
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, 1e-5),
            nnx.to_pure_dict(averaged),
            expected,
        )

    kept = {name: float(value) for name, value in metrics.items()}
    averaged = lbopt.ema_params(optimizer.opt_state)
    numbers = [float(leaf.sum()) for leaf in jax.tree.leaves(averaged)]

    optimizer.update(model, grads)
    assert [float(leaf.sum()) for leaf in jax.tree.leaves(averaged)] == numbers
    assert {name: float(value) for name, value in metrics.items()} == kept


def test_an_average_of_other_parameters_is_refused():
    tx = lbopt.track_ema()
    with refused("like", code="mismatch"):
        lbopt.ema_params(
            tx.init(PARAMS), like={"a": {"kernel": PARAMS["a"]["kernel"]}, "b": PARAMS["b"]}
        )
    with refused("like/a/bias", code="mismatch"):
        lbopt.ema_params(tx.init(PARAMS), like=jax.tree.map(lambda leaf: leaf[None], PARAMS))


@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # orbax below 0.12
def test_metrics_come_out_of_what_orbax_restored_without_a_target(tmp_path):
    lans = lbopt.lans(0.5, weight_decay=0.1)  # the fields' order differs from that of their names
    guarded = lbopt.skip_bad_updates(lbopt.lamb(optax.constant_schedule(0.5)))
    tx = optax.chain(guarded, lans, lbopt.monitor_layers())
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state")
        typed = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: state))
    assert (
        lbopt.optimizer_metrics(restored)
        == lbopt.optimizer_metrics(state)
        == lbopt.optimizer_metrics(typed)
    )


@pytest.mark.parametrize(
    "make", [lbopt.lamb, lbopt.lars, lbopt.lans, functools.partial(lbopt.lars, variant="flax")]
)
def test_a_rate_is_set_where_it_was_injected_and_is_no_settable_leaf_elsewhere(make):
    for rate in (0.25, lambda count: 0.25):
        with pytest.raises(KeyError):
            optax.tree_utils.tree_set(make(rate).init(PARAMS), learning_rate=jnp.asarray(0.5))
    tx = optax.inject_hyperparams(make)(0.25)
    other = make(0.5)
    assert optax.tree_utils.tree_get(tx.init(PARAMS), "learning_rate") == 0.25
    updates, state = tx.update(
        GRADS, optax.tree_utils.tree_set(tx.init(PARAMS), learning_rate=jnp.asarray(0.5)), PARAMS
    )
    expected, _ = other.update(GRADS, other.init(PARAMS), PARAMS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), updates, expected)
    assert lbopt.optimizer_metrics(state)["learning_rate"] == 0.5


def test_one_count_is_found():
    for rate in (0.25, lambda count: 0.25):
        for make in (lbopt.lamb, lbopt.lans):
            _, state = make(rate).update(GRADS, make(rate).init(PARAMS), PARAMS)
            assert optax.tree_utils.tree_get(state, "count") == 1


def test_the_share_of_narrow_weights_that_do_not_move_is_shown():
    weights = jnp.asarray([[1.0, 1.0, 1.0, 1.0], [1e-3, 1e-3, 1e-3, 1.0]])
    params = {"narrow": weights.astype(jnp.bfloat16), "wide": weights}
    updates = {
        "narrow": jnp.asarray([[1e-3, 1e-3, 0.0, 0.1]] * 2, jnp.bfloat16),
        "wide": jnp.full((2, 4), 1e-9),
    }
    tx = lbopt.monitor_layers(lbopt.stacked_paths("narrow"))
    _, state = jax.jit(tx.update)(updates, tx.init(params), params)
    metrics = lbopt.optimizer_metrics(state)
    assert {
        name: round(float(value), 6)
        for name, value in metrics.items()
        if name.startswith("stalled")
    } == {
        "stalled/narrow[0]": round(
            2 / 3, 6
        ),  # 1 + 0.001 is 1 in bf16, 1 + 0.1 is not; leaves without update do not count
        "stalled/narrow[1]": 0.0,
    }
