"""The baselines by hand, by brute force, and as probabilities."""

import itertools
import math

import numpy as np
import pytest

from lbopt.config import DataConfig
from lbopt.data import baselines
from lbopt.data.arrays import ArrayDataset

TRAIN = np.asarray([0, 1, 2, 0, 1, 3, 0, 1, 2, 0])
VALIDATION = np.asarray([0, 1, 2, 0, 1, 2, 4, 0, 1, 3])
VOCABULARY = 5


@pytest.fixture(scope="module")
def model():
    return baselines.fit_trigram(TRAIN, VALIDATION, VOCABULARY)


def probability(model, history, token):
    return math.exp(-model.losses(np.asarray([*history, token]))[0])


@pytest.mark.parametrize("history", itertools.product(range(VOCABULARY), repeat=2))
def test_probabilities_sum_to_one_after_every_history(model, history):
    """Also after histories that never occurred, and with token 4, which training never saw."""
    values = [probability(model, history, token) for token in range(VOCABULARY)]
    assert sum(values) == pytest.approx(1, abs=1e-12)
    assert min(values) > 0


def test_components_by_hand(model):
    """Of token 2 after 0 1: 0 1 occurs three times, two of them before a 2; 1 occurs thrice; 2 is two of ten."""
    np.testing.assert_allclose(model.components(np.asarray([0, 1, 2])), [[1 / 5, 2 / 10, 2 / 3, 2 / 3]])
    np.testing.assert_allclose(model.components(np.asarray([3, 1, 2])), [[1 / 5, 2 / 10, 2 / 3, 2 / 3]])
    np.testing.assert_allclose(model.components(np.asarray([1, 4, 2])), [[1 / 5, 2 / 10, 2 / 10, 2 / 10]])
    np.testing.assert_allclose(model.components(np.asarray([0, 1, 4])), [[1 / 5, 0, 0, 0]])


def test_the_weights_are_the_most_likely_ones(model):
    """No step towards another mixture makes the validation text more likely."""
    assert model.weights.sum() == pytest.approx(1)
    assert (model.weights >= 0).all()
    best = model.losses(VALIDATION).mean()
    for corner in np.eye(4):
        for step in (0.01, 0.1):
            other = model._replace(weights=(1 - step) * model.weights + step * corner)
            assert other.losses(VALIDATION).mean() >= best - 1e-6


def test_the_unigram_accuracy_by_hand():
    labels, weights = np.asarray([[0, 3], [0, 0], [2, 1]]), np.asarray([[1, 1], [1, 0], [1, 1]], np.float32)
    dataset = ArrayDataset({"masked_labels": labels, "masked_weights": weights})
    assert baselines.unigram_accuracy(TRAIN, dataset) == pytest.approx(2 / 5)


def test_the_command_prints_both(capsys):
    baselines.main()
    out = capsys.readouterr().out
    assert "1024 pieces, sequences of 32" in out
    unigram, trigram = ([float(part) for part in line.split()[-2:]] for line in out.splitlines()[-2:])
    config = DataConfig()
    assert unigram == pytest.approx([100 * value for value in baselines.pydoc_unigram_accuracy(config)], abs=0.01)
    assert 3 < min(unigram) <= max(unigram) < 12
    assert 30 < min(trigram) <= max(trigram) < 120
