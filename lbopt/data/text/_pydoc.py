"""Python's own help topics, `pydoc_data.topics`: about 350 KB of English technical text that ship with the interpreter.

Every version of Python has its own text, so figures differ a little between versions.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable
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

TRAIN, VALIDATION = 0.8, 0.892
"""Topics that begin before these fractions of the text are of these parts; the longest one near the end begins behind both in
Python 3.11 to 3.13, which keeps the last two parts alike in size."""


class Corpus(NamedTuple):
    """The topics as tokens.

    Attributes:
      pieces: what cuts words into tokens; its vocabulary is learned from the training part.
      train: a document per topic.
      validation: likewise.
      test: likewise.
    """

    pieces: WordPiece
    train: list[Document]
    validation: list[Document]
    test: list[Document]


@functools.cache
def load_pydoc_topics(vocab_size: int) -> Corpus:
    """Return the topics in a fixed split: about 80 % of the text to train, 10 % to validate, 10 % to test.

    Whole topics go to one part, by a hash of their name, so that a topic keeps its place in most versions of Python. Topics
    quote each other: a paragraph that occurs twice is kept where it comes first, so none is in two parts.

    Raises:
      UserError: if the vocabulary has no room for the alphabet.
      EnvironmentProblem: if the `tokenizers` package is not installed.
    """
    parts = split_pydoc_topics()
    pieces = learn_wordpiece([sentence for topic in parts[0] for sentence in topic], vocab_size)
    return Corpus(pieces, *([pieces.encode(topic) for topic in part] for part in parts))


@functools.cache
def split_pydoc_topics() -> tuple[list[list[str]], list[list[str]], list[list[str]]]:
    """Return the sentences of each topic of the training, validation and test part."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    kept = []
    for name in sorted(topics, key=_place):
        fresh = [paragraph for paragraph in split_paragraphs(topics[name]) if paragraph not in seen]
        fresh = list(dict.fromkeys(fresh))
        seen.update(fresh)
        kept.append([sentence for paragraph in fresh for sentence in split_sentences(paragraph)])
    kept = [topic for topic in kept if topic]
    sizes = [sum(map(len, topic)) for topic in kept]
    before = [0, *itertools.accumulate(sizes)]
    parts: tuple[list, list, list] = ([], [], [])
    for topic, start in zip(kept, before, strict=False):
        fraction = start / before[-1]
        parts[(fraction >= TRAIN) + (fraction >= VALIDATION)].append(topic)
    return parts


def _place(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


@functools.cache
def load_pydoc_masked_lm(vocab_size: int, sequence_length: int, max_predictions: int) -> Splits:
    """Return the topics as pairs of segments for BERT; see `MaskedLMDataset`."""
    corpus = load_pydoc_topics(vocab_size)

    def packed(documents: Iterable[Document]) -> MaskedLMDataset:
        return MaskedLMDataset(
            list(documents), sequence_length, len(corpus.pieces.pieces), max_predictions
        )

    return Splits(packed(corpus.train), packed(corpus.validation), packed(corpus.test))


@functools.cache
def load_language_model(vocab_size: int, sequence_length: int) -> Splits:
    """Return the topics as windows of text; see `make_windows`."""
    corpus = load_pydoc_topics(vocab_size)
    return Splits(*(make_windows(part, sequence_length) for part in corpus[1:]))
