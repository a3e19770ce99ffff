"""A Flax NNX classifier with batch norm and dropout trains behind the seam like any other model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from refusal import refused

import lbopt
from lbopt import losses, metrics
from lbopt.data import load_digits
from lbopt.models import from_nnx


class Classifier(nnx.Module):
    """Dense, batch norm, dropout, dense."""

    def __init__(self, rngs):
        self.inside = nnx.Linear(64, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.25)
        self.head = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, images, train, rngs=None):
        x = nnx.relu(
            self.norm(self.inside(images.reshape(len(images), -1)), use_running_average=not train)
        )
        return self.head(self.dropout(x, deterministic=not train, rngs=rngs))


@pytest.mark.parametrize("backend", ["jit", "pmap"])
def test_an_nnx_classifier_trains(backend):
    model = from_nnx(Classifier)
    mesh = lbopt.make_mesh(4)
    batch = load_digits().train.take(np.arange(64))

    def loss_fn(params, model_state, batch, rng):
        logits, model_state = model.apply(params, model_state, batch["image"], train=True, rng=rng)
        each = losses.softmax_cross_entropy(logits, batch["label"])
        return jnp.mean(each), (model_state, metrics.classification(logits, batch["label"], each))

    def metric_fn(params, model_state, batch):
        logits, _ = model.apply(params, model_state, batch["image"], train=False)
        each = losses.softmax_cross_entropy(logits, batch["label"])
        return metrics.classification(logits, batch["label"], each, batch["mask"])

    tx = lbopt.lamb(0.05, weight_decay=0.01)
    params, model_state = jax.device_get(jax.jit(model.init)(jax.random.key(0), batch["image"]))
    state = lbopt.TrainState.create(params, model_state, tx)
    step = lbopt.make_train_step(loss_fn, tx, mesh, backend)
    history = []
    for _ in range(12):
        state, sums = jax.block_until_ready(step(state, batch))
        history.append(metrics.means([sums])["loss"])
    assert history[-1] < 0.6 * history[0]
    assert set(model_state["norm"]) == {"mean", "var"}
    moved = jax.tree.map(
        lambda a, b: np.abs(a - b).max(), jax.device_get(state.model_state), model_state
    )
    assert min(jax.tree.leaves(moved["norm"])) > 0.1
    masked = {**batch, "mask": np.arange(64) < 50}
    evaluate = lbopt.make_eval_step(metric_fn, mesh, backend)
    sums = jax.block_until_ready(evaluate(state.params, state.model_state, masked))
    logits, kept = model.apply(state.params, state.model_state, batch["image"][:50], train=False)
    assert kept is state.model_state
    assert sums["accuracy"][1] == 50
    assert sums["accuracy"][0] == np.sum(np.argmax(logits, -1) == batch["label"][:50])
    assert metrics.means([sums])["loss"] < 0.7 * history[0]


class Dropped(nnx.Module):
    """Weights behind two dropouts with separate streams, one a stack; called without `rngs`."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def stacked(rngs):
            return nnx.Dropout(0.5, rngs=rngs)

        self.weights = nnx.Param(jnp.ones(64))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.stack = stacked(rngs)

    def __call__(self, x, train):
        if not train:
            return x * self.weights
        in_turn = nnx.scan(
            lambda x, dropout: dropout(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return in_turn(self.dropout(x), self.stack) * self.weights


def test_a_module_in_the_place_of_what_makes_it_is_refused():
    with refused("build", code="type") as caught:
        from_nnx(Dropped(nnx.Rngs(0)))
    assert "Dropped" in caught.value.reason


@pytest.mark.parametrize(
    ("options", "draws"),
    [
        ({}, 1),
        ({"backend": "pmap"}, 4),
        ({"num_microsteps": 4}, 4),
        ({"reduction": lbopt.AllReduce(jnp.float32)}, 4),
    ],
)
def test_streams_of_a_module_draw_anew_for_each_replica_microstep_and_step(options, draws):
    model = from_nnx(Dropped)
    params, model_state = model.init(jax.random.key(0), None)
    assert jax.tree.leaves(model_state) == []

    def loss_fn(params, model_state, batch, rng):
        outputs, model_state = model.apply(params, model_state, batch["x"][:1], train=True, rng=rng)
        return jnp.sum(outputs), (model_state, {"loss": (jnp.sum(outputs), jnp.ones(()))})

    tx = optax.sgd(1.0)
    step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(4), donate=False, **options)
    state = step.place(lbopt.TrainState.create(params, model_state, tx))
    batch = {"x": np.ones((16, 64), np.float32)}
    after = jax.block_until_ready(step(state, batch))[0]
    later = jax.block_until_ready(step(after, batch))[0]
    first = np.asarray(state.params["weights"] - after.params["weights"])
    second = np.asarray(after.params["weights"] - later.params["weights"])
    # A weight's gradient is 8 or 0, the mean over draws: of one draw it is all or nothing.
    np.testing.assert_array_equal(first % (8 / draws), 0)
    assert np.any(first % 8 != 0) == (draws > 1)
    assert np.any(first != second)
    x = jnp.ones((1, 64))
    np.testing.assert_array_equal(model.apply(params, model_state, x, train=False)[0], x)
    again = [model.apply(params, model_state, x, True, jax.random.key(1))[0] for _ in range(2)]
    np.testing.assert_array_equal(*again)
