"""The language model's loss and perplexity against NumPy."""

import math

import jax
import numpy as np
import pytest

from lbopt import metrics
from lbopt.config import ModelConfig
from lbopt.data import Splits
from lbopt.data.from_config import Source
from lbopt.models import Model
from lbopt.recipes import _language_model, make_network

BATCH = 5
LENGTH = 4
VOCABULARY = 7


def recall(params, model_state, inputs, train, rng=None):
    """A model whose parameters are its outputs."""
    assert set(inputs) == {"tokens"}
    return {"logits": params, "carry": ()}, {**model_state, "rng": rng}


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(size=(BATCH, LENGTH, VOCABULARY)).astype(np.float32)


@pytest.fixture
def batch():
    labels = np.random.default_rng(1).integers(0, VOCABULARY, (BATCH, LENGTH))
    return {"tokens": np.zeros((BATCH, LENGTH), np.int32), "next_tokens": labels}


@pytest.fixture
def task():
    source = Source(Splits(None, None, None), VOCABULARY)
    return _language_model.make(Model(None, recall), source, ModelConfig("lstm_lm", size="small"))


def expected(logits, labels):
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    losses = -np.log(np.take_along_axis(p, labels[..., None], -1))
    accuracy = (logits.argmax(-1) == labels).mean()
    return {"loss": losses.mean(), "perplexity": np.exp(losses.mean()), "accuracy": accuracy}


def test_loss_and_metrics_by_their_definition(task, logits, batch):
    key = jax.random.key(3)
    loss, (state, found) = task.loss_fn(logits, {}, batch, key)
    wanted = expected(logits, batch["next_tokens"])
    assert float(loss) == pytest.approx(wanted["loss"], rel=1e-6)
    assert metrics.means([jax.device_get(found)]) == pytest.approx(wanted, rel=1e-6)
    assert state["rng"] is key


def test_padding_counts_nowhere(task, logits, batch):
    mask = np.asarray([True, True, False, True, False])
    logits[2] = np.nan
    found = metrics.means([jax.device_get(task.metric_fn(logits, {}, {**batch, "mask": mask}))])
    assert found == pytest.approx(expected(logits[mask], batch["next_tokens"][mask]), rel=1e-6)


def test_the_exponential_comes_after_the_mean_over_all_batches():
    pairs = [{"perplexity": (2.0, 1.0)}, {"perplexity": (0.0, 3.0)}]
    assert metrics.means(pairs)["perplexity"] == pytest.approx(math.exp(0.5))


@pytest.mark.parametrize(
    ("total", "perplexity"), [(1e6, math.inf), (math.nan, math.nan), (math.inf, math.inf)]
)
def test_a_run_that_has_diverged(total, perplexity):
    np.testing.assert_equal(metrics.means([{"perplexity": (total, 1.0)}])["perplexity"], perplexity)


@pytest.mark.parametrize(("coefficient", "hidden"), [(None, 650), (0.5, 325), (0.001, 1)])
def test_the_width_is_a_multiple_of_the_published_one(coefficient, hidden):
    model = ModelConfig("lstm_lm", size="medium", width_coefficient=coefficient)
    network = make_network(model, VOCABULARY)
    assert (network.hidden, network.vocab_size, network.dropout_rate) == (hidden, VOCABULARY, 0.5)
