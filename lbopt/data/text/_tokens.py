"""Token stores: text as three arrays of numbers, in memory or mapped from disk.

A store on disk is a folder with `tokens.bin`, `sentences.bin` and `documents.bin` (little-endian,
without header), the vocabulary in `vocab.txt`, and `store.json` with the lengths of the arrays and
the normalization of the text. Three billion tokens take 6 GB. Examples are read at random places,
so the first ones of a run wait for the disk until the operating system has cached the files.

That is format 1, of WordPiece. Format 2 is of byte-level tokens, for language models: it has
`tokenizer.json` instead of `vocab.txt`, and in `store.json` the number of documents of each split.
The documents of a split lie together. The first token of `tokens.bin` is the end of a document, and
so is the last one of every document.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
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
from lbopt.data.text._byte_pairs import BytePairs, bytes_of, pieces_of
from lbopt.data.text._vocabulary import (
    TOKENIZER,
    UNCASED,
    VOCABULARY_FILE,
    Normalization,
    TextNormalization,
    read_vocabulary,
    save_vocabulary,
)
from lbopt.data.text._wordpiece import Document
from lbopt.errors import EnvironmentProblem, UserError, require

WORDPIECE_FORMAT = 1
BYTES_FORMAT = 2
FORMATS = (WORDPIECE_FORMAT, BYTES_FORMAT)
"""Versions of the format on disk. Stores of other versions are not read."""
SPLITS = ("train", "validation", "test")
"""Splits of a store of format 2, in the order of their documents."""

_NAMES = ("tokens", "sentences", "documents")
_STORE = "store.json"
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
      tokenizer_json: The tokenizer of a store of byte-level tokens; "" for WordPiece.
      token_bytes: [vocabulary] int32, number of bytes of each byte-level token; None for WordPiece.
      split_sizes: Numbers of documents for training, validation and test; () where the store does
        not say.
    """

    tokens: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray
    chosen: np.ndarray | None = None
    pieces: tuple[str, ...] = ()
    made_from: str = ""
    normalization: TextNormalization = UNCASED
    tokenizer_json: str = ""
    token_bytes: np.ndarray | None = None
    split_sizes: tuple[int, ...] = ()

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

    def split_texts(self) -> list[np.ndarray]:
        """Return the tokens of each split without copying them.

        The first token is the end of the document before, which is context and no text of the
        split. Every document is followed by its end.
        """
        edges = np.cumsum([0, *self.split_sizes])
        return [
            self.tokens[self.documents[first] - 1 : self.documents[last]]
            for first, last in itertools.pairwise(edges)
        ]

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
      byte_pairs: Tokenizer of a store of byte-level tokens, with these `pieces`. The documents are
        then those for training, for validation and for the test, in this order, and the last token
        of each is the end of a document. None for WordPiece.

    Attributes:
      about: Further entries of `store.json`. A store of byte-level tokens has `splits`: split ->
        number of its documents.

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
        byte_pairs: BytePairs | None = None,
    ):
        self.folder = paths.local(folder, "folder")
        self.made_from = made_from
        self.about: dict[str, Any] = {}
        self._pieces = tuple(pieces)
        self._normalization = normalization
        self._byte_pairs = byte_pairs
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
            if self._byte_pairs is not None:
                self._write("tokens", np.asarray([self._byte_pairs.end], self._dtype))
                self.num_tokens = 1
            self._write("documents", np.asarray([self.num_tokens], _INT64))
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
            self._save_vocabulary()
            with (self._partial / _STORE).open("wb") as file:
                file.write(json.dumps(self._description(), indent=2).encode() + b"\n")
                _sync_and_close(file)
            self._require_free()  # another process may have made the folder meanwhile
            self._partial.rename(self.folder)

    def _save_vocabulary(self) -> None:
        if self._byte_pairs is None:
            save_vocabulary(self._pieces, self._partial / VOCABULARY_FILE)
            return
        (self._partial / TOKENIZER).write_text(self._byte_pairs.tokenizer_json, "utf-8")

    def _description(self) -> dict[str, Any]:
        found = self._sizes()
        if self._byte_pairs is not None:
            found["tokenizer_sha256"] = _sha256(self._partial / TOKENIZER)
            return {"format": BYTES_FORMAT, **found, **self.about}
        return {
            "format": WORDPIECE_FORMAT,
            **found,
            "vocab_sha256": _sha256(self._partial / VOCABULARY_FILE),
            "normalization": self._normalization._asdict(),
        }

    def _sizes(self) -> dict[str, Any]:
        return {
            "made_from": self.made_from,
            "documents": self.num_documents,
            "sentences": self.num_sentences,
            "tokens": self.num_tokens,
            "token_dtype": self._dtype.str,
            "vocab_size": len(self._pieces),
        }

    def _write(self, name: str, array: np.ndarray) -> None:
        self._files[name].write(array.tobytes())

    def _require_free(self) -> None:
        is_empty = self.folder.is_dir() and not any(self.folder.iterdir())
        fix = "it exists and is not empty; delete it or name another folder"
        free = is_empty or not self.folder.exists()
        require(free, "folder", str(self.folder), fix, code="exists")


def open_store(
    folder: paths.GivenPath,
    expected_vocab_size: int | None = None,
    purpose: Literal["text_mlm", "text_lm"] = "text_mlm",
) -> TokenStore:
    """Return the store of a folder, mapped from disk.

    Args:
      folder: Folder that `StoreWriter` wrote, or gs://BUCKET/FOLDER with a copy of it.
      expected_vocab_size: Size of the model's vocabulary; None for any.
      purpose: Kind of store that the error tells the user to make if there is none.

    Raises:
      UserError: If the store has another vocabulary size.
      EnvironmentProblem: If there is no store, or if it is damaged or of another format.
    """
    folder = paths.readable(folder, "folder")
    found = _read_description(folder, purpose)
    size = found["vocab_size"]
    fix = f"the store in {folder} was made with {size}; use that, or another store"
    same = expected_vocab_size in (None, size)
    require(same, "expected_vocab_size", expected_vocab_size, fix, code="mismatch")

    by_bytes = found["format"] == BYTES_FORMAT
    vocabulary = folder / (TOKENIZER if by_bytes else VOCABULARY_FILE)
    with _on_disk(folder, "read"):
        if _sha256(vocabulary) != found["tokenizer_sha256" if by_bytes else "vocab_sha256"]:
            raise _damaged(vocabulary, "it is not the vocabulary of the store")
        tokens = _map(folder / "tokens.bin", np.dtype(found["token_dtype"]), found["tokens"])
        sentences = _map(folder / "sentences.bin", _INT64, found["sentences"])
        documents = _map(folder / "documents.bin", _INT64, found["documents"] + 1)
    ascending = np.all(documents[1:] > documents[:-1])
    if documents[0] != by_bytes or documents[-1] != found["tokens"] or not ascending:
        raise _damaged(folder / "documents.bin", "it is damaged")
    sizes = tuple(found["splits"][name] for name in SPLITS) if by_bytes else ()
    if by_bytes and sum(sizes) != found["documents"]:
        raise _damaged(folder / _STORE, "its splits are not those of its documents")

    tokenizer_json = read_regular(vocabulary).decode() if by_bytes else ""
    pieces = tuple(pieces_of(tokenizer_json) if by_bytes else read_vocabulary(vocabulary))
    if len(pieces) != size:
        raise _damaged(folder / _STORE, f"its vocab_size is {size}, not {len(pieces)}")
    return TokenStore(
        tokens,
        sentences,
        documents,
        pieces=pieces,
        made_from=found["made_from"],
        # Stores of earlier versions do not have it: their text was lowercased.
        normalization=TextNormalization(**found.get("normalization", {})),
        tokenizer_json=tokenizer_json,
        token_bytes=bytes_of(pieces) if by_bytes else None,
        split_sizes=sizes,
    )


def read_about(folder: paths.GivenPath) -> dict[str, Any]:
    """Return the description of a store: the content of its `store.json`.

    Args:
      folder: Folder that `StoreWriter` wrote.

    Raises:
      EnvironmentProblem: If there is no store, or if it is damaged or of another format.
    """
    return _read_description(paths.local(folder, "folder"))


def _damaged(file: Path, reason: str) -> EnvironmentProblem:
    fix = f"{reason}; copy the whole folder again"
    return EnvironmentProblem(str(file), reason=fix, code="damaged")


class _Versioned(TypedDict):
    format: int


class _Sizes(_Versioned):
    made_from: str
    documents: _typed_json.Count
    sentences: _typed_json.Count
    tokens: _typed_json.Count
    token_dtype: Literal["<u2", "<i4"]
    vocab_size: _typed_json.Count


class _OfWordPiece(_Sizes):
    vocab_sha256: str
    normalization: NotRequired[Normalization]


class _SplitSizes(TypedDict):
    train: _typed_json.Count
    validation: _typed_json.Count
    test: _typed_json.Count


class _OfBytes(_Sizes):
    tokenizer_sha256: str
    splits: _SplitSizes


_DESCRIPTIONS: dict[int, Any] = {WORDPIECE_FORMAT: _OfWordPiece, BYTES_FORMAT: _OfBytes}


def _read_description(folder: Path, purpose: str = "text_mlm") -> dict[str, Any]:
    path = folder / _STORE
    if not path.is_file():
        raise EnvironmentProblem("builder", folder.name, _advice(folder, purpose), code="missing")
    try:
        found = _typed_json.read_file(path, _Versioned)
        if found["format"] in FORMATS:
            _typed_json.convert(found, _DESCRIPTIONS[found["format"]])
    except (OSError, ValueError) as error:
        raise _damaged(path, f"it cannot be read ({error})") from error
    if found["format"] not in FORMATS:
        fix = f"this lbopt reads formats up to {FORMATS[-1]}; make the store again"
        raise EnvironmentProblem(f"{path}: format", found["format"], fix, code="mismatch")
    return found


def _advice(folder: Path, purpose: str) -> str:
    """Return the fault of a folder without a store.json, and the fix."""
    if folder.is_dir() and any(folder.iterdir()):  # lbopt does not overwrite files
        return f"{folder} has no store.json; copy the whole folder again, or use another name"
    flags = f"text --name={folder.name} --folder=DIR"
    others = "or with --tfds=NAME"
    if purpose == "text_lm":
        flags += " --for=text_lm"
        others = "or with --preset=NAME"
    command = prepare_command(flags, _explicit_data_dir(folder))
    return f"there is no store in {folder}; run {command} ({others})"


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
