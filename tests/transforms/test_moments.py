"""Moments stay fp32 under narrow parameters; the bias correction is more exact than plain fp32."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lbopt


def gradients(steps, dtype, size=33):
    rng = np.random.default_rng(9)
    return [jnp.asarray(rng.normal(size=size), dtype) for _ in range(steps)]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_moments_are_fp32_and_equal_to_float64_sums(dtype):
    tx = lbopt.scale_by_lamb_moments(b1=0.9, b2=0.99)
    state = tx.init({"w": jnp.zeros(33, dtype)})
    m = v = np.zeros(33)
    for g in gradients(20, dtype):
        _, state = tx.update({"w": g}, state)
        wide = np.asarray(g, np.float64)
        m = 0.9 * m + 0.1 * wide
        v = 0.99 * v + 0.01 * wide**2
    assert state.mu["w"].dtype == state.nu["w"].dtype == jnp.float32
    assert np.linalg.norm(state.mu["w"] - m) <= 1e-6 * np.linalg.norm(m)
    assert np.linalg.norm(state.nu["w"] - v) <= 1e-6 * np.linalg.norm(v)
    assert state.count == 20


def test_moments_in_bf16_would_be_seen():
    m = jnp.zeros(33, jnp.bfloat16)
    wide = np.zeros(33)
    for g in gradients(20, jnp.bfloat16):
        m = 0.9 * m + 0.1 * g
        wide = 0.9 * wide + 0.1 * np.asarray(g, np.float64)
    assert np.linalg.norm(np.asarray(m, np.float64) - wide) > 1e-3 * np.linalg.norm(wide)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_velocity_is_fp32(dtype, nesterov):
    tx = lbopt.scale_by_lars_momentum(0.9, nesterov)
    state = tx.init({"w": jnp.zeros(33, dtype)})
    velocity = np.zeros(33)
    for u in gradients(20, dtype):
        updates, state = tx.update({"w": u}, state)
        velocity = 0.9 * velocity + np.asarray(u, np.float64)
    assert (state.momentum["w"].dtype, updates["w"].dtype) == (jnp.float32, dtype)
    assert np.linalg.norm(state.momentum["w"] - velocity) <= 1e-6 * np.linalg.norm(velocity)
    out = np.asarray(u, np.float64) + 0.9 * velocity if nesterov else velocity
    assert np.linalg.norm(np.asarray(updates["w"], np.float64) - out) <= (
        2**-8 if dtype == jnp.bfloat16 else 1e-6
    ) * np.linalg.norm(out)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_in_fp32_is_optax_trace(nesterov):
    ours = lbopt.scale_by_lars_momentum(0.7, nesterov)
    theirs = optax.trace(0.7, nesterov)
    params = {"w": jnp.zeros(33)}
    state = ours.init(params)
    their_state = theirs.init(params)
    for u in gradients(5, jnp.float32):
        updates, state = ours.update({"w": u}, state)
        expected, their_state = theirs.update({"w": u}, their_state)
        assert np.allclose(updates["w"], expected["w"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("b1", "b2"), [(0.9, 0.999), (0.0, 0.999), (0.9, 0.9999), (0.999, 0.0)])
def test_debias_of_the_first_steps_equals_float64(b1, b2):
    tx = lbopt.scale_by_lamb_moments(b1, b2, eps=1e-6)
    state = tx.init({"w": jnp.zeros(33)})
    m = v = np.zeros(33)
    for t, g in enumerate(gradients(4, jnp.float32), start=1):
        updates, state = tx.update({"w": g}, state)
        wide = np.asarray(g, np.float64)
        m = b1 * m + (1 - b1) * wide
        v = b2 * v + (1 - b2) * wide**2
        expected = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + 1e-6)
        assert np.linalg.norm(updates["w"] - expected) <= 1e-6 * np.linalg.norm(expected)


def test_plain_fp32_bias_correction_would_be_seen():
    plain = np.float32(1) - np.float32(0.999) ** np.float32(1)
    assert abs(np.sqrt(np.float64(plain) / (1 - 0.999)) - 1) > 5e-6


def test_correction_of_late_steps_is_one_and_finite():
    tx = lbopt.scale_by_lamb_moments()
    state = tx.init({"w": jnp.zeros(3)})._replace(
        count=jnp.asarray(2**31 - 1, jnp.int32), mu={"w": jnp.ones(3)}, nu={"w": jnp.ones(3)}
    )
    updates, after = tx.update({"w": jnp.ones(3)}, state)
    assert np.allclose(updates["w"], 1, rtol=2e-6)
    assert after.count == 2**31 - 1


def test_without_debias_the_first_step_is_the_raw_ratio():
    tx = lbopt.scale_by_lamb_moments(eps=0.0, debias=False)
    g = gradients(1, jnp.float32)[0]
    updates, _ = tx.update({"w": g}, tx.init({"w": g}))
    assert np.allclose(updates["w"], np.sign(g) * 0.1 / np.sqrt(0.001), rtol=1e-6)


def test_eps_stands_outside_the_root_and_eps_root_inside():
    g = jnp.asarray([0.0, 3.0])
    for options, expected in (
        ({"eps": 0.5}, [0.0, 3 / 3.5]),
        ({"eps": 0.0, "eps_root": 16.0}, [0.0, 3 / 5]),
    ):
        tx = lbopt.scale_by_lamb_moments(**options)
        updates, _ = tx.update({"w": g}, tx.init({"w": g}))
        assert np.allclose(updates["w"], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "build", [lambda: lbopt.lamb(0.1, eps=0.0), lambda: lbopt.lans(0.1, eps=0.0)]
)
def test_without_eps_a_gradient_that_is_zero_moves_nothing(build):
    """The embedding rows of words that never occurred would be 0 / 0."""
    params = {"embedding": jnp.ones((3, 2))}
    tx = build()
    updates, _ = tx.update(
        {"embedding": jnp.asarray([[1.0, -2.0], [0.0, 0.0], [3.0, 0.0]])}, tx.init(params), params
    )
    assert np.all(np.isfinite(updates["embedding"]))
    assert np.array_equal(
        np.asarray(updates["embedding"]) == 0, [[False, False], [True, True], [False, True]]
    )
