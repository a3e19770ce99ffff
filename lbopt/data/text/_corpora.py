"""Large corpora: from articles and books to sentences, a vocabulary and a store of tokens, in bounded memory."""

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
from lbopt.errors import EnvironmentProblem, require

MAX_ALPHABET = 1000
"""Characters of a learned vocabulary: those that occur here and there in an encyclopedia would take thousands of pieces."""

_BATCH_CHARACTERS = 2_000_000
"""Text that is encoded at a time: enough to keep all cores busy, some 100 MB while it lasts."""
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
    """What has been written to a store so far."""

    documents: int
    sentences: int
    tokens: int


def wikipedia_documents(records: Iterable[Mapping[str, str | bytes]]) -> Iterator[list[str]]:
    """Yield the sentences of each article that has any.

    Args:
      records: with a `title` and a `text`, as the data set `wikipedia` of TensorFlow Datasets has them: a blank line before
        every section, whose first line is its heading; paragraphs and items of lists are lines. A line that begins with a
        small letter goes on with the one before. Sections from "See also", "References", "Further reading" or "External
        links" to the end of the article are left out, and categories.

    Raises:
      UserError: at the end, if no article had a sentence.
      EnvironmentProblem: naming the article, if it is not UTF-8.
    """
    found = False
    for record in records:
        sentences = _sentences(_NEW_LINE.sub("\n\n", _article(_decoded(record["text"], record))))
        if sentences:
            found = True
            yield sentences
    require(found, "wikipedia", 0, "no record has a sentence; give articles with text")


def _decoded(text: str | bytes, record: Mapping[str, str | bytes]) -> str:
    try:
        return text if isinstance(text, str) else text.decode()
    except UnicodeDecodeError as error:
        raise EnvironmentProblem(
            f"the article {record['title']!r} is not UTF-8 ({error}); get the data again"
        ) from error


def _article(text: str) -> str:
    """Cut an article off before its last sections, and leave out its categories."""
    blocks = []
    for block in _BLANK_LINE.split(text):
        lines = [line for line in block.split("\n") if not line.lstrip().startswith("Category:")]
        if lines and lines[0].strip(" \t=").casefold() in _LAST_SECTIONS:
            break
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def folder_documents(folder: paths.GivenPath) -> Iterator[list[str]]:
    """Return the sentences of each text of a folder that has any.

    Args:
      folder: every `*.txt` in it and below is a document, in the order of names; UTF-8, blank lines between paragraphs.

    Raises:
      UserError: if there is no such file, or, at the end, if none had a sentence.
      EnvironmentProblem: naming the file, if it cannot be read or is not UTF-8.
    """
    root = paths.local(folder, "folder")
    found = sorted(root.rglob("*.txt"), key=lambda path: path.relative_to(root).as_posix())
    require(found, "folder", str(folder), "there is no *.txt in it; name a folder of plain text")
    return _files(found, str(folder))


def _files(paths: Sequence[Path], folder: str) -> Iterator[list[str]]:
    found = False
    for path in paths:
        try:
            with open_regular(path, "r", encoding="utf-8") as stream:
                text = stream.read()
        except (OSError, UnicodeDecodeError) as error:
            raise EnvironmentProblem(
                f"{path} cannot be read as UTF-8 text ({error}); convert or remove it"
            ) from error
        if sentences := _sentences(text):
            found = True
            yield sentences
    require(found, "folder", folder, "no *.txt in it has a sentence; name a folder of plain text")


def _sentences(text: str) -> list[str]:
    return [sentence for paragraph in split_paragraphs(text) for sentence in split_prose(paragraph)]


def learn_vocabulary(
    documents: Iterable[Sequence[str]], vocab_size: int, max_sentences: int = 200_000
) -> WordPiece:
    """Learn a vocabulary from a sample of a corpus.

    Args:
      documents: sentences of each document; gone through once.
      vocab_size: special tokens included.
      max_sentences: of the sample, which is evenly spaced over the corpus and has at least half as many if the corpus has.

    Raises:
      UserError: if the alphabet alone, at most `MAX_ALPHABET` characters, needs more pieces.
      EnvironmentProblem: if the `tokenizers` package is not installed.
    """
    require(max_sentences >= 2, "max_sentences", max_sentences, "use at least 2")
    sentences = _evenly(itertools.chain.from_iterable(documents), max_sentences)
    return learn_wordpiece(sentences, vocab_size, MAX_ALPHABET)


def _evenly(items: Iterable[str], most: int) -> list[str]:
    """Return every k-th item for the smallest power of two that leaves at most so many."""
    kept: list[str] = []
    every = 1
    for number, item in enumerate(items):
        if number % every:
            continue
        kept.append(item)
        if len(kept) > most:
            kept, every = kept[::2], 2 * every
    return kept


def build_store(
    folder: paths.GivenPath,
    documents: Iterable[Sequence[str]],
    pieces: WordPiece,
    made_from: str,
    progress: Callable[[Counts], None] | None = None,
) -> Counts:
    """Write documents as tokens; see `StoreWriter`. Memory does not grow with the corpus.

    Args:
      folder: of the new store.
      documents: sentences of each document; gone through once.
      pieces: what cuts words into tokens.
      made_from: what the text is, in words.
      progress: called with what has been written, every few million characters.

    Returns:
      What was written.

    Raises:
      UserError: if there is something in `folder`, or no text.
      EnvironmentProblem: if the disk cannot be written to.
    """
    with StoreWriter(folder, pieces.pieces, made_from, pieces.normalization) as writer:
        for batch in _batches(documents):
            for document in pieces.encode_many(batch):
                writer.append(document)
            if progress is not None:
                progress(Counts(writer.num_documents, writer.num_sentences, writer.num_tokens))
    return Counts(writer.num_documents, writer.num_sentences, writer.num_tokens)


def _batches(documents: Iterable[Sequence[str]]) -> Iterator[list[Sequence[str]]]:
    """Gather documents until they have enough characters; a long one may be a batch of its own."""
    batch: list[Sequence[str]] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += sum(map(len, document))
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
