"""Every family learns, in runs that are shorter and narrower than those of configs/.

The nets on digits must come near their full runs; the nets on text must beat what counting reaches on the same tokens.
"""

import functools
import pathlib

import jax
import pytest

from lbopt.cli.arguments import call_get_config
from lbopt.data import baselines
from lbopt.recipes import build

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def trained(row, **changes):
    """Return the measures on the test part of a run on one device."""
    config = call_get_config(str(CONFIGS / row))
    config.parallel.num_devices = 1
    for path, value in changes.items():
        *parts, field = path.split("__")
        part = functools.reduce(getattr, parts, config)
        assert hasattr(part, field)
        setattr(part, field, value)
    run = build.build(config)
    state = run.init()
    for step in range(run.num_steps):
        state, metrics = run.train_step(state, run.batches[step])
        jax.block_until_ready(metrics)
    return run.evaluate_test(state), config


# Row -> (what is shorter, test accuracy at least).
DIGITS = {
    "digits_resnet.py:lamb-1024": ({"num_epochs": 16.0, "model__width_coefficient": 0.125}, 0.92),
    "digits_efficientnet.py:lamb-256": ({"num_epochs": 6.0, "model__depth_coefficient": 0.25}, 0.90),
}


@pytest.mark.parametrize("row", DIGITS)
def test_digits(row):
    changes, accuracy = DIGITS[row]
    assert trained(row, **changes)[0]["accuracy"] > accuracy


# Fewer steps, so larger rates; a narrower net.
BERT = {"data__vocab_size": 256, "schedule__base_learning_rate": 0.02, "schedule__base_warmup_epochs": 0.5}
LSTM = {"data__sequence_length": 32, "model__width_coefficient": 0.5, "model__dropout_rate": 0.0}


def test_bert_guesses_masked_tokens_far_better_than_counting():
    found, config = trained("pydoc_bert.py:lamb-64", num_epochs=3.0, **BERT)
    _, counting = baselines.pydoc_unigram_accuracy(config.data)
    assert found["accuracy"] > 2.5 * counting
    assert counting > 0.03


def test_the_language_model_is_less_perplexed_than_a_trigram_model():
    changes = {"num_epochs": 7.0, "schedule__base_learning_rate": 0.04, "optimizer__max_grad_norm": 0.5}
    found, config = trained("pydoc_lstm.py:lamb-64", **changes, **LSTM)
    _, counting = baselines.pydoc_trigram_perplexity(config.data)
    assert found["perplexity"] < counting
    assert counting < 25
