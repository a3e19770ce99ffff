"""Python's help topics, `pydoc_data.topics`: 350 KB of English that come with the interpreter.

The text differs a little between versions of Python, and with it the figures.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from typing import NamedTuple

from lbopt.data._arrays import Splits
from lbopt.data.text._masked import MaskedLMDataset
from lbopt.data.text._windows import make_windows
from lbopt.data.text._wordpiece import (
    Document,
    WordPiece,
    learn_wordpiece,
    split_paragraphs,
    split_sentences,
)

TRAIN = 0.8
"""Fraction of the text before which a topic of the training set begins."""
VALIDATION = 0.892
"""Fraction of the text before which a topic of the validation set begins; the others are the test
set. Both sets are about equally large in Python 3.11 to 3.13."""


class PydocTopics(NamedTuple):
    """The topics as tokens, one document for each topic.

    Attributes:
      pieces: Vocabulary, learned from the training set.
      train: Documents of the training set.
      validation: Documents of the validation set.
      test: Documents of the test set.
    """

    pieces: WordPiece
    train: list[Document]
    validation: list[Document]
    test: list[Document]


@functools.cache
def load_pydoc_topics(vocab_size: int) -> PydocTopics:
    """Return the topics in a fixed split: about 80 % of the text to train, 10 % to validate, 10 %
    to test.

    A hash of its name decides the place of a topic, so it is in the same set in most versions of
    Python. Topics quote each other. Of a paragraph that occurs twice only the first copy is kept,
    so no paragraph is in two sets.

    Args:
      vocab_size: Number of pieces of the vocabulary to learn, special tokens included.

    Raises:
      UserError: If the vocabulary is too small for the alphabet.
      EnvironmentProblem: If the `tokenizers` package is not installed.
    """
    splits = split_pydoc_topics()
    pieces = learn_wordpiece([sentence for topic in splits[0] for sentence in topic], vocab_size)
    return PydocTopics(pieces, *([pieces.encode(topic) for topic in topics] for topics in splits))


@functools.cache
def split_pydoc_topics() -> tuple[list[list[str]], list[list[str]], list[list[str]]]:
    """Return the sentences of each topic of the training, validation and test set."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    kept = []
    for name in sorted(topics, key=_hash):
        fresh = [paragraph for paragraph in split_paragraphs(topics[name]) if paragraph not in seen]
        fresh = list(dict.fromkeys(fresh))
        seen.update(fresh)
        kept.append([sentence for paragraph in fresh for sentence in split_sentences(paragraph)])
    kept = [topic for topic in kept if topic]

    # A topic belongs to the split in which its first character lies.
    sizes = [sum(map(len, topic)) for topic in kept]
    starts = [0, *itertools.accumulate(sizes)]
    splits: tuple[list, list, list] = ([], [], [])
    for topic, start in zip(kept, starts, strict=False):
        fraction = start / starts[-1]
        splits[(fraction >= TRAIN) + (fraction >= VALIDATION)].append(topic)
    return splits


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


@functools.cache
def load_pydoc_masked_lm(vocab_size: int, sequence_length: int, max_predictions: int) -> Splits:
    """Return the topics as pairs of segments for BERT, see `MaskedLMDataset`."""
    corpus = load_pydoc_topics(vocab_size)

    def dataset(documents: list[Document]) -> MaskedLMDataset:
        num_pieces = len(corpus.pieces.pieces)
        return MaskedLMDataset(documents, sequence_length, num_pieces, max_predictions)

    return Splits(dataset(corpus.train), dataset(corpus.validation), dataset(corpus.test))


@functools.cache
def load_language_model(vocab_size: int, sequence_length: int) -> Splits:
    """Return the topics as windows of text, see `make_windows`."""
    corpus = load_pydoc_topics(vocab_size)
    return Splits(*(make_windows(documents, sequence_length) for documents in corpus[1:]))
