"""Baselines on the embedded text: figures of counting models, which a trained model has to beat.

    python -m lbopt.data.baselines

prints them for vocabularies of several sizes. configs/pydoc_bert.py uses 1024 pieces,
configs/pydoc_lstm.py 256. With `--store=NAME [--data_dir=FOLDER]` it prints those of a store that
`lbopt prepare text` made for language models; ten million tokens take three minutes.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lbopt import errors
from lbopt._shown import one_line, show
from lbopt.config import DataConfig
from lbopt.data._arrays import Dataset, Splits
from lbopt.data._places import store_folder
from lbopt.data.text import (
    TokenStore,
    join_documents,
    load_pydoc_masked_lm,
    load_pydoc_topics,
    open_store,
    split_pydoc_topics,
)
from lbopt.errors import EnvironmentProblem, UserError, require

_EM_STEPS = 200
"""Steps of expectation maximisation, after which the weights no longer change."""
VOCABULARIES = (256, 512, 1024, 2048)


def unigram_accuracy(train_tokens: np.ndarray, dataset: Dataset) -> float:
    """Return the fraction of a data set's masked tokens that are the most frequent training token.

    On the training text this is the best accuracy of a predictor that does not see the sequence.
    """
    guess = np.bincount(train_tokens).argmax()
    batch = dataset.take(np.arange(len(dataset)))
    hits = (batch["masked_labels"] == guess) * batch["masked_weights"]
    return float(hits.sum() / batch["masked_weights"].sum())


class Trigram(NamedTuple):
    """A trigram model with linear interpolation (Jelinek and Mercer 1980).

        p(w | u v) = a_0 / V + a_1 p_1(w) + a_2 p_2(w | v) + a_3 p_3(w | u v)

    The p_n are relative frequencies in the training text; after a history that never occurred, p_n
    is p_(n-1). The probabilities add up to 1 after every history, and every token has a positive
    one, [UNK] included.

    Attributes:
      vocab_size: V, the number of tokens of the vocabulary.
      weights: [4] fp64, the weights a, positive with sum 1.
      counts: n -> {n-gram: number of occurrences}, for n = 1, 2, 3.
      histories: n -> {first n - 1 tokens of an n-gram: number of n-grams that begin with them}.
    """

    vocab_size: int
    weights: np.ndarray
    counts: dict[int, dict[tuple[int, ...], int]]
    histories: dict[int, dict[tuple[int, ...], int]]

    def components(self, text: np.ndarray) -> np.ndarray:
        """Return [tokens - 2, 4] fp64: 1 / V and p_1 to p_3 of every token from the third on."""
        all_probabilities = []
        tokens = [int(token) for token in text]
        for place in range(2, len(tokens)):
            probabilities = [1 / self.vocab_size]
            for n in (1, 2, 3):
                gram = tuple(tokens[place - n + 1 : place + 1])
                seen = self.histories[n].get(gram[:-1], 0)
                shorter = probabilities[-1]
                probabilities.append(self.counts[n].get(gram, 0) / seen if seen else shorter)
            all_probabilities.append(probabilities)
        return np.asarray(all_probabilities)

    def losses(self, text: np.ndarray) -> np.ndarray:
        """Return [tokens - 2] negative log-likelihoods in nats of all tokens from the third on."""
        return -np.log(self.components(text) @ self.weights)


def fit_trigram(train: np.ndarray, validation: np.ndarray, vocab_size: int) -> Trigram:
    """Return a model whose counts are of the training text.

    Its weights maximise the likelihood of the validation text.
    """
    counts: dict[int, dict[tuple[int, ...], int]] = {1: {}, 2: {}, 3: {}}
    histories: dict[int, dict[tuple[int, ...], int]] = {1: {}, 2: {}, 3: {}}
    tokens = [int(token) for token in train]
    for n in (1, 2, 3):
        for place in range(n - 1, len(tokens)):
            gram = tuple(tokens[place - n + 1 : place + 1])
            counts[n][gram] = counts[n].get(gram, 0) + 1
            histories[n][gram[:-1]] = histories[n].get(gram[:-1], 0) + 1
    model = Trigram(vocab_size, np.full(4, 0.25), counts, histories)
    return model._replace(weights=_most_likely_weights(model.components(validation)))


def _most_likely_weights(components: np.ndarray) -> np.ndarray:
    """Return the weights [components] of a mixture that maximise its likelihood.

    The log-likelihood is concave in the weights, so expectation maximisation finds the maximum.

    Args:
      components: [tokens, components] probabilities of each token under each component.
    """
    weights = np.full(components.shape[1], 1 / components.shape[1])
    for _ in range(_EM_STEPS):
        joint = components * weights
        weights = np.mean(joint / joint.sum(1, keepdims=True), 0)
    return weights


def pydoc_unigram_accuracy(config: DataConfig) -> tuple[float, float]:
    """Return `unigram_accuracy` on the validation and the test set."""
    splits: Splits = load_pydoc_masked_lm(
        config.vocab_size, config.sequence_length, config.max_predictions
    )
    corpus = load_pydoc_topics(config.vocab_size)
    tokens = np.concatenate([document.tokens for document in corpus.train])
    return unigram_accuracy(tokens, splits.validation), unigram_accuracy(tokens, splits.test)


def pydoc_trigram_perplexity(config: DataConfig) -> tuple[float, float]:
    """Return the trigram model's perplexity on the validation and the test set.

    Its weights were chosen on the validation set. The model sees the two tokens before every token,
    also where the language model begins a new window.
    """
    corpus = load_pydoc_topics(config.vocab_size)
    train, validation, test = (join_documents(documents) for documents in corpus[1:])
    model = fit_trigram(train, validation, len(corpus.pieces.pieces))
    validation_loss = model.losses(validation).mean()
    test_loss = model.losses(test).mean()
    return math.exp(validation_loss), math.exp(test_loss)


def bits_per_character(perplexity: float, vocab_size: int) -> float:
    """Return a test perplexity in bits per character, comparable between vocabularies."""
    num_tokens = sum(len(document.tokens) + 1 for document in load_pydoc_topics(vocab_size).test)
    num_characters = sum(
        len(sentence) + 1 for topic in split_pydoc_topics()[2] for sentence in topic
    )
    return math.log2(perplexity) * num_tokens / num_characters


class StoredBaseline(NamedTuple):
    """Score of the trigram model on a split of a store.

    Attributes:
      perplexity: Perplexity by token.
      bits_per_byte: Sum of the losses in bits over the number of bytes.
    """

    perplexity: float
    bits_per_byte: float


def stored_trigram(store: TokenStore) -> tuple[StoredBaseline, StoredBaseline]:
    """Return the trigram model's scores on the validation and the test set of a store of bytes.

    Its weights were chosen on the validation set. Of each set the first token is not scored.
    """
    assert store.token_bytes is not None
    train, validation, test = store.split_texts()
    model = fit_trigram(train, validation, len(store.pieces))

    found = []
    for text in (validation, test):
        losses = model.losses(text)
        bits = losses.sum() / math.log(2) / store.token_bytes[text[2:]].sum()
        found.append(StoredBaseline(math.exp(losses.mean()), float(bits)))
    return found[0], found[1]


def main(argv: Sequence[str] = ()) -> int:
    """Print the baselines of the embedded text for each vocabulary size, or those of a store.

    Returns:
      Exit code, see `lbopt.errors`.
    """
    parser = argparse.ArgumentParser(prog="python -m lbopt.data.baselines")
    parser.add_argument("--store", help="name of a store for language models")
    parser.add_argument("--data_dir", help="folder of data sets")
    given = parser.parse_args(argv)
    try:
        if given.store is None:
            _show_embedded()
        else:
            _show_stored(given.store, given.data_dir)
    except (UserError, EnvironmentProblem) as error:
        print(one_line(f"{parser.prog}: {error}"), file=sys.stderr)
        return error.exit_code
    return 0


def _show_stored(name: str, data_dir: str | None) -> None:
    with errors.under("", builder="--store", name="--store"):
        store = open_store(store_folder(name, data_dir), purpose="text_lm")
    fix = "its tokens are of text_mlm; give a store of lbopt prepare text --for=text_lm"
    require(store.tokenizer_json, "--store", name, fix, code="mismatch")
    scores = stored_trigram(store)
    show("next token, interpolated trigram: perplexity, bits per byte")
    for split, score in zip(("validation", "test"), scores, strict=True):
        show(f"{split:12}{score.perplexity:8.2f}{score.bits_per_byte:8.3f}")


def _show_embedded() -> None:
    length = DataConfig().sequence_length
    show(f"pydoc_data.topics of this Python, sequences of {length} tokens")
    show("        masked tokens, the most     next token, interpolated trigram,")
    show("        frequent one: accuracy %    perplexity             bits per character")
    show("pieces  validation  test            validation  test       test")
    for size in VOCABULARIES:
        config = DataConfig(vocab_size=size)
        masked = [100 * value for value in pydoc_unigram_accuracy(config)]
        perplexity = pydoc_trigram_perplexity(config)
        bits = bits_per_character(perplexity[1], size)
        accuracies = f"{masked[0]:12.2f}{masked[1]:6.2f}"
        perplexities = f"{perplexity[0]:10.2f}{perplexity[1]:7.2f}"
        show(f"{size:6}{accuracies}{'':12}{perplexities}{'':6}{bits:.3f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
