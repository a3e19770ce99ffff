"""Evaluation equals one float64 NumPy pass over the data; padding never counts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lbopt
from lbopt import losses, metrics
from lbopt.data import ArrayDataset, eval_batches
from lbopt.job import _pulse

SIZES = [1, 7, 359, 360]
LAYOUTS = [(1, "jit"), (4, "jit"), (4, "pmap")]


def metric_fn(params, model_state, batch):
    """Score a linear classifier, shifted by its model state."""
    logits = (batch["x"] - model_state["shift"]) @ params["w"]
    each = losses.softmax_cross_entropy(logits, batch["label"])
    return metrics.classification(logits, batch["label"], each, batch["mask"])


@pytest.fixture(scope="module")
def steps():
    return {
        layout: lbopt.make_eval_step(metric_fn, lbopt.make_mesh(layout[0]), layout[1])
        for layout in LAYOUTS
    }


@pytest.fixture(scope="module")
def state():
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((5, 4)).astype(np.float32)}
    model_state = {"shift": rng.standard_normal(5).astype(np.float32)}
    return lbopt.TrainState.create(params, model_state, optax.sgd(0.1))


def examples(size):
    rng = np.random.default_rng(size)
    return ArrayDataset(
        {
            "x": rng.standard_normal((size, 5)).astype(np.float32),
            "label": rng.integers(0, 4, size).astype(np.int32),
        }
    )


def reference(state, dataset):
    x = dataset.arrays["x"].astype(np.float64)
    label = dataset.arrays["label"]
    shift = np.asarray(state.model_state["shift"], np.float64)
    logits = (x - shift) @ np.asarray(state.params["w"], np.float64)
    log_sum = np.log(np.exp(logits).sum(-1))
    return {
        "loss": np.mean(log_sum - logits[np.arange(len(x)), label]),
        "accuracy": np.mean(logits.argmax(-1) == label),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_evaluate_equals_one_pass(size, layout, steps, state):
    dataset = examples(size)
    expected = reference(state, dataset)
    for batch_size in sorted({max(1, size // 3), size, size + 13}):
        got = lbopt.evaluate(steps[layout], state, dataset, batch_size)
        assert set(got) == {"loss", "accuracy"}
        assert got["loss"] == pytest.approx(expected["loss"], rel=2e-6)
        assert got["accuracy"] == expected["accuracy"]


def counting(params, model_state, batch):
    """Sum one-hot vectors of the examples' indices: the count of each example."""
    seen = jnp.zeros(360).at[batch["index"]].add(batch["mask"].astype(jnp.float32))
    return {"seen": (seen, jnp.sum(batch["mask"].astype(jnp.float32)))}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_example_counts_exactly_once(layout):
    step = lbopt.make_eval_step(counting, lbopt.make_mesh(layout[0]), layout[1])
    for size, batch_size in ((359, 100), (360, 100), (1, 100), (7, 3)):
        dataset = ArrayDataset({"index": np.arange(size, dtype=np.int32)})
        results = [
            jax.block_until_ready(step({}, {}, batch))
            for batch in eval_batches(dataset, batch_size, layout[0])
        ]
        np.testing.assert_array_equal(
            sum(np.asarray(result["seen"][0]) for result in results), np.arange(360) < size
        )
        assert sum(float(result["seen"][1]) for result in results) == size


def poisoned(params, model_state, batch):
    """Return a loss that is not a number on padding."""
    values = jnp.where(batch["mask"], batch["x"], jnp.nan)
    return {
        "x": metrics.summed(values, batch["mask"]),
        "count": (jnp.sum(batch["mask"]), jnp.ones(())),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_that_is_not_a_number_does_not_leak(layout, state):
    step = lbopt.make_eval_step(poisoned, lbopt.make_mesh(layout[0]), layout[1])
    dataset = ArrayDataset({"x": np.arange(7, dtype=np.float32)})
    got = lbopt.evaluate(step, state, dataset, 4)
    assert got["x"] == 3.0


def test_a_true_example_that_is_not_a_number_shows(steps, state):
    dataset = examples(7)
    dataset.arrays["x"][3, 0] = np.nan
    assert np.isnan(lbopt.evaluate(steps[4, "jit"], state, dataset, 4)["loss"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_state_is_still_there_after_evaluation(layout, steps, state):
    lbopt.evaluate(steps[layout], state, examples(7), 7)
    assert not any(
        leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)
    )


def test_evaluation_follows_training():
    """A state from a training step can be evaluated without conversion."""
    tx = optax.sgd(0.1)
    mesh = lbopt.make_mesh(4)

    def loss_fn(params, model_state, batch, rng):
        return jnp.mean(losses.softmax_cross_entropy(batch["x"] @ params["w"], batch["label"])), (
            model_state,
            {},
        )

    dataset = examples(360)
    for backend in ("jit", "pmap"):
        state = lbopt.TrainState.create({"w": jnp.zeros((5, 4))}, {"shift": jnp.zeros(5)}, tx)
        state, _ = jax.block_until_ready(
            lbopt.make_train_step(loss_fn, tx, mesh, backend)(state, dict(dataset.arrays))
        )
        got = lbopt.evaluate(lbopt.make_eval_step(metric_fn, mesh, backend), state, dataset, 100)
        expected = reference(state, dataset)
        assert got["loss"] == pytest.approx(expected["loss"], rel=2e-6)
        assert got["loss"] < np.log(4)
        assert got["accuracy"] == expected["accuracy"]


def test_evaluation_counts_each_batch_for_the_guard_and_a_step_alone_counts_nothing(steps, state):
    """A long evaluation must not look like a hang to the guard that ends idle processes."""
    dataset = examples(7)
    step = steps[1, "jit"]
    before = _pulse.count()
    lbopt.evaluate(step, state, dataset, 2)
    assert _pulse.count() - before == 4
    (batch,) = eval_batches(dataset, 7)
    step(state.params, state.model_state, batch)
    assert _pulse.count() - before == 4
