"""Text, read as a config says."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from lbopt import errors
from lbopt.config import DataConfig
from lbopt.data import _places
from lbopt.data._arrays import Splits
from lbopt.data._damaged import DamagedCount, DamagedRecord
from lbopt.data._records import Records, TfdsFolder, read_any_record
from lbopt.data.squad import EvaluationWindows, Question, TrainingWindows, question_from_record
from lbopt.data.text import (
    EvalTextStreams,
    MaskedLMDataset,
    TextStreams,
    TextWindows,
    Vocabulary,
    WordPiece,
    find_vocabulary,
    join_documents,
    load_ptb,
    load_pydoc_topics,
    load_wordpiece,
    make_windows,
    open_store,
    split_store,
)
from lbopt.errors import UserError, require

_PYDOC_SQUAD = "pydoc_squad"
"""Questions about Python's help topics. They use the vocabulary that is learned from the topics."""
_EVERY = 200
"""Documents of a corpus for each one in the validation set, and for each one in the test set. A
small corpus has a larger share of them."""

Learned = Callable[[], AbstractContextManager[pathlib.Path]]
"""Function that opens the folder of `init_from`, which has the vocabulary."""


def load_masked_text(data: DataConfig) -> tuple[Splits, WordPiece]:
    """Return a prepared corpus as pairs of segments for BERT, and its vocabulary."""
    with errors.under("", name="builder"):
        folder = _places.readable_store(data.builder, data.data_dir)
    store = open_store(folder, data.vocab_size)
    fix = "its tokens are bytes, for {name} = 'text_lm'; use that, or a store of text_mlm"
    of_pieces = not store.tokenizer_json
    require(of_pieces, "builder", data.builder, fix, code="mismatch", also=["name"])
    pieces = WordPiece(store.pieces, store.normalization)
    every = max(2, min(_EVERY, len(store) // 3))
    try:
        parts = split_store(store, every, every)
    except UserError as error:
        fix = (
            f"{len(store)} documents are too few for training, validation and test; prepare a "
            "corpus of ten or more"
        )
        raise UserError("builder", data.builder, fix) from error
    sizes = data.sequence_length, data.vocab_size, data.max_predictions
    return Splits(*(MaskedLMDataset(part, *sizes, pieces.special) for part in parts)), pieces


def load_questions(data: DataConfig, learned: Learned | None = None) -> tuple[Splits, WordPiece]:
    """Return a data set with the schema of SQuAD v1.1, and its vocabulary.

    Args:
      data: The config.
      learned: Function that opens the folder whose vocabulary is used if `data` names none.
    """
    pieces = _vocabulary(data, learned)
    fix = f"the vocabulary has {len(pieces.pieces)} pieces; use that, or another {{vocab_file}}"
    same = len(pieces.pieces) == data.vocab_size
    also = ["vocab_file"]
    require(same, "vocab_size", data.vocab_size, fix, code="mismatch", also=also)
    folder = TfdsFolder(data.builder, data.data_dir)
    folder.require_features("id", "context", "question", "answers")

    def windows(kind: Any, field: str) -> Any:
        split = getattr(data, field)
        damaged = DamagedCount(f"{data.builder} {split}", data.max_damaged_records)
        questions = list(_usable(folder.open(split, field), damaged))
        sizes = data.sequence_length, data.doc_stride, data.max_query_length
        found = kind(questions, pieces, *sizes)
        found.damaged = damaged
        return found

    train = windows(TrainingWindows, "train_split")
    validation = windows(EvaluationWindows, "validation_split")
    # SQuAD's own test set is not public, so both are often one split, which is tokenized once.
    if data.test_split == data.validation_split:
        return Splits(train, validation, validation), pieces
    return Splits(train, validation, windows(EvaluationWindows, "test_split")), pieces


def _usable(records: Records, damaged: DamagedCount) -> Iterator[Question]:
    for index in range(len(records)):
        try:
            yield question_from_record(read_any_record(records, index))
        except (DamagedRecord, UserError) as error:
            damaged.add(index, str(error))


def _vocabulary(data: DataConfig, learned: Learned | None) -> WordPiece:
    """Return the vocabulary of a file, of the embedded questions, or beside `init_from`."""
    if data.builder == _PYDOC_SQUAD and data.vocab_file is None:
        fix = (
            f"the vocabulary of {_PYDOC_SQUAD} is learned from lowercased text; leave it None, or "
            "give {vocab_file}"
        )
        given = data.lowercase is not None
        also = ["vocab_file"]
        require(not given, "lowercase", data.lowercase, fix, code="unused", also=also)
        return load_pydoc_topics(data.vocab_size).pieces
    if data.vocab_file is not None:
        return load_wordpiece(data.vocab_file, data.lowercase)
    if learned is None:
        raise _no_vocabulary()
    with learned() as folder:
        file = find_vocabulary(folder)
        if file is None:
            raise _no_vocabulary()
        with errors.under("", vocabulary="init_from"):
            return load_wordpiece(file, data.lowercase)


def _no_vocabulary() -> UserError:
    fix = (
        "give the vocab.txt or tokenizer.json of the model that {init_from} names; a workdir of "
        "lbopt train and a folder of Transformers have one"
    )
    return UserError("vocab_file", None, fix, code="missing", also=["init_from"])


class RunningText(NamedTuple):
    """Text for a language model.

    Attributes:
      texts: Tokens of the training, validation and test set.
      vocabulary: Its vocabulary.
      token_bytes: Number of bytes of each token, [vocabulary] int32; None if tokens are no bytes.
    """

    texts: list[np.ndarray]
    vocabulary: Vocabulary
    token_bytes: np.ndarray | None = None

    def splits(self, data: DataConfig, num_streams: int) -> Splits:
        """Return the text as windows or, with `data.carry_state`, as streams.

        Args:
          data: The config.
          num_streams: Number of streams.
        """
        train, *others = self.texts
        length = data.sequence_length
        if data.carry_state:
            streams = TextStreams(train, num_streams, length)
            return Splits(streams, *(EvalTextStreams(text, length) for text in others))
        if data.name == "text_lm":
            windows = (TextWindows(text, length, partial=True) for text in others)
            return Splits(TextWindows(train, length), *windows)
        return Splits(*(make_windows(text, length) for text in self.texts))


def load_running_text(data: DataConfig) -> RunningText:
    """Return the text of a config for language models."""
    if data.name == "ptb":
        found = load_ptb(_places.readable_ptb(data.data_dir), data.vocab_size, data.data_dir)
        return RunningText([found.train, found.validation, found.test], Vocabulary(found.words))
    if data.name == "text_lm":
        return _stored_text(data)
    corpus = load_pydoc_topics(data.vocab_size)
    return RunningText([join_documents(part) for part in corpus[1:]], corpus.pieces.vocabulary)


def _stored_text(data: DataConfig) -> RunningText:
    with errors.under("", name="builder"):
        folder = _places.readable_store(data.builder, data.data_dir)
    store = open_store(folder, data.vocab_size, "text_lm")
    fix = "it is for {name} = 'text_mlm'; use that, or lbopt prepare text --for=text_lm"
    by_bytes = bool(store.tokenizer_json)
    require(by_bytes, "builder", data.builder, fix, code="mismatch", also=["name"])
    vocabulary = Vocabulary(store.pieces, tokenizer_json=store.tokenizer_json)
    return RunningText(store.split_texts(), vocabulary, store.token_bytes)


def is_stored(data: DataConfig) -> bool:
    """Return whether the store of a config is on this machine."""
    with errors.under("", name="builder"):
        return (_places.readable_store(data.builder, data.data_dir) / "store.json").is_file()
