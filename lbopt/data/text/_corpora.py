"""Large corpora: sentences, a vocabulary and a token store from articles and books.

Memory is bounded, whatever the size of the corpus.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lbopt import paths
from lbopt._regular import open_regular
from lbopt.data.text._tokens import StoreWriter
from lbopt.data.text._wordpiece import WordPiece, learn_wordpiece, split_paragraphs, split_prose
from lbopt.errors import NO_VALUE, EnvironmentProblem, require

MAX_ALPHABET = 1000
"""Maximum number of different characters in a learned vocabulary.

The rare characters of an encyclopedia would take thousands of pieces.
"""

_BATCH_CHARACTERS = 2_000_000
"""Characters that are encoded together: enough to keep all cores busy, in some 100 MB of memory."""
_LAST_SECTIONS = frozenset(
    (
        "see also",
        "references",
        "notes and references",
        "references and notes",
        "further reading",
        "external links",
    )
)
_BLANK_LINE = re.compile(r"\n\s*\n")
_NEW_LINE = re.compile(r"\s*\n\s*(?![a-z])")


class Counts(NamedTuple):
    """Size of a token store, or of its part that is written."""

    documents: int
    sentences: int
    tokens: int


def wikipedia_documents(records: Iterable[Mapping[str, str | bytes]]) -> Iterator[list[str]]:
    """Yield the sentences of each article; articles without a sentence are skipped.

    An article has a blank line before every section, whose first line is its heading. Paragraphs
    and items of lists are lines, and a line that begins with a small letter continues the one
    before. Categories are left out, and the sections from "See also", "References", "Further
    reading" or "External links" to the end of the article.

    Args:
      records: Articles with `title` and `text`, as in the data set `wikipedia` of TensorFlow
        Datasets.

    Raises:
      UserError: At the end, if no article had a sentence.
      EnvironmentProblem: If an article is not UTF-8.
    """
    found = False
    for record in records:
        sentences = _sentences(_NEW_LINE.sub("\n\n", _article(_decoded(record["text"], record))))
        if sentences:
            found = True
            yield sentences
    fix = "none of them has a sentence; give articles with text"
    require(found, "records", NO_VALUE, fix, code="missing")


def _decoded(text: str | bytes, record: Mapping[str, str | bytes]) -> str:
    try:
        return text if isinstance(text, str) else text.decode()
    except UnicodeDecodeError as error:
        fix = f"this article is not UTF-8 ({error}); download the data again"
        raise EnvironmentProblem("title", record["title"], fix, code="damaged") from error


def _article(text: str) -> str:
    """Return an article without its last sections and its categories."""
    blocks = []
    for block in _BLANK_LINE.split(text):
        lines = [line for line in block.split("\n") if not line.lstrip().startswith("Category:")]
        if lines and lines[0].strip(" \t=").casefold() in _LAST_SECTIONS:
            break
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def folder_documents(folder: paths.GivenPath) -> Iterator[list[str]]:
    """Return an iterator over the texts of a folder, each as a list of sentences.

    Texts without a sentence are skipped.

    Args:
      folder: Folder, or gs://BUCKET/FOLDER, whose `*.txt` files, also in folders below it, are the
        documents, in the order of their names. They are UTF-8, with blank lines between paragraphs.

    Raises:
      UserError: If there is no such file, or, at the end, if none had a sentence.
      EnvironmentProblem: If a file cannot be read or is not UTF-8.
    """
    return _documents(text_files(folder)[1], str(folder))


def text_files(folder: paths.GivenPath) -> tuple[Path, list[Path]]:
    """Return a folder on this machine, and its `*.txt` files in the order of their names.

    Args:
      folder: Folder, or gs://BUCKET/FOLDER; folders below it count too.

    Raises:
      UserError: If there is no such file.
    """
    root = paths.readable(folder, "folder")
    files = sorted(root.rglob("*.txt"), key=lambda path: path.relative_to(root).as_posix())
    fix = "there is no *.txt in it; name a folder of plain text"
    require(files, "folder", str(folder), fix, code="missing")
    return root, files


def _documents(files: Sequence[Path], folder: str) -> Iterator[list[str]]:
    found = False
    for file in files:
        try:
            with open_regular(file, "r", encoding="utf-8") as stream:
                text = stream.read()
        except (OSError, UnicodeDecodeError) as error:
            fix = f"it cannot be read as UTF-8 text ({error}); convert or remove it"
            raise EnvironmentProblem(str(file), reason=fix, code="damaged") from error
        sentences = _sentences(text)
        if sentences:
            found = True
            yield sentences
    fix = "no *.txt in it has a sentence; name a folder of plain text"
    require(found, "folder", folder, fix, code="missing")


def _sentences(text: str) -> list[str]:
    return [sentence for paragraph in split_paragraphs(text) for sentence in split_prose(paragraph)]


def learn_vocabulary(
    documents: Iterable[Sequence[str]], vocab_size: int, max_sentences: int = 200_000
) -> WordPiece:
    """Learn a vocabulary from a sample of a corpus.

    Args:
      documents: Sentences of each document, read once.
      vocab_size: Maximum number of pieces, special tokens included.
      max_sentences: Maximum number of sentences of the sample, >= 2. The sample is evenly spaced
        over the corpus, and is at least half that large if the corpus is.

    Raises:
      UserError: If the alphabet alone, at most `MAX_ALPHABET` characters, needs more pieces.
      EnvironmentProblem: If the `tokenizers` package is not installed.
    """
    require(max_sentences >= 2, "max_sentences", max_sentences, "use at least 2")
    sentences = _evenly(itertools.chain.from_iterable(documents), max_sentences)
    return learn_wordpiece(sentences, vocab_size, MAX_ALPHABET)


def _evenly(items: Iterable[str], most: int) -> list[str]:
    """Return every k-th item, k being the smallest power of two that leaves at most `most`."""
    kept: list[str] = []
    every = 1
    for number, item in enumerate(items):
        if number % every:
            continue
        kept.append(item)
        if len(kept) > most:
            kept = kept[::2]
            every *= 2
    return kept


def build_store(
    folder: paths.GivenPath,
    documents: Iterable[Sequence[str]],
    pieces: WordPiece,
    made_from: str,
    progress: Callable[[Counts], None] | None = None,
) -> Counts:
    """Write documents as a token store, see `StoreWriter`. Memory does not grow with the corpus.

    Args:
      folder: Folder of the new store.
      documents: Sentences of each document, read once.
      pieces: Vocabulary that turns sentences into tokens.
      made_from: Description of the text, for people.
      progress: Function that is called with the size written so far, every few million characters;
        None for no reports.

    Returns:
      The size of the store.

    Raises:
      UserError: If `folder` is not empty, or if there is no text.
      EnvironmentProblem: If the disk cannot be written to.
    """
    with StoreWriter(folder, pieces.pieces, made_from, pieces.normalization) as writer:
        for batch in _batches(documents):
            for document in pieces.encode_many(batch):
                writer.append(document)
            if progress is not None:
                progress(Counts(writer.num_documents, writer.num_sentences, writer.num_tokens))
    return Counts(writer.num_documents, writer.num_sentences, writer.num_tokens)


def _batches(documents: Iterable[Sequence[str]]) -> Iterator[list[Sequence[str]]]:
    """Yield lists of documents that have at least `_BATCH_CHARACTERS`, except for the last one."""
    batch: list[Sequence[str]] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += sum(map(len, document))
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch
