"""Families learn, in shorter and narrower runs than those of configs/.

ResNet on digits must come near its full run (EfficientNet: test_efficientnet_learns.py). The
networks on text must beat counts of the same tokens.
"""

import numpy as np
import pytest
from short_run import trained

from lbopt.data import baselines


@pytest.mark.slow
def test_resnet_on_digits():
    found, _ = trained(
        "digits_resnet.py:lamb-1024", num_epochs=16.0, model__width_coefficient=0.125
    )
    assert found["accuracy"] > 0.92


# Fewer steps need larger rates and a narrower network.
BERT = {
    "data__vocab_size": 256,
    "schedule__base_learning_rate": 0.02,
    "schedule__base_warmup_epochs": 0.5,
}
LSTM = {"data__sequence_length": 32, "model__width_coefficient": 0.5, "model__dropout_rate": 0.0}


@pytest.mark.slow
def test_bert_guesses_masked_tokens_far_better_than_counting():
    found, config = trained("pydoc_bert.py:lamb-64", num_epochs=3.0, **BERT)
    _, counting = baselines.pydoc_unigram_accuracy(config.data)
    assert found["accuracy"] > 2.5 * counting
    assert counting > 0.03


@pytest.mark.slow
def test_the_language_model_is_less_perplexed_than_a_trigram_model():
    changes = {
        "num_epochs": 7.0,
        "schedule__base_learning_rate": 0.04,
        "optimizer__max_grad_norm": 0.5,
    }
    found, config = trained("pydoc_lstm.py:lamb-64", **changes, **LSTM)
    _, counting = baselines.pydoc_trigram_perplexity(config.data)
    assert found["perplexity"] < counting
    assert counting < 25


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("digits_cnn.py:lamb-1024", {"num_epochs": 12.0}),
        ("pydoc_bert.py:lamb-64", {"num_epochs": 1.0, **BERT}),
    ],
)
def test_lamb_learns_as_much_with_its_moments_in_8_bits(recipe, changes):
    """The means of three seeds differ by no more than chance explains, at 99 % (Student)."""
    scores = {
        form: [
            trained(recipe, seed=seed, optimizer__state_format=form, **changes)[0]["accuracy"]
            for seed in range(3)
        ]
        for form in (None, "8bit_dynamic")
    }
    whole, small = (np.array(values) for values in scores.values())
    assert (whole != small).any()  # the state was compressed
    error = np.sqrt((whole.var(ddof=1) + small.var(ddof=1)) / 3)
    assert abs(whole.mean() - small.mean()) <= 4.6 * error
