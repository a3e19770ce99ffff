"""Training in bf16: fp32 state, distance from the fp32 loss, and precision of gradient sums."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lbopt
from lbopt.models import CNN
from lbopt.parallel._gradients import make_gradient_fn


def floating_dtypes(tree):
    return {
        leaf.dtype for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)
    }


def train(step, state, batches):
    losses = []
    for batch in batches:
        state, metrics = jax.block_until_ready(step(state, batch))
        total, count = metrics["loss"]
        losses.append(float(total) / float(count))
    return state, np.asarray(losses)


@pytest.mark.everyday("model-pmap-1")
@pytest.mark.parametrize(
    ("how", "backend", "num_microsteps"), [("compute_dtype", "jit", 2), ("model", "pmap", 1)]
)
def test_bf16_computation_keeps_an_fp32_state_and_gets_near_the_fp32_loss(
    how, backend, num_microsteps, problem, batches
):
    """bf16 rounds by 2^-9 in a few layers: losses near 2 agree to 2 % but are not equal."""
    module = CNN(widths=(4,), hidden=16)
    wide_loss, create = problem(module)
    narrow_loss, _ = (
        problem(module.clone(dtype=jnp.bfloat16)) if how == "model" else (wide_loss, None)
    )

    tx = lbopt.lamb(0.05)
    mesh = lbopt.make_mesh(4)
    options = {"compute_dtype": jnp.bfloat16} if how == "compute_dtype" else {}
    wide_step = lbopt.make_train_step(wide_loss, tx, mesh, backend, num_microsteps=num_microsteps)
    narrow_step = lbopt.make_train_step(
        narrow_loss, tx, mesh, backend, num_microsteps=num_microsteps, **options
    )

    _, wide = train(wide_step, create(tx), batches)
    state, narrow = train(narrow_step, create(tx), batches)

    assert floating_dtypes((state.params, state.opt_state, state.model_state)) == {
        jnp.dtype(jnp.float32)
    }
    assert wide[-1] < 0.8 * wide[0]
    np.testing.assert_allclose(narrow, wide, rtol=0.02)
    assert not np.array_equal(narrow, wide)


def test_compute_dtype_reaches_parameters_and_inputs_but_not_integers():
    seen = {}

    def loss_fn(params, model_state, batch, rng):
        seen.update(w=params["w"].dtype, x=batch["x"].dtype, label=batch["label"].dtype)
        return jnp.mean(params["w"] * batch["x"]), (model_state, {})

    batch = {"x": jnp.ones(4), "label": jnp.ones(4, jnp.int32)}
    found = make_gradient_fn(loss_fn, compute_dtype=jnp.bfloat16)(
        {"w": jnp.ones(())}, {}, batch, jax.random.key(0)
    )
    assert seen == {"w": jnp.bfloat16, "x": jnp.bfloat16, "label": jnp.int32}
    assert found.grads["w"].dtype == jnp.float32


# Gradients of eight microsteps. 256 + 1 is 256 in bf16, so a bf16 sum stays at 256. The true mean,
# 32.5, is exact in bf16.
PARTS = [256.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
MEAN = 32.5


def linear_loss(params, model_state, batch, rng):
    return jnp.mean(params["w"] * batch["x"]), (
        model_state,
        {"x": (jnp.sum(batch["x"]), jnp.float32(batch["x"].size))},
    )


def test_gradients_of_bf16_parameters_are_added_up_in_fp32():
    batch = {"x": jnp.asarray(PARTS, jnp.bfloat16)}
    found = jax.jit(make_gradient_fn(linear_loss, num_microsteps=8))(
        {"w": jnp.bfloat16(1)}, {}, batch, jax.random.key(0)
    )
    assert found.grads["w"].dtype == jnp.bfloat16
    assert float(found.grads["w"]) == MEAN


def test_a_bf16_accumulator_would_not_pass():
    total = jnp.bfloat16(0)
    for part in PARTS:
        total = (total + jnp.bfloat16(part)).astype(jnp.bfloat16)
    assert float(total / 8) == 32.0 != MEAN


@pytest.mark.parametrize("backend", ["jit", "pmap"])
def test_bf16_parameters_move_by_the_fp32_sum(backend):
    """All devices have equal gradients in each of eight microsteps, so the mean is known."""
    tx = optax.sgd(1.0)
    step = lbopt.make_train_step(linear_loss, tx, lbopt.make_mesh(4), backend, num_microsteps=8)
    state = lbopt.TrainState.create({"w": jnp.zeros((), jnp.bfloat16)}, {}, tx)
    state, metrics = jax.block_until_ready(
        step(state, {"x": np.tile(np.asarray(PARTS, jnp.bfloat16), 4)})
    )
    assert state.params["w"].dtype == jnp.bfloat16
    assert float(state.params["w"]) == -MEAN
    assert float(metrics["x"][1]) == 32


def test_metrics_and_statistics_of_microsteps():
    """Metrics are summed, model state is averaged, and integers stay integers."""

    def loss_fn(params, model_state, batch, rng):
        x = jnp.sum(batch["x"])
        return params["w"] * x, (
            {"seen": model_state["seen"] + x},
            {"x": (x, jnp.float32(2)), "n": (jnp.int32(1), jnp.int32(1))},
        )

    batch = {"x": jnp.arange(8.0)}
    fn = make_gradient_fn(loss_fn, num_microsteps=4)
    found = fn({"w": jnp.ones(())}, {"seen": jnp.float32(10)}, batch, jax.random.key(0))
    metrics = found.metrics
    assert float(found.grads["w"]) == 7.0  # the mean of 0+4, 1+5, 2+6, 3+7
    assert float(found.model_state["seen"]) == 17.0
    assert [float(part) for part in metrics["x"]] == [28.0, 8.0]
    assert metrics["n"][0].dtype == jnp.int32
    assert int(metrics["n"][0]) == 4
