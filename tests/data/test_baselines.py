"""Baselines compared with numbers computed by hand and by brute force."""

import itertools
import math

import numpy as np
import pytest

from lbopt.config import DataConfig
from lbopt.data import ArrayDataset, baselines
from lbopt.data.text import (
    Document,
    StoreWriter,
    join_documents,
    load_pydoc_topics,
    split_pydoc_topics,
)

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
    """This includes histories that never occurred, and token 4, which training never saw."""
    values = [probability(model, history, token) for token in range(VOCABULARY)]
    assert sum(values) == pytest.approx(1, abs=1e-12)
    assert min(values) > 0


def test_components_by_hand(model):
    """The training text has 0 1 three times, twice before a 2; 1 three times; and two 2 in ten."""
    for text, expected in {
        (0, 1, 2): [1 / 5, 2 / 10, 2 / 3, 2 / 3],
        (3, 1, 2): [1 / 5, 2 / 10, 2 / 3, 2 / 3],
        (1, 4, 2): [1 / 5, 2 / 10, 2 / 10, 2 / 10],
        (0, 1, 4): [1 / 5, 0, 0, 0],
    }.items():
        np.testing.assert_allclose(model.components(np.asarray(text)), [expected])


def test_the_weights_are_the_most_likely_ones(model):
    """No step towards another mixture increases the likelihood of the validation text."""
    assert model.weights.sum() == pytest.approx(1)
    assert (model.weights >= 0).all()
    best = model.losses(VALIDATION).mean()
    for corner in np.eye(4):
        for step in (0.01, 0.1):
            other = model._replace(weights=(1 - step) * model.weights + step * corner)
            assert other.losses(VALIDATION).mean() >= best - 1e-6


def test_the_unigram_accuracy_by_hand():
    labels = np.asarray([[0, 3], [0, 0], [2, 1]])
    weights = np.asarray([[1, 1], [1, 0], [1, 1]], np.float32)
    dataset = ArrayDataset({"masked_labels": labels, "masked_weights": weights})
    assert baselines.unigram_accuracy(TRAIN, dataset) == pytest.approx(2 / 5)


def test_the_command_prints_both(capsys, monkeypatch):
    monkeypatch.setattr(baselines, "VOCABULARIES", (256, 1024))
    baselines.main()
    printed = {}
    for line in capsys.readouterr().out.splitlines()[-2:]:
        size, *numbers = line.split()
        printed[int(size)] = [float(number) for number in numbers]
    for size, numbers in printed.items():
        config = DataConfig(vocab_size=size)
        unigram = [100 * accuracy for accuracy in baselines.pydoc_unigram_accuracy(config)]
        trigram = baselines.pydoc_trigram_perplexity(config)
        bits = baselines.bits_per_character(trigram[1], size)
        assert numbers[:4] == pytest.approx([*unigram, *trigram], abs=0.006)
        assert numbers[4] == pytest.approx(bits, abs=0.0006)
        assert 1.5 < numbers[4] < 3
    assert 12 < min(printed[256][2:4]) < max(printed[256][2:4]) < 25


def test_a_store_that_is_missing_or_of_the_other_kind(capsys, tmp_path):
    with StoreWriter(tmp_path / "lbopt_text" / "bert", ["a", "b"], "a test") as writer:
        writer.append(Document(np.zeros(3, np.int32), np.zeros(1, int)))
    for name, code in (("mine", 3), ("bert", 2), ("a/b", 2)):
        assert baselines.main([f"--store={name}", f"--data_dir={tmp_path}"]) == code
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        assert f"--store = {name!r}: " in err
        assert "--for=text_lm" in err or name == "a/b"


def test_bits_per_character_are_of_the_whole_text():
    """A perplexity of 2 is one bit per token of the test set."""
    sentences = [sentence for topic in split_pydoc_topics()[2] for sentence in topic]
    num_characters = len(" ".join(sentences)) + 1
    num_tokens = len(join_documents(load_pydoc_topics(256).test)) - 1
    bits = baselines.bits_per_character(2.0, 256)
    assert bits == pytest.approx(num_tokens / num_characters)
