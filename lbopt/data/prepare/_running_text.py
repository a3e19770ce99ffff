"""Token stores for language models, made from documents in memory."""

from __future__ import annotations

import collections
import hashlib
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lbopt import paths
from lbopt._regular import read_regular
from lbopt.data.prepare._alone import alone_in
from lbopt.data.prepare._clean_text import clean_lines
from lbopt.data.prepare._shipped_text import ShippedCorpus, TextDocument
from lbopt.data.text import (
    SPLITS,
    BytePairs,
    Document,
    StoreWriter,
    check_vocab_size,
    learn_byte_pairs,
    near_duplicates,
    split_prose,
    text_files,
)
from lbopt.errors import EnvironmentProblem, require

HELD_OUT = 20
"""Documents for each one of the validation set, and for each one of the test set."""
_FEWEST_DOCUMENTS = len(SPLITS)

Say = Callable[[str], None]


class Origin(NamedTuple):
    """The origin of a corpus.

    Attributes:
      name: Name of the corpus.
      package: Package and version; for a folder, a description.
      licence: Licence of the text.
      sha256: SHA-256 of the list of its files, see `ShippedCorpus`; "" for a folder.
      folder: Absolute path or address of a folder of the user's; "" for a package.
    """

    name: str
    package: str
    licence: str
    sha256: str = ""
    folder: str = ""


class CleanedCorpus(NamedTuple):
    """The cleaned documents of a corpus, and their origin."""

    origin: Origin
    documents: list[TextDocument]


def shipped_corpus(corpus: ShippedCorpus, packages: paths.GivenPath) -> CleanedCorpus:
    """Read a corpus that a package ships, see `ShippedCorpus.documents`."""
    folder = paths.local(packages, "packages")
    origin = Origin(corpus.name, corpus.package, corpus.licence, corpus.sha256)
    return CleanedCorpus(origin, corpus.documents(folder))


def folder_origin(folder: paths.GivenPath) -> Origin:
    """Return the origin of the texts in a folder, which need not exist.

    Args:
      folder: Folder, or gs://BUCKET/FOLDER.
    """
    place = paths.local_or_bucket(folder, "folder")
    if not paths.is_address(place):
        place = str(paths.local(folder, "folder").resolve())
    name = place.rpartition("/")[2] or place
    return Origin(name, f"texts of {name}", "yours", folder=place)


def folder_corpus(folder: paths.GivenPath) -> CleanedCorpus:
    """Read the `*.txt` files of a folder, each a document whose lines are paragraphs.

    Args:
      folder: Folder, or gs://BUCKET/FOLDER; folders below it count too.

    Raises:
      UserError: If there is no such file, or none has text.
      EnvironmentProblem: If a file cannot be read or is not UTF-8.
    """
    root, files = text_files(folder)
    found = []
    for file in files:
        try:
            lines = clean_lines(read_regular(file).decode())
        except (OSError, UnicodeDecodeError) as error:
            fix = f"it cannot be read as UTF-8 text ({error}); convert or remove it"
            raise EnvironmentProblem(str(file), reason=fix, code="damaged") from error
        if lines:
            found.append(TextDocument(file.relative_to(root).as_posix(), lines))
    fix = "no *.txt in it has text; name a folder of plain text"
    require(found, "folder", str(folder), fix, code="missing")
    return CleanedCorpus(folder_origin(folder), found)


def split_documents(corpus: CleanedCorpus) -> dict[str, list[TextDocument]]:
    """Return the documents of each split.

    In the order of the SHA-256 of their names, the first twentieth is the test set, the second
    twentieth the validation set, each of at least one document. So a corpus is split in the same
    way alone and with others, whatever is removed from it later.

    Raises:
      UserError: If there are fewer than three documents.
    """
    count = len(corpus.documents)
    fix = (
        f"{corpus.origin.package} has {count} documents; three or more can be split for training, "
        "validation and test"
    )
    require(count >= _FEWEST_DOCUMENTS, "documents", corpus.origin.name, fix, code="mismatch")
    ordered = sorted(
        corpus.documents, key=lambda document: hashlib.sha256(document.name.encode()).digest()
    )
    held_out = max(1, round(count / HELD_OUT))
    return {
        "train": ordered[2 * held_out :],
        "validation": ordered[held_out : 2 * held_out],
        "test": ordered[:held_out],
    }


class Removed(NamedTuple):
    """What the search for near-duplicates removed.

    Attributes:
      sentences: Number of sentences.
      bytes: Number of bytes.
      documents: Number of documents that had nothing else.
    """

    sentences: int
    bytes: int
    documents: int


def without_near_duplicates(
    splits: dict[str, list[tuple[str, TextDocument]]],
) -> tuple[dict[str, list[tuple[str, TextDocument]]], Removed]:
    """Remove sentences that are near-duplicates of others, within splits and across them.

    Of two, the one of the test set stays, else that of the validation set, else the first one.

    Args:
      splits: Split -> (corpus, document) of each document.
    """
    order = [(split, one) for split in reversed(SPLITS) for one in splits[split]]
    by_line = [[split_prose(line) for line in document.lines] for _, (_, document) in order]
    sentences = [sentence for lines in by_line for line in lines for sentence in line]
    twice = near_duplicates(sentences)
    flags = iter(twice.tolist())

    kept: dict[str, list[tuple[str, TextDocument]]] = {split: [] for split in SPLITS}
    for (split, (corpus, document)), lines in zip(order, by_line, strict=True):
        fresh = [" ".join(part for part in line if not next(flags)) for line in lines]
        if rest := [line for line in fresh if line]:
            kept[split].append((corpus, document._replace(lines=rest)))

    size = sum(len(part.encode()) + 1 for part, gone in zip(sentences, twice, strict=True) if gone)
    empty = len(order) - sum(map(len, kept.values()))
    return kept, Removed(int(twice.sum()), size, empty)


def make_running_store(
    store: pathlib.Path, corpora: Sequence[CleanedCorpus], vocab_size: int, say: Say
) -> None:
    """Write documents as a store of byte-level tokens. After an error nothing is left of it.

    `store.json` says for each corpus its origin, and documents, bytes and tokens of each split.

    Args:
      store: Folder of the new store.
      corpora: The corpora.
      vocab_size: Maximum number of tokens of the vocabulary, learned from the training set.
      say: Function that takes a line at each stage.

    Raises:
      UserError: If a corpus has too few documents, or the vocabulary too few tokens.
      EnvironmentProblem: If the disk cannot be written to, or a package is missing.
    """
    check_vocab_size(vocab_size)
    splits: dict[str, list[tuple[str, TextDocument]]] = {split: [] for split in SPLITS}
    for corpus in corpora:
        for split, documents in split_documents(corpus).items():
            splits[split] += [(corpus.origin.name, document) for document in documents]

    say("looking for near-duplicates")
    kept, removed = without_near_duplicates(splits)
    for split, left in kept.items():
        fix = f"no document is left for {split} without near-duplicates; give more text"
        names = ", ".join(corpus.origin.name for corpus in corpora)
        require(left, "documents", names, fix, code="mismatch")

    say("learning the vocabulary")
    pairs = learn_byte_pairs((_text(document) for _, document in kept["train"]), vocab_size)
    say("writing tokens")
    made_from = ", ".join(corpus.origin.package for corpus in corpora)
    with (
        alone_in(store.parent, f".{store.name}.partial-*"),
        StoreWriter(store, pairs.pieces, made_from, byte_pairs=pairs) as writer,
    ):
        counts = {split: _write(writer, pairs, documents) for split, documents in kept.items()}
        writer.about = {
            "splits": {split: len(documents) for split, documents in kept.items()},
            "vocab_size_limit": vocab_size,
            "near_duplicates": removed._asdict(),
            "corpora": [
                {
                    **corpus.origin._asdict(),
                    **{split: counts[split][corpus.origin.name] for split in SPLITS},
                }
                for corpus in corpora
            ],
        }


def _text(document: TextDocument) -> str:
    return "\n".join(document.lines) + "\n"


def _write(
    writer: StoreWriter, pairs: BytePairs, documents: Iterable[tuple[str, TextDocument]]
) -> dict[str, dict[str, int]]:
    """Write documents, each followed by its end; return the size of each corpus."""
    found: Any = collections.defaultdict(lambda: {"documents": 0, "bytes": 0, "tokens": 0})
    end = np.asarray([pairs.end], np.int32)
    documents = list(documents)
    encoded = pairs.encode_many([_text(document) for _, document in documents])
    for (corpus, document), tokens in zip(documents, encoded, strict=True):
        writer.append(Document(np.concatenate([tokens, end]), np.zeros(1, np.int64)))
        size = found[corpus]
        size["documents"] += 1
        size["bytes"] += len(_text(document).encode())
        size["tokens"] += len(tokens) + 1
    return found
