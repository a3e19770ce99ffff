"""`lbopt prepare`."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from lbopt import errors, paths
from lbopt._shown import show
from lbopt.cli import _flags, _prepare_running
from lbopt.data import ptb_folder, store_folder
from lbopt.data.own import NO_SPLIT
from lbopt.data.prepare import (
    GENERATED_IMAGES,
    MNIST1D,
    PYDOC_SQUAD,
    Corpus,
    GeneratedDataset,
    Prepared,
    make_token_store,
    prepare_image_folder,
    prepare_named,
    prepare_source,
)
from lbopt.data.text import WordPiece, load_ptb, load_wordpiece, missing_ptb_files, open_store
from lbopt.errors import EnvironmentProblem, UserError, require
from lbopt.train import Progress, say

_DATA_DIR = {"data_dir": "folder of data sets (default: $TFDS_DATA_DIR or ~/tensorflow_datasets)"}
_MANUAL_DIR = {
    "manual_dir": "folder of the files that you downloaded (default: DATA_DIR/downloads/manual)"
}
_FROM = {
    "from": "folder of the four IDX files (*-ubyte.gz) of mnist or fashion_mnist, which are then "
    "not downloaded"
}
_FOLDER_FLAGS = {
    "images": "folder of class folders of images, or of train, validation and test with these",
    "name": "name of the data set (default: that of the folder)",
}
_TEXT_FLAGS = {
    "name": "name of the store, for config.data.builder",
    "tfds": "a prepared data set of articles, for instance wikipedia/20230601.en",
    "folder": "folder of *.txt in UTF-8 (or gs://BUCKET/FOLDER); a file is a document, with blank "
    "lines between paragraphs",
    "vocab": "a vocab.txt in BERT's form, or a tokenizer.json (or gs://BUCKET/FILE)",
    "lowercase": "true or false, with --vocab: lowercase the text (default: as its "
    "tokenizer_config.json says)",
    "vocab_size": "number of tokens to learn without --vocab (30522; for text_lm 4096)",
    "max_damaged_records": "maximum number of unreadable articles that are left out (0)",
    **_prepare_running.FLAGS,
}
_SAME_NAME = ("data_dir", "folder", "lowercase", "max_damaged_records", "name")
FLAGS_OF = {
    "DATASET": _DATA_DIR | _MANUAL_DIR | _FROM,
    "folder": _FOLDER_FLAGS | _DATA_DIR,
    "text": _TEXT_FLAGS | _DATA_DIR,
}
"""Flags by the word after the command; DATASET is any other data set."""
_TEXT_PARAMETERS = {
    **{name: f"--{name}" for name in _SAME_NAME},
    "builder": "--tfds",
    "vocab_size": "--vocab_size",
    "vocabulary": "--vocab",
    "preset": "--preset",
}
"""Parameters of the functions that make a token store -> flags that fill them."""
_BERT_VOCAB_SIZE = 30522
"""Size of bert-base-uncased's vocabulary.

Devlin et al., arXiv 1810.04805v2, section 3: "a 30,000 token vocabulary".
"""

LISTED = {
    "imagenet2012": "1000 classes of photographs; you download two archives",
    "cifar10": "10 classes of 32 x 32 photographs",
    "mnist": "handwritten digits",
    "fashion_mnist": "10 classes of grey 28 x 28 photographs of clothes; --from=FOLDER takes the "
    "files of Debian's package dataset-fashion-mnist",
    "squad": "SQuAD v1.1: questions about paragraphs of Wikipedia",
    "wikipedia/20230601.en": "the articles of Wikipedia, for lbopt prepare text; apache-beam takes "
    "long on one machine",
    "generated_images": "136 striped JPEGs in the format of imagenet2012; no download",
    "mnist1d": "MNIST-1D: 5000 signals of 40 numbers, of 10 classes; no download",
    "pydoc_squad": "460 questions about Python's help in the format of squad; no download",
    "folder": "your own images in class folders, as fast files (lbopt prepare folder --help)",
    "text": "a token store for BERT or a language model (lbopt prepare text --help)",
    "ptb": "the Penn Treebank: checks the three files that you download",
}
_SOURCES = {source.name: source for source in (GENERATED_IMAGES, MNIST1D, PYDOC_SQUAD)}
_REPORT_EVERY_S = 10.0
T = TypeVar("T")


def run(argv: Sequence[str]) -> None:
    """Make a data set that training can read, or say what the user has to download."""
    if not argv:
        fix = "it is missing; write lbopt prepare DATASET (lbopt prepare --help lists some)"
        raise UserError("DATASET", reason=fix, code="missing")
    if argv[0] in ("-h", "--help"):
        show(*_usage().split("\n"))
        return

    name = argv[0]
    rest = argv[1:]
    if name.startswith("-"):
        fix = "write the name of the data set first: lbopt prepare DATASET [--flag=VALUE ...]"
        raise UserError("DATASET", name, fix)

    if name == "text":
        with errors.under("", **_TEXT_PARAMETERS):
            _text(rest)
        return

    if name == "folder":
        with errors.under("", **{one: f"--{one}" for one in ("data_dir", *_FOLDER_FLAGS)}):
            _folder(rest)
        return

    of_flags = {"data_dir": "--data_dir", "manual_dir": "--manual_dir", "idx_dir": "--from"}
    with errors.under("", name="DATASET", **of_flags):
        if name == "ptb":
            _ptb(rest)
        elif name in _SOURCES:
            _source(_SOURCES[name], rest)
        else:
            _named(name, rest)


def _usage() -> str:
    width = max(map(len, LISTED)) + 2
    return "\n".join(
        [
            "usage: lbopt prepare DATASET [--data_dir=...] [--manual_dir=...] [--from=...]\n",
            *(f"  {name:<{width}}{what}" for name, what in LISTED.items()),
            f"  {'NAME':<{width}}any other of TensorFlow Datasets: name, name/config or "
            "name/config:1.0.0\n",
            *(f"  --{name:<12}{what}" for name, what in FLAGS_OF["DATASET"].items()),
        ]
    )


def _named(name: str, argv: Sequence[str]) -> None:
    given, _ = _flags.parse(f"prepare {name}", argv, FLAGS_OF["DATASET"])
    data_dir = given.get("data_dir")
    _show(prepare_named(name, data_dir, given.get("manual_dir"), say, given.get("from")))


def _source(source: GeneratedDataset, argv: Sequence[str]) -> None:
    given, _ = _flags.parse(f"prepare {source.name}", argv, _DATA_DIR)
    _show(prepare_source(source, given.get("data_dir")))


def _folder(argv: Sequence[str]) -> None:
    given, _ = _flags.parse("prepare folder", argv, FLAGS_OF["folder"], required=("images",))
    images = paths.local(given["images"], "images")
    prepared = prepare_image_folder(images, given.get("name"), given.get("data_dir"), _images)
    _show_folder(prepared)
    show(f"config.data.path = {str(prepared.folder.folder)!r}")
    for split, size in sorted(prepared.folder.num_examples.items()):
        drawn = " (validation and test are drawn from them)" if split == NO_SPLIT else ""
        show(f"{split}: {size} images{drawn}")


def _show(prepared: Prepared) -> None:
    sizes = ", ".join(
        f"{split} {size}" for split, size in sorted(prepared.folder.num_examples.items())
    )
    _show_folder(prepared)
    show(f"config.data.builder = {prepared.name!r}; records: {sizes}")


def _show_folder(prepared: Prepared) -> None:
    show(f"{prepared.folder.folder}{'' if prepared.made else ' is there already'}")


def _text(argv: Sequence[str]) -> None:
    given, _ = _flags.parse("prepare text", argv, FLAGS_OF["text"], required=("name",))
    if _prepare_running.is_wanted(given):
        _prepare_running.make(given)
        return

    data_dir = given.get("data_dir")
    lowercase = _lowercase(given)
    store = store_folder(given["name"], data_dir)
    exists = store.is_dir() and any(store.iterdir())
    left_out = 0 if exists else _write_store(store, given, lowercase)

    # A flag cannot change the text of a store that exists, which may have been made without it.
    with errors.under("", builder="--name"):
        opened = open_store(store)
    fix = "a store of this name exists, and is of text_lm; use another --name, or --for=text_lm"
    require(not opened.tokenizer_json, "--name", given["name"], fix, code="exists")
    fix = (
        f"{store} exists, and its text is {opened.normalization}; leave the flag out, or use "
        "another --name"
    )
    agrees = lowercase in (None, opened.normalization.do_lower_case)
    require(agrees, "--lowercase", given.get("lowercase"), fix, code="mismatch")

    show(f"{store}{' is there already' if exists else ''}")
    if left_out:
        show(f"{left_out} damaged articles were left out")
    show(
        f"config.data.builder = {given['name']!r}, config.data.vocab_size = {len(opened.pieces)}; "
        f"made from {opened.made_from}: {len(opened)} documents, {len(opened.tokens)} tokens, "
        f"{opened.normalization}"
    )


def _write_store(store: pathlib.Path, given: Mapping[str, str], lowercase: bool | None) -> int:
    """Write a corpus; return the number of damaged articles, which were left out."""
    vocabulary = _vocabulary(given.get("vocab"), given.get("vocab_size"), lowercase)
    allowed = _flags.whole("max_damaged_records", given.get("max_damaged_records", "0"), 0)
    corpus = Corpus(given.get("tfds"), given.get("folder"), given.get("data_dir"), allowed)
    make_token_store(store, corpus, vocabulary, _watched)
    return len(corpus.damaged)


def _lowercase(given: Mapping[str, str]) -> bool | None:
    text = given.get("lowercase")
    if text is None:
        return None
    require(text in ("true", "false"), "--lowercase", text, "give true or false")
    fix = (
        "it is for --vocab, and a vocabulary is learned from lowercased text; leave it out, or "
        "give --vocab"
    )
    require("vocab" in given, "--lowercase", text, fix, code="unused")
    return text == "true"


def _vocabulary(file: str | None, size: str | None, lowercase: bool | None) -> WordPiece | int:
    if file is not None:
        fix = "--vocab has its own size; leave one of them out"
        require(size is None, "--vocab_size", size, fix, code="conflict")
        return load_wordpiece(file, lowercase, say)
    if size is None:
        return _BERT_VOCAB_SIZE
    return _flags.whole("vocab_size", size)


def _images(examples: Iterator[T], total: int) -> Iterator[T]:
    return _watched(examples, "writing images", total, "image")


def _watched(documents: Iterator[T], what: str, total: int, unit: str = "document") -> Iterator[T]:
    """Yield the documents, and report progress.

    Args:
      documents: The documents.
      what: Purpose of the pass, for the first line.
      total: Approximate number of documents.
      unit: Name of one of them.
    """
    with Progress(total, unit=unit) as progress:
        progress.say(what)
        last_report = time.monotonic()
        for document in documents:
            progress.advance()
            if time.monotonic() - last_report > _REPORT_EVERY_S:
                progress.report({})
                last_report = time.monotonic()
            yield document


def _ptb(argv: Sequence[str]) -> None:
    given, _ = _flags.parse("prepare ptb", argv, _DATA_DIR)
    folder = ptb_folder(given.get("data_dir"))
    missing = missing_ptb_files(folder)
    if missing:
        fix = (
            f"put {', '.join(missing)} into {folder}; they are Mikolov's preprocessing of the Penn "
            "Treebank, which the Linguistic Data Consortium licenses (LDC99T42), in data/ of his "
            "simple-examples.tgz (RNNLM toolkit)"
        )
        raise EnvironmentProblem("ptb", reason=fix, code="missing")
    found = load_ptb(folder)
    show(str(folder))
    show(
        f"config.data.name = 'ptb', config.data.vocab_size = {len(found.words)}; tokens: train "
        f"{len(found.train)}, validation {len(found.validation)}, test {len(found.test)}"
    )
