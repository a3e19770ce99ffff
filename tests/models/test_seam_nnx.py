"""A Flax NNX classifier with batch norm and dropout trains behind the seam like any other model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lbopt
from lbopt import losses, metrics
from lbopt.data.digits import load_digits
from lbopt.models import seam


class Classifier(nnx.Module):
    """Dense, batch norm, dropout, dense."""

    def __init__(self, rngs):
        self.inside = nnx.Linear(64, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.25)
        self.head = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, images, train, rngs=None):
        x = nnx.relu(self.norm(self.inside(images.reshape(len(images), -1)), use_running_average=not train))
        return self.head(self.dropout(x, deterministic=not train, rngs=rngs))


@pytest.mark.parametrize("backend", ["jit", "pmap"])
def test_an_nnx_classifier_trains(backend):
    model, mesh = seam.from_nnx(Classifier), lbopt.make_mesh(4)
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
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), jax.device_get(state.model_state), model_state)
    assert min(jax.tree.leaves(moved["norm"])) > 0.1
    masked = {**batch, "mask": np.arange(64) < 50}
    evaluate = lbopt.make_eval_step(metric_fn, mesh, backend)
    sums = jax.block_until_ready(evaluate(state.params, state.model_state, masked))
    logits, kept = model.apply(state.params, state.model_state, batch["image"][:50], train=False)
    assert kept is state.model_state
    assert sums["accuracy"][1] == 50
    assert sums["accuracy"][0] == np.sum(np.argmax(logits, -1) == batch["label"][:50])
    assert metrics.means([sums])["loss"] < 0.7 * history[0]
