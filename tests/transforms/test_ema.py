"""The average of the parameters against NumPy."""

import warnings

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusal import refused

import lbopt


def run(tx, params, steps=30):
    state = tx.init(params)
    path = []
    update = jax.jit(tx.update)
    for step in range(steps):
        updates, state = update({"w": jnp.full_like(params["w"], np.sin(step))}, state, params)
        params = optax.apply_updates(params, updates)
        path.append(params)
    return state, path


# The ramp (1 + t) / (10 + t) comes from our docstring; no test compares it with TensorFlow's.
@pytest.mark.parametrize(
    ("decay", "ramp"), [(0.9999, True), (0.5, True), (0.9, False), (0.0, False)]
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_average_of_the_parameters_after_each_update(decay, ramp, dtype):
    start = {"w": jnp.asarray([1.0, -2.0, 3.0], dtype)}
    state, path = run(optax.chain(optax.sgd(0.1), lbopt.track_ema(decay, ramp)), start)
    expected = np.asarray(start["w"], np.float64)
    for t, params in enumerate(path):
        d = min(decay, (1 + t) / (10 + t)) if ramp else decay
        expected = d * expected + (1 - d) * np.asarray(params["w"], np.float64)
    average = lbopt.ema_params(state)["w"]
    assert average.dtype == jnp.float32
    assert np.allclose(average, expected, rtol=2e-6)
    assert lbopt.ema_params(state, like=start)["w"].dtype == dtype


def test_updates_pass_and_the_first_parameters_are_copied():
    params = {"w": jnp.ones(3)}
    tx = lbopt.track_ema(0.9)
    state = tx.init(params)
    assert state.ema["w"].unsafe_buffer_pointer() != params["w"].unsafe_buffer_pointer()
    updates, _ = tx.update({"w": jnp.full(3, 2.0)}, state, params)
    assert np.array_equal(updates["w"], np.full(3, 2.0))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: tx,
        lambda tx: optax.chain(lbopt.lamb(0.1, variant="optax"), tx),
        lambda tx: optax.MultiSteps(optax.chain(optax.sgd(0.1), tx), 2),
        lambda tx: lbopt.skip_bad_updates(optax.chain(optax.sgd(0.1), tx)),
        lambda tx: optax.apply_if_finite(tx, 2),
    ],
)
def test_found_under_wrappers(wrap):
    params = {"w": jnp.ones(3)}
    assert np.array_equal(
        lbopt.ema_params(wrap(lbopt.track_ema(0.9)).init(params))["w"], np.ones(3)
    )


def test_none_or_two_averages():
    params = {"w": jnp.ones(3)}
    with refused("opt_state", code="missing"):
        lbopt.ema_params(optax.sgd(0.1).init(params))
    with refused("opt_state", code="conflict"):
        lbopt.ema_params(optax.chain(lbopt.track_ema(), lbopt.track_ema()).init(params))


def test_an_optimizer_in_the_place_of_an_option():
    for function in (lbopt.track_ema, lbopt.monitor_layers):
        with refused(function.__name__, code="type") as caught:
            function(optax.sgd(0.1))
        assert "optax.chain" in str(caught.value)


def test_refusals():
    with refused("decay", 1.0, "value"):
        lbopt.track_ema(1.0)
    with refused("ema_dtype", "int32", "value"):
        lbopt.track_ema(ema_dtype="int32")
    tx = lbopt.track_ema()
    with refused("params", None, "missing"):
        tx.update({"w": jnp.ones(1)}, tx.init({"w": jnp.ones(1)}))


def test_leaves_that_were_masked_out_come_from_the_parameters():
    params = {"w": jnp.ones(3), "frozen": jnp.full(2, 7.0)}
    tx = optax.masked(lbopt.track_ema(0.5, ramp=False), {"w": True, "frozen": False})
    _, state = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    average = lbopt.ema_params(state, like=params)
    assert np.array_equal(average["w"], np.full(3, 1.5))
    assert np.array_equal(average["frozen"], np.full(2, 7.0))


@pytest.mark.parametrize(
    ("tx", "beside"),
    [
        (
            optax.chain(
                optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(), lbopt.track_ema()
            ),
            True,
        ),
        (optax.chain(optax.apply_every(2), optax.sgd(0.1), lbopt.track_ema()), True),
        (
            optax.MultiSteps(
                optax.chain(optax.sgd(0.1), lbopt.track_ema()), 2
            ).gradient_transformation(),
            False,
        ),
        (optax.chain(optax.sgd(0.1), lbopt.track_ema()), False),
    ],
)
def test_an_average_of_microsteps_is_told(tx, beside):
    params = {"w": jnp.ones(2)}
    typeless = flax.serialization.to_state_dict(tx.init(params))
    for ask in (
        lambda: lbopt.ema_params(tx.init(params)),
        lambda: lbopt.ema_params(typeless, params),
        lambda: lbopt.TrainState.create(params, {}, tx),
    ):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ask()
        assert [str(one.message).startswith("track_ema: ") for one in said] == [True] * beside


def test_two_parameters_of_one_name_are_told_apart_or_refused():
    params = {"a/b": jnp.zeros(2), "a": {"b": jnp.ones(2)}}
    state = lbopt.track_ema().init(params)
    assert float(lbopt.ema_params(state)["a"]["b"][0]) == 1
    with refused("like", code="conflict"):
        lbopt.ema_params(state, like=params)
