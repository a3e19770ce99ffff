"""Large texts as stores of tokens, from data sets of articles and from folders of plain text."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lbopt import paths
from lbopt.data._damaged import DamagedCount
from lbopt.data._records import Records, TfdsFolder
from lbopt.data.prepare._alone import alone_in
from lbopt.data.prepare._datasets import renamed
from lbopt.data.text import (
    Counts,
    WordPiece,
    build_store,
    folder_documents,
    learn_vocabulary,
    wikipedia_documents,
)
from lbopt.errors import require

Watch = Callable[[Iterator[Sequence[str]], str, int], Iterator[Sequence[str]]]
"""Given documents, what they are gone through for, and about how many they are: the same documents while somebody looks on."""


class Corpus:
    """Documents of a data set, then those of a folder; they can be gone through more than once.

    Args:
      builder: a TFDS data set with `title` and `text`, whose training split is read; None for none.
      folder: of `*.txt`; None for none.
      data_dir: see `default_data_dir`.
      max_damaged: so many articles that cannot be read are left out.

    Attributes:
      damaged: the count of those.
      made_from: what the text is, in words.
      total: how many articles and files there are; those without a sentence are no documents.

    Raises:
      UserError: if both are None, or if one of them is not of this kind.
      EnvironmentProblem: if the data set is not there.
    """

    def __init__(
        self,
        builder: str | None,
        folder: paths.GivenPath | None,
        data_dir: str | None,
        max_damaged: int = 0,
    ):
        require(
            builder or folder,
            "--tfds, --folder",
            None,
            "give one or both: a data set of articles, a folder of *.txt",
        )
        self._folder = paths.local(folder, "folder") if folder else None
        self._records: Records | None = None
        self.damaged = DamagedCount(f"{builder} train", max_damaged, "--max_damaged_records")
        named, self.total = [], 0
        if builder:
            with renamed("--tfds"):
                opened = TfdsFolder(builder, data_dir)
                opened.require_features("title", "text")
                self._records = opened.open("train", "--tfds: split")
            named.append(f"{builder} {opened.folder.name}")
            self.total += len(self._records)
        if self._folder is not None:
            folder_documents(self._folder)  # raises if there is no text
            named.append(f"texts of {self._folder.name}")
            self.total += sum(1 for _ in self._folder.rglob("*.txt"))
        self.made_from = ", ".join(named)

    def documents(self) -> Iterator[Sequence[str]]:
        """Go through the documents from the start."""
        articles = (
            () if self._records is None else wikipedia_documents(_each(self._records, self.damaged))
        )
        texts = () if self._folder is None else folder_documents(self._folder)
        return itertools.chain(articles, texts)


def _each(records: Records, damaged: DamagedCount) -> Iterator[Any]:
    for number in range(len(records)):
        try:
            record = records[number]
        except Exception as error:  # whatever the storage layers raise
            damaged.add(number, f"it cannot be read: {' '.join(str(error).split())[:120]}")
        else:
            yield record


def make_token_store(
    store: pathlib.Path, corpus: Corpus, vocabulary: WordPiece | int, watch: Watch
) -> Counts:
    """Write a corpus as tokens; all of it is there afterwards, or nothing.

    Args:
      store: the new folder.
      corpus: what is written.
      vocabulary: what cuts words, or how many pieces to learn from the corpus.
      watch: sees the documents as they pass.

    Raises:
      UserError: if there is no text, or the vocabulary is too small for its alphabet.
      EnvironmentProblem: if the disk cannot be written to.
    """
    with alone_in(store.parent, f".{store.name}.partial-*"):
        if isinstance(vocabulary, int):
            vocabulary = learn_vocabulary(
                watch(corpus.documents(), "learning the vocabulary", corpus.total), vocabulary
            )
        documents = watch(corpus.documents(), "writing tokens", corpus.total)
        return build_store(store, documents, vocabulary, corpus.made_from)
