"""Token stores made from data sets of articles and from folders of plain text."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lbopt import paths
from lbopt.data._damaged import DamagedCount, DamagedRecord
from lbopt.data._records import Records, TfdsFolder, read_any_record
from lbopt.data.prepare._alone import alone_in
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
"""(documents, purpose of the pass, approximate number) -> the same documents.

It reports progress while they are consumed.
"""


class Corpus:
    """Documents of a data set, followed by those of a folder. They can be read more than once.

    Args:
      builder: Data set in the format of TensorFlow Datasets whose records have `title` and `text`.
        Its training split is read. None for none.
      folder: Folder with `*.txt` files; None for none.
      data_dir: Folder of data sets, see `default_data_dir`.
      max_damaged_records: Maximum number of unreadable articles that are skipped.

    Attributes:
      damaged: Count of the skipped articles.
      made_from: Names of the data set and the folder, for people.
      total: Number of articles and files. Those without a sentence are no documents.

    Raises:
      UserError: If both are None, or if one of them has no such text.
      EnvironmentProblem: If the data set is missing.
    """

    def __init__(
        self,
        builder: str | None,
        folder: paths.GivenPath | None,
        data_dir: str | None,
        max_damaged_records: int = 0,
    ):
        fix = "give a data set of articles, a {folder} of *.txt, or both"
        given = builder or folder
        require(given, "builder", builder, fix, code="missing", also=["folder"])
        self._folder = paths.readable(folder, "folder") if folder else None
        self._records: Records | None = None
        self.damaged = DamagedCount(f"{builder} train", max_damaged_records)
        self.total = 0
        names = []
        if builder:
            opened = TfdsFolder(builder, data_dir)
            opened.require_features("title", "text")
            self._records = opened.open("train", "split")
            names.append(f"{builder} {opened.folder.name}")
            self.total += len(self._records)
        if self._folder is not None:
            folder_documents(self._folder)  # raises an error if there is no text
            names.append(f"texts of {self._folder.name}")
            self.total += sum(1 for _ in self._folder.rglob("*.txt"))
        self.made_from = ", ".join(names)

    def documents(self) -> Iterator[Sequence[str]]:
        """Return an iterator over the documents, from the first one on."""
        parts: list[Iterator[Sequence[str]]] = []
        if self._records is not None:
            parts.append(wikipedia_documents(_readable(self._records, self.damaged)))
        if self._folder is not None:
            parts.append(folder_documents(self._folder))
        return itertools.chain(*parts)


def _readable(records: Records, damaged: DamagedCount) -> Iterator[Any]:
    """Yield the records that can be read, and count the others."""
    for index in range(len(records)):
        try:
            record = read_any_record(records, index)
        except DamagedRecord as error:
            damaged.add(index, str(error))
            continue
        yield record


def make_token_store(
    store: pathlib.Path, corpus: Corpus, vocabulary: WordPiece | int, watch: Watch
) -> Counts:
    """Write a corpus as tokens. After an error nothing is left of the store.

    Args:
      store: Folder of the new store.
      corpus: Text that is written.
      vocabulary: Vocabulary, or the number of pieces to learn from the corpus.
      watch: Function that reports progress.

    Returns:
      Numbers of documents, sentences and tokens that were written.

    Raises:
      UserError: If there is no text, or if the vocabulary is too small for its alphabet.
      EnvironmentProblem: If the disk cannot be written to.
    """
    with alone_in(store.parent, f".{store.name}.partial-*"):
        if isinstance(vocabulary, int):
            vocabulary = learn_vocabulary(
                watch(corpus.documents(), "learning the vocabulary", corpus.total), vocabulary
            )
        documents = watch(corpus.documents(), "writing tokens", corpus.total)
        return build_store(store, documents, vocabulary, corpus.made_from)
