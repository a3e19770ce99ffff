"""Text as three arrays of numbers: in memory, or on disk and read by memory map.

A store on disk is a folder: `tokens.bin`, `sentences.bin` and `documents.bin` (little-endian, no header), the vocabulary
in `vocab.txt`, and `store.json`, which says how long they are and whether the text was lowercased. Three billion tokens take 6 GB. Examples are read at random
places: the first of a run wait for the disk, until the operating system has the files in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NotRequired, TypedDict

import numpy as np

from lbopt import _typed_json, paths
from lbopt._regular import read_regular
from lbopt.data import _places
from lbopt.data._records import default_data_dir, prepare_command
from lbopt.data.text._vocabulary import (
    UNCASED,
    Normalization,
    TextNormalization,
    read_vocabulary,
    save_vocabulary,
)
from lbopt.data.text._wordpiece import Document
from lbopt.errors import EnvironmentProblem, UserError, require

FORMAT = 1
"""Of a store on disk; one of another format is not read."""

_NAMES = ("tokens", "sentences", "documents")
_INT64 = np.dtype("<i8")
_WRITE_BYTES = 1 << 20
"""Gathered before they go to disk."""


@dataclasses.dataclass(frozen=True)
class TokenStore:
    """Documents as tokens, one behind the other. It can be indexed and iterated like a list of `Document`.

    Attributes:
      tokens: [tokens] uint16 or int32.
      sentences: [sentences] int64, the token with which each begins, in rising order.
      documents: [documents + 1] int64, the token with which each begins, and the end of the last.
      chosen: [chosen] int64, the documents that this view has, in rising order; None for all.
      pieces: the vocabulary, in the order of ids; empty if it is not known.
      made_from: what the text is, in words.
      normalization: how the text was changed before it was cut.
    """

    tokens: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray
    chosen: np.ndarray | None = None
    pieces: tuple[str, ...] = ()
    made_from: str = ""
    normalization: TextNormalization = UNCASED

    def __len__(self) -> int:
        return len(self.documents) - 1 if self.chosen is None else len(self.chosen)

    def __getitem__(self, number: int) -> Document:
        """Return a document; its tokens are a copy, int32."""
        if not 0 <= number < len(self):
            raise IndexError(f"document {number}: there are {len(self)}")
        place = number if self.chosen is None else self.chosen[number]
        start, stop = self.documents[place], self.documents[place + 1]
        first, last = np.searchsorted(self.sentences, [start, stop])
        return Document(
            self.tokens[start:stop].astype(np.int32), self.sentences[first:last] - start
        )

    @property
    def starts(self) -> np.ndarray:
        """The first token of each document, [documents] int64."""
        return self.documents[:-1] if self.chosen is None else self.documents[self.chosen]

    @property
    def stops(self) -> np.ndarray:
        """The token behind each document, [documents] int64."""
        return self.documents[1:] if self.chosen is None else self.documents[self.chosen + 1]

    def select(self, numbers: np.ndarray) -> TokenStore:
        """Return a view of some documents, by their numbers here in rising order; no token is copied."""
        chosen = np.asarray(numbers, np.int64)
        return dataclasses.replace(
            self, chosen=chosen if self.chosen is None else self.chosen[chosen]
        )


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest of uint16 and int32 that holds every id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<i4")


def gather_documents(documents: Sequence[Document]) -> TokenStore:
    """Return documents as a store in memory."""
    tokens = [document.tokens for document in documents]
    offsets = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
    sentences = [
        start + document.sentences for start, document in zip(offsets, documents, strict=False)
    ]
    largest = max((int(part.max()) for part in tokens if len(part)), default=0)
    return TokenStore(
        np.concatenate([np.zeros(0, np.int32), *tokens]).astype(token_dtype(largest + 1)),
        np.concatenate([np.zeros(0, np.int64), *sentences]),
        offsets,
    )


def split_store(
    store: TokenStore, validation_every: int = 200, test_every: int = 200
) -> tuple[TokenStore, TokenStore, TokenStore]:
    """Return views for training, validation and test that share no document.

    Counted from 1, every `validation_every`-th document is for validation, and of the others the one before every
    `test_every`-th is for the test; the rest is for training. The same store is split in the same way every time.

    Raises:
      UserError: if a part is left without two documents.
    """
    place = np.arange(1, len(store) + 1)
    validation = place % validation_every == 0
    test = ((place + 1) % test_every == 0) & ~validation
    train, validation, test = (
        np.flatnonzero(part) for part in (~validation & ~test, validation, test)
    )
    require(
        min(map(len, (train, validation, test))) >= 2,
        "validation_every, test_every",
        (validation_every, test_every),
        f"of {len(store)} documents that leaves {len(train)} to train, {len(validation)} to validate and {len(test)} to "
        "test; each part takes at least 2",
    )
    return store.select(train), store.select(validation), store.select(test)


class StoreWriter:
    """Write a store document by document, in little memory; use it in a `with` statement.

    Nothing is in `folder` before the end of the `with` block, and everything is then. Until then the files are in a folder
    beside it, `.NAME.partial-*`, which is removed after an error. A killed writer leaves it behind, and it may be deleted.

    Args:
      folder: it must not exist, or be empty; the folder around it is made.
      pieces: the vocabulary, in the order of ids.
      made_from: what the text is, in words.
      normalization: how the text was changed before it was cut.

    Raises:
      UserError: if there is something in `folder` already, or, at the end, if there was no text.
      EnvironmentProblem: if the disk cannot be written to.
    """

    def __init__(
        self,
        folder: paths.GivenPath,
        pieces: Sequence[str],
        made_from: str,
        normalization: TextNormalization = UNCASED,
    ):
        self.folder, self.made_from, self._pieces = (
            paths.local(folder, "store"),
            made_from,
            tuple(pieces),
        )
        self._normalization = normalization
        self._dtype = token_dtype(len(self._pieces))
        self._partial = self.folder.with_name(f".{self.folder.name}.partial-{secrets.token_hex(4)}")
        self._files: dict[str, IO[bytes]] = {}
        self.num_tokens = self.num_sentences = self.num_documents = 0

    def __enter__(self) -> StoreWriter:
        self._require_free()
        with _on_disk(self.folder):
            self._partial.mkdir(parents=True)
            self._files = {
                name: (self._partial / f"{name}.bin").open("wb", _WRITE_BYTES) for name in _NAMES
            }
            self._write("documents", np.zeros(1, _INT64))
        return self

    def append(self, document: Document) -> None:
        """Add a document; one without a token is left out.

        Raises:
          ValueError: if an id is not in the vocabulary.
        """
        tokens = document.tokens
        if not len(tokens):
            return
        if tokens.min() < 0 or tokens.max() >= len(self._pieces):
            raise ValueError(
                f"token {tokens.max()} or {tokens.min()} is not in a vocabulary of {len(self._pieces)}"
            )
        with _on_disk(self.folder):
            self._write("tokens", tokens.astype(self._dtype))
            self._write("sentences", (document.sentences + self.num_tokens).astype(_INT64))
            self._write("documents", np.asarray([self.num_tokens + len(tokens)], _INT64))
        self.num_tokens += len(tokens)
        self.num_sentences += len(document.sentences)
        self.num_documents += 1

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for file in self._files.values():
                with contextlib.suppress(OSError):
                    file.close()
            shutil.rmtree(self._partial, ignore_errors=True)

    def _finish(self) -> None:
        require(
            self.num_documents,
            str(self.folder),
            0,
            f"{self.made_from} has no text; nothing was written",
        )
        with _on_disk(self.folder):
            for file in self._files.values():
                _to_disk(file)
            save_vocabulary(self._pieces, self._partial / "vocab.txt")
            with (self._partial / "store.json").open("wb") as file:
                file.write(json.dumps(self._description(), indent=2).encode() + b"\n")
                _to_disk(file)
            self._require_free()
            self._partial.rename(self.folder)

    def _description(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "made_from": self.made_from,
            "documents": self.num_documents,
            "sentences": self.num_sentences,
            "tokens": self.num_tokens,
            "token_dtype": self._dtype.str,
            "vocab_size": len(self._pieces),
            "vocab_sha256": _sha256(self._partial / "vocab.txt"),
            "normalization": self._normalization._asdict(),
        }

    def _write(self, name: str, array: np.ndarray) -> None:
        self._files[name].write(array.tobytes())

    def _require_free(self) -> None:
        taken = self.folder.exists() and not (
            self.folder.is_dir() and not any(self.folder.iterdir())
        )
        require(
            not taken,
            "store",
            str(self.folder),
            "there is something already; delete it or name another folder",
        )


def open_store(folder: paths.GivenPath, expected_vocab_size: int | None = None) -> TokenStore:
    """Return the store of a folder, by memory map.

    Args:
      folder: what `StoreWriter` wrote.
      expected_vocab_size: of the model; None to take any.

    Raises:
      UserError: if it was made with another vocabulary size.
      EnvironmentProblem: if there is no store, or if it is damaged, or of another format.
    """
    folder = paths.local(folder, "store")
    found = _read_description(folder)
    size = found["vocab_size"]
    if expected_vocab_size is not None and expected_vocab_size != size:
        raise UserError(
            f"config.data.vocab_size = {expected_vocab_size}: the store in {folder} was made with {size}; use that, or "
            "another store"
        )
    with _on_disk(folder, "read"):
        if _sha256(folder / "vocab.txt") != found["vocab_sha256"]:
            raise EnvironmentProblem(
                f"{folder / 'vocab.txt'} is not the one of the store; copy the whole folder again"
            )
        tokens = _map(folder / "tokens.bin", np.dtype(found["token_dtype"]), found["tokens"])
        sentences = _map(folder / "sentences.bin", _INT64, found["sentences"])
        documents = _map(folder / "documents.bin", _INT64, found["documents"] + 1)
    if (
        documents[0] != 0
        or documents[-1] != found["tokens"]
        or np.any(documents[1:] <= documents[:-1])
    ):
        raise EnvironmentProblem(
            f"{folder / 'documents.bin'} is damaged; copy the whole folder again"
        )
    pieces = read_vocabulary(folder / "vocab.txt")
    normalization = TextNormalization(
        **found.get("normalization", {})
    )  # earlier versions lowercased all text
    return TokenStore(
        tokens, sentences, documents, None, tuple(pieces), found["made_from"], normalization
    )


class _Versioned(TypedDict):
    format: int


class _Description(_Versioned):
    made_from: str
    documents: _typed_json.Count
    sentences: _typed_json.Count
    tokens: _typed_json.Count
    token_dtype: Literal["<u2", "<i4"]
    vocab_size: _typed_json.Count
    vocab_sha256: str
    normalization: NotRequired[Normalization]


def _read_description(folder: Path) -> dict[str, Any]:
    path = folder / "store.json"
    if not path.is_file():
        raise EnvironmentProblem(
            f"config.data.builder = {folder.name!r}: {_what_is_missing(folder)}"
        )
    try:
        found = _typed_json.read_file(path, _Versioned)
        if found["format"] == FORMAT:
            _typed_json.convert(found, _Description)
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(
            f"{path} cannot be read ({error}); copy the whole folder again"
        ) from error
    if found["format"] != FORMAT:
        raise EnvironmentProblem(
            f"{path} has format {found['format']}, and this lbopt reads {FORMAT}; make the store again"
        )
    return found


def _what_is_missing(folder: Path) -> str:
    """Return what is wrong with a folder without a store.json, and the fix."""
    if folder.is_dir() and any(folder.iterdir()):  # nothing is written over
        return f"{folder} has files but no store.json; copy the whole folder again, or use another name"
    command = f"text --name={folder.name} --folder=DIR"
    return f"there is no store in {folder}; run {prepare_command(command, _given_data_dir(folder))} (or with --tfds=NAME)"


def _given_data_dir(folder: Path) -> str | None:
    """Return the folder of data sets that a store is in; None for the default one, or if it is in none."""
    root = folder.parent.parent
    in_one = folder.parent == _places.store_folder("any", str(root)).parent
    return str(root) if in_one and root != default_data_dir() else None


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    expected, actual = count * dtype.itemsize, path.stat().st_size
    if actual != expected:
        raise EnvironmentProblem(
            f"{path} has {actual} bytes, and store.json says {expected}; copy the whole folder again"
        )
    if not count:
        return np.zeros(0, dtype)  # an empty file cannot be mapped
    return np.asarray(np.memmap(path, dtype, "r"))


def _sha256(path: Path) -> str:
    return hashlib.sha256(read_regular(path)).hexdigest()


def _to_disk(file: IO[bytes]) -> None:
    """Write what is in buffers and close: a power cut after the renaming finds whole files."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


@contextlib.contextmanager
def _on_disk(folder: Path, verb: str = "written") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(f"the store {folder} cannot be {verb}: {error}") from error
