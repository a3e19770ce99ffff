"""BERT's loss and metrics against NumPy; one gradient under every layout of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lbopt import metrics
from lbopt.config import DataConfig, ModelConfig
from lbopt.data import Splits, eval_batches
from lbopt.data.from_config import Source
from lbopt.models import Model
from lbopt.parallel import TrainState, make_mesh, make_train_step, put_batch
from lbopt.recipes import _masked_lm, make_problem

BATCH = 6
PREDICTIONS = 3
VOCABULARY = 11
MEAN = 2.25
KEYS: list = []


def recall(params, model_state, inputs, train, rng=None):
    """A model whose parameters are its outputs, indexed by the examples' first token."""
    KEYS.append(rng)
    return {name: value[inputs["input_ids"][:, 0]] for name, value in params.items()}, model_state


def make_batch(following=True):
    random = np.random.default_rng(0)
    batch = {
        "input_ids": np.tile(np.arange(BATCH)[:, None], (1, 5)),
        "masked_labels": random.integers(0, VOCABULARY, (BATCH, PREDICTIONS)),
        "masked_weights": np.asarray(
            [[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0]], np.float32
        ),
        "next_sentence_label": random.integers(0, 2, BATCH),
    }
    if not following:
        del batch["next_sentence_label"]
    return batch


@pytest.fixture
def params():
    random = np.random.default_rng(1)
    return {
        "prediction_logits": random.normal(size=(BATCH, PREDICTIONS, VOCABULARY)).astype(
            np.float32
        ),
        "next_sentence_logits": random.normal(size=(BATCH, 2)).astype(np.float32),
    }


@pytest.fixture
def task():
    source = Source(Splits(None, None, None), VOCABULARY, MEAN)
    return _masked_lm.make(Model(None, recall), source, ModelConfig("bert", size="tiny"))


def nll(logits, labels):
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    return -np.log(np.take_along_axis(p, labels[..., None], -1)[..., 0])


def expected(params, batch, rows):
    """Return loss and metrics of some examples by their definitions."""
    tokens = nll(params["prediction_logits"], batch["masked_labels"])[rows]
    weights = batch["masked_weights"][rows]
    labels = batch["masked_labels"][rows]
    hits = params["prediction_logits"][rows].argmax(-1) == labels
    each = (tokens * weights).sum(1) / MEAN
    found = {
        "accuracy": (hits * weights).sum() / weights.sum(),
        "masked_lm_loss": (tokens * weights).sum() / weights.sum(),
    }
    if "next_sentence_label" in batch:
        following = nll(params["next_sentence_logits"], batch["next_sentence_label"])[rows]
        each = each + following
        right = (
            params["next_sentence_logits"][rows].argmax(-1) == batch["next_sentence_label"][rows]
        )
        found |= {"next_sentence_loss": following.mean(), "next_sentence_accuracy": right.mean()}
    return {"loss": each.mean(), **found}


@pytest.mark.parametrize("following", [True, False])
def test_loss_and_metrics_by_their_definition(task, params, following):
    batch = make_batch(following)
    loss, (state, found) = task.loss_fn(params, {}, batch, jax.random.key(0))
    wanted = expected(params, batch, np.arange(BATCH))
    assert float(loss) == pytest.approx(wanted["loss"], rel=1e-5)
    assert metrics.means([jax.device_get(found)]) == pytest.approx(wanted, rel=1e-5)
    assert state == {}


def test_the_key_of_the_step_reaches_the_model(task, params):
    key = jax.random.key(7)
    task.loss_fn(params, {}, make_batch(), key)
    assert KEYS[-1] is key


def test_padding_counts_nowhere(task, params):
    batch = make_batch()
    rows = np.asarray([0, 1, 3, 4])
    padded = {**batch, "mask": np.isin(np.arange(BATCH), rows)}
    params["prediction_logits"][2] = np.nan
    found = metrics.means([jax.device_get(task.metric_fn(params, {}, padded))])
    assert found == pytest.approx(expected(params, batch, rows), rel=1e-5)


def test_predictions_that_are_not_used_have_no_gradient(task, params):
    batch = make_batch()
    grads = jax.grad(lambda p: task.loss_fn(p, {}, batch, jax.random.key(0))[0])(params)
    norms = np.abs(np.asarray(grads["prediction_logits"])).sum(-1)
    np.testing.assert_array_equal(norms > 0, batch["masked_weights"] > 0)


def test_where_all_examples_have_as_many_predictions_the_loss_is_googles(params):
    """run_pretraining.py adds the mean over masked tokens and the next-sentence mean."""
    source = Source(Splits(None, None, None), VOCABULARY, 2.0)
    task = _masked_lm.make(Model(None, recall), source, ModelConfig("bert", size="tiny"))
    batch = make_batch()
    batch["masked_weights"] = np.tile(np.asarray([1, 1, 0], np.float32), (BATCH, 1))
    tokens = nll(params["prediction_logits"], batch["masked_labels"])
    weights = batch["masked_weights"]
    google = (tokens * weights).sum() / weights.sum()
    google += nll(params["next_sentence_logits"], batch["next_sentence_label"]).mean()
    assert float(task.loss_fn(params, {}, batch, jax.random.key(0))[0]) == pytest.approx(
        google, rel=1e-5
    )


DATA = DataConfig("pydoc_mlm", sequence_length=16, vocab_size=300, max_predictions=2)


def bert(**changes):
    return make_problem(DATA, ModelConfig("bert", size="tiny", max_length=16, **changes))


def test_parts_of_the_batch_average_to_the_whole():
    """The loss on real examples, with one or two predictions; accumulation relies on this."""
    problem = bert(dropout_rate=0.0, attention_dropout_rate=0.0)
    params, state = problem.init(jax.random.key(0))
    train = problem.splits.train
    counts = train.take(np.arange(len(train)))["masked_weights"].sum(1)
    batch = train.take(np.argsort(counts, kind="stable")[np.r_[:8, -8:0]])
    assert len(set(batch["masked_weights"].sum(1).tolist())) > 1
    loss = jax.jit(lambda batch: problem.loss_fn(params, state, batch, jax.random.key(0))[0])
    halves = [loss(jax.tree.map(lambda x: x[part::2], batch)) for part in range(2)]  # noqa: B023
    assert float(loss(batch)) == pytest.approx(float(np.mean(halves)), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_one_gradient_by_jit_by_pmap_and_in_microsteps(dropout):
    """Dropout is included, except with microsteps, which draw from separate keys."""
    problem = bert(dropout_rate=dropout, attention_dropout_rate=dropout)
    batch = problem.splits.train.draw(np.arange(16), np.zeros(16, int), 0)
    tx = optax.sgd(1.0)
    ways = [("jit", 1, 1), ("pmap", 4, 1)] + ([] if dropout else [("jit", 4, 2)])

    moved = []
    for backend, devices, microsteps in ways:
        mesh = make_mesh(devices)
        params, model_state = problem.init(jax.random.key(0))
        step = make_train_step(
            problem.loss_fn,
            tx,
            mesh,
            backend,
            num_microsteps=microsteps,
            donate=False,
            key_per_replica=False,
        )

        state = jax.device_put(
            TrainState.create(params, model_state, tx), jax.sharding.NamedSharding(mesh, jax.P())
        )
        after, pairs = step(state, put_batch(mesh, batch))
        moved.append((jax.device_get(after.params), metrics.means([jax.device_get(pairs)]), params))

    for after, means, params in moved[1:]:
        assert means == pytest.approx(moved[0][1], rel=1e-4)
        for ours, theirs, before in zip(
            *map(jax.tree.leaves, (after, moved[0][0], params)), strict=True
        ):
            scale = float(jnp.abs(theirs - before).max())
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3 * scale + 1e-7)


def test_evaluation_does_not_depend_on_the_batch():
    problem = bert()
    params, state = problem.init(jax.random.key(0))
    metric_fn = jax.jit(problem.metric_fn)
    dataset = problem.splits.test
    found = []
    for size in (len(dataset), 37):
        found.append(
            metrics.means(metric_fn(params, state, batch) for batch in eval_batches(dataset, size))
        )
    assert found[0] == pytest.approx(found[1], rel=1e-5)
