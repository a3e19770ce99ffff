"""Token stores: text as three arrays of numbers, in memory or mapped from disk.

A store on disk is a folder with `tokens.bin`, `sentences.bin` and `documents.bin` (little-endian,
without header), the vocabulary in `vocab.txt`, and `store.json` with the lengths of the arrays and
the normalization of the text. Three billion tokens take 6 GB. Examples are read at random places,
so the first ones of a run wait for the disk until the operating system has cached the files.
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
from lbopt.data._records import data_dir_or_bucket, prepare_command
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
"""Version of the format on disk. Stores of other versions are not read."""

_NAMES = ("tokens", "sentences", "documents")
_INT64 = np.dtype("<i8")
_BUFFER_BYTES = 1 << 20  # most documents are far smaller than a good size of a write


@dataclasses.dataclass(frozen=True)
class TokenStore:
    """Tokens of all documents in one array. It can be used like a list of `Document`.

    Attributes:
      tokens: [tokens] uint16 or int32.
      sentences: [sentences] int64, index of the first token of each sentence, ascending.
      documents: [documents + 1] int64, index of the first token of each document, and the end of
        the last one.
      chosen: [chosen] int64, ascending numbers of the documents in this view; None for all.
      pieces: Vocabulary in the order of the ids; empty if it is not known.
      made_from: Description of the text, for people.
      normalization: Changes of the text before it was split into tokens.
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
        """Return a document with a copy of its tokens as int32."""
        if not 0 <= number < len(self):
            raise IndexError(f"document {number}: there are {len(self)}")
        place = number if self.chosen is None else self.chosen[number]
        start, stop = self.documents[place : place + 2]
        first, last = np.searchsorted(self.sentences, [start, stop])
        tokens = self.tokens[start:stop].astype(np.int32)
        return Document(tokens, self.sentences[first:last] - start)

    @property
    def starts(self) -> np.ndarray:
        """Index of the first token of each document, [documents] int64."""
        return self.documents[:-1] if self.chosen is None else self.documents[self.chosen]

    @property
    def stops(self) -> np.ndarray:
        """End of each document, [documents] int64."""
        return self.documents[1:] if self.chosen is None else self.documents[self.chosen + 1]

    def select(self, numbers: np.ndarray) -> TokenStore:
        """Return a view of some documents without copying tokens.

        Args:
          numbers: [chosen] int, ascending numbers of documents in this store.
        """
        chosen = np.asarray(numbers, np.int64)
        if self.chosen is not None:
            chosen = self.chosen[chosen]
        return dataclasses.replace(self, chosen=chosen)


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smaller of uint16 and int32 that can hold every id."""
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

    Counted from 1, every `validation_every`-th document is for validation, and the document before
    every `test_every`-th is for the test unless it is for validation. The split is always the same.

    Args:
      store: Documents.
      validation_every: Documents for each one in the validation set.
      test_every: Documents for each one in the test set.

    Raises:
      UserError: If a set has fewer than two documents.
    """
    place = np.arange(1, len(store) + 1)
    for_validation = place % validation_every == 0
    for_test = ((place + 1) % test_every == 0) & ~for_validation
    train = np.flatnonzero(~for_validation & ~for_test)
    validation = np.flatnonzero(for_validation)
    test = np.flatnonzero(for_test)

    fix = (
        f"with {{test_every}} = {test_every}, {len(store)} documents make {len(train)} to train, "
        f"{len(validation)} to validate and {len(test)} to test; each set needs at least 2"
    )
    fits = min(len(train), len(validation), len(test)) >= 2
    also = ["test_every"]
    require(fits, "validation_every", validation_every, fix, also=also)
    return store.select(train), store.select(validation), store.select(test)


class StoreWriter:
    """Writer of a store, document by document, in little memory. Use it in a `with` statement.

    `folder` appears complete at the end of the `with` block. Until then the files are in a folder
    beside it, `.NAME.partial-*`, which is removed after an error. A killed writer leaves it behind;
    it can be deleted.

    Args:
      folder: Folder of the store, missing or empty. Folders above it are made.
      pieces: Vocabulary in the order of the ids.
      made_from: Description of the text, for people.
      normalization: Changes of the text before it was split into tokens.

    Raises:
      UserError: If `folder` is not empty or, at the end, if there was no text.
      EnvironmentProblem: If the disk cannot be written to.
    """

    def __init__(
        self,
        folder: paths.GivenPath,
        pieces: Sequence[str],
        made_from: str,
        normalization: TextNormalization = UNCASED,
    ):
        self.folder = paths.local(folder, "folder")
        self.made_from = made_from
        self._pieces = tuple(pieces)
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
                name: (self._partial / f"{name}.bin").open("wb", _BUFFER_BYTES) for name in _NAMES
            }
            self._write("documents", np.zeros(1, _INT64))
        return self

    def append(self, document: Document) -> None:
        """Add a document. A document without a token is left out.

        Raises:
          UserError: If an id is not in the vocabulary.
        """
        tokens = document.tokens
        if not len(tokens):
            return
        if tokens.min() < 0 or tokens.max() >= len(self._pieces):
            low = tokens.min()
            high = tokens.max()
            fix = (
                "these are the smallest and the largest; give ids from 0 to "
                f"{len(self._pieces) - 1}, those of the vocabulary"
            )
            raise UserError("document.tokens", (int(low), int(high)), fix)

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
        fix = f"nothing was written, as there is no text in {self.made_from}; give one with text"
        require(self.num_documents, "documents", 0, fix, code="missing")
        with _on_disk(self.folder):
            for file in self._files.values():
                _sync_and_close(file)
            save_vocabulary(self._pieces, self._partial / "vocab.txt")
            with (self._partial / "store.json").open("wb") as file:
                file.write(json.dumps(self._description(), indent=2).encode() + b"\n")
                _sync_and_close(file)
            self._require_free()  # another process may have made the folder meanwhile
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
        is_empty = self.folder.is_dir() and not any(self.folder.iterdir())
        fix = "it exists and is not empty; delete it or name another folder"
        free = is_empty or not self.folder.exists()
        require(free, "folder", str(self.folder), fix, code="exists")


def open_store(folder: paths.GivenPath, expected_vocab_size: int | None = None) -> TokenStore:
    """Return the store of a folder, mapped from disk.

    Args:
      folder: Folder that `StoreWriter` wrote, or gs://BUCKET/FOLDER with a copy of it.
      expected_vocab_size: Size of the model's vocabulary; None for any.

    Raises:
      UserError: If the store has another vocabulary size.
      EnvironmentProblem: If there is no store, or if it is damaged or of another format.
    """
    folder = paths.readable(folder, "folder")
    found = _read_description(folder)
    size = found["vocab_size"]
    fix = f"the store in {folder} was made with {size}; use that, or another store"
    same = expected_vocab_size in (None, size)
    require(same, "expected_vocab_size", expected_vocab_size, fix, code="mismatch")

    with _on_disk(folder, "read"):
        if _sha256(folder / "vocab.txt") != found["vocab_sha256"]:
            raise _damaged(folder / "vocab.txt", "it is not the vocabulary of the store")
        tokens = _map(folder / "tokens.bin", np.dtype(found["token_dtype"]), found["tokens"])
        sentences = _map(folder / "sentences.bin", _INT64, found["sentences"])
        documents = _map(folder / "documents.bin", _INT64, found["documents"] + 1)
    ascending = np.all(documents[1:] > documents[:-1])
    if documents[0] != 0 or documents[-1] != found["tokens"] or not ascending:
        raise _damaged(folder / "documents.bin", "it is damaged")

    return TokenStore(
        tokens,
        sentences,
        documents,
        pieces=tuple(read_vocabulary(folder / "vocab.txt")),
        made_from=found["made_from"],
        # Stores of earlier versions do not have it: their text was lowercased.
        normalization=TextNormalization(**found.get("normalization", {})),
    )


def _damaged(file: Path, reason: str) -> EnvironmentProblem:
    fix = f"{reason}; copy the whole folder again"
    return EnvironmentProblem(str(file), reason=fix, code="damaged")


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
        raise EnvironmentProblem("builder", folder.name, _advice(folder), code="missing")
    try:
        found = _typed_json.read_file(path, _Versioned)
        if found["format"] == FORMAT:
            _typed_json.convert(found, _Description)
    except (OSError, ValueError) as error:
        raise _damaged(path, f"it cannot be read ({error})") from error
    if found["format"] != FORMAT:
        fix = f"this lbopt reads format {FORMAT}; make the store again"
        raise EnvironmentProblem(f"{path}: format", found["format"], fix, code="mismatch")
    return found


def _advice(folder: Path) -> str:
    """Return the fault of a folder without a store.json, and the fix."""
    if folder.is_dir() and any(folder.iterdir()):  # lbopt does not overwrite files
        return f"{folder} has no store.json; copy the whole folder again, or use another name"
    command = prepare_command(f"text --name={folder.name} --folder=DIR", _explicit_data_dir(folder))
    return f"there is no store in {folder}; run {command} (or with --tfds=NAME)"


def _explicit_data_dir(folder: Path) -> str | None:
    """Return the folder of data sets that has a store; None for the default one or for none."""
    root = folder.parent.parent
    in_data_dir = folder.parent == _places.store_folder("any", str(root)).parent
    return str(root) if in_data_dir and str(root) != data_dir_or_bucket()[0] else None


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    expected = count * dtype.itemsize
    actual = path.stat().st_size
    if actual != expected:
        raise _damaged(path, f"it has {actual} bytes, and store.json says {expected}")
    if not count:
        return np.zeros(0, dtype)  # an empty file cannot be mapped
    return np.asarray(np.memmap(path, dtype, "r"))


def _sha256(path: Path) -> str:
    return hashlib.sha256(read_regular(path)).hexdigest()


def _sync_and_close(file: IO[bytes]) -> None:
    """Write a file to disk, so it is whole if the power fails after the folder was renamed."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


@contextlib.contextmanager
def _on_disk(folder: Path, verb: str = "written") -> Iterator[None]:
    """Turn errors of the operating system into `EnvironmentProblem`."""
    try:
        yield
    except OSError as error:
        fix = f"the store cannot be {verb} ({error}); repair the disk, or use another folder"
        raise EnvironmentProblem(str(folder), reason=fix, code="resource") from error
