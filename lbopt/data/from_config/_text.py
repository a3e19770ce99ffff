"""Text, as a config asks for it."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from lbopt.config import DataConfig
from lbopt.data import _places
from lbopt.data._arrays import Splits
from lbopt.data._damaged import DamagedCount
from lbopt.data._records import Records, TfdsFolder
from lbopt.data.squad import EvaluationWindows, Question, TrainingWindows, question_from_record
from lbopt.data.text import (
    EvalLanes,
    Lanes,
    MaskedLMDataset,
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

_EMBEDDED = "pydoc_squad"
"""Questions about the topics of pydoc, whose vocabulary is theirs."""
_GIVE_VOCABULARY = (
    "give the vocab.txt or tokenizer.json of the model that config.init_from names; "
    "a workdir of lbopt train and a folder of Transformers have one"
)
_EVERY = 200
"""Of so many documents of a corpus one is for validation and one for the test; of a small one, more."""

Learned = Callable[[], AbstractContextManager[pathlib.Path]]
"""Opens the folder of what a run starts from; its vocabulary lies there."""


def load_masked_text(data: DataConfig) -> tuple[Splits, WordPiece]:
    """Open a prepared corpus as pairs of segments for BERT; return its vocabulary too."""
    store = open_store(_places.store_folder(data.builder, data.data_dir), data.vocab_size)
    pieces = WordPiece(store.pieces, store.normalization)
    every = max(2, min(_EVERY, len(store) // 3))
    try:
        parts = split_store(store, every, every)
    except UserError as error:
        raise UserError(
            f"config.data.builder = {data.builder!r}: {len(store)} documents are too few for training, validation and test; prepare a corpus of ten or more"
        ) from error
    sizes = data.sequence_length, data.vocab_size, data.max_predictions
    return Splits(*(MaskedLMDataset(part, *sizes, pieces.special) for part in parts)), pieces


def load_questions(data: DataConfig, learned: Learned | None = None) -> tuple[Splits, WordPiece]:
    """Open a set of questions with the schema of SQuAD v1.1.

    Args:
      data: which one.
      learned: opens the folder whose vocabulary is taken if `data` names none.
    """
    pieces = _vocabulary(data, learned)
    fix = f"the vocabulary has {len(pieces.pieces)} pieces; use that, or another config.data.vocab_file"
    require(len(pieces.pieces) == data.vocab_size, "config.data.vocab_size", data.vocab_size, fix)
    folder = TfdsFolder(data.builder, data.data_dir)
    folder.require_features("id", "context", "question", "answers")

    def windows(kind: Any, field: str) -> Any:
        split = getattr(data, field)
        damaged = DamagedCount(f"{data.builder} {split}", data.max_damaged_records)
        questions = list(_usable(folder.open(split, f"config.data.{field}"), damaged))
        sizes = data.sequence_length, data.doc_stride, data.max_query_length
        found = kind(questions, pieces, *sizes)
        found.damaged = damaged
        return found

    train = windows(TrainingWindows, "train_split")
    validation = windows(EvaluationWindows, "validation_split")
    if data.test_split == data.validation_split:
        return Splits(train, validation, validation), pieces
    return Splits(train, validation, windows(EvaluationWindows, "test_split")), pieces


def _usable(records: Records, damaged: DamagedCount) -> Iterator[Question]:
    for index in range(len(records)):
        try:
            yield question_from_record(records[index])
        except UserError as error:
            damaged.add(index, str(error))
        except Exception as error:  # whatever the storage layers raise
            damaged.add(index, f"it cannot be read: {' '.join(str(error).split())[:120]}")


def _vocabulary(data: DataConfig, learned: Learned | None) -> WordPiece:
    if data.builder == _EMBEDDED and data.vocab_file is None:
        fix = f"{_EMBEDDED}'s vocabulary is learned from lowercased text; leave it None, or give config.data.vocab_file"
        require(data.lowercase is None, "config.data.lowercase", data.lowercase, fix)
        return load_pydoc_topics(data.vocab_size).pieces
    if data.vocab_file is not None:
        return load_wordpiece(data.vocab_file, data.lowercase, "config.data.lowercase")
    if learned is None:
        raise UserError(f"config.data.vocab_file = None: {_GIVE_VOCABULARY}")
    with learned() as folder:
        file = find_vocabulary(folder)
        if file is None:
            raise UserError(f"config.data.vocab_file = None: {_GIVE_VOCABULARY}")
        return load_wordpiece(file, data.lowercase, "config.data.lowercase")


def load_running_text(data: DataConfig, num_lanes: int) -> tuple[Splits, Vocabulary]:
    """Open text for a language model, as windows or, with `carry_state`, as lanes; return its vocabulary too."""
    texts, vocabulary = _running_text(data)
    length = data.sequence_length
    if data.carry_state:
        train = Lanes(texts[0], num_lanes, length)
        return Splits(train, *(EvalLanes(text, length) for text in texts[1:])), vocabulary
    return Splits(*(make_windows(text, length) for text in texts)), vocabulary


def _running_text(data: DataConfig) -> tuple[list[np.ndarray], Vocabulary]:
    if data.name == "ptb":
        found = load_ptb(_places.ptb_folder(data.data_dir), data.vocab_size, data.data_dir)
        return [found.train, found.validation, found.test], Vocabulary(found.words)
    corpus = load_pydoc_topics(data.vocab_size)
    return [join_documents(part) for part in corpus[1:]], corpus.pieces.vocabulary
