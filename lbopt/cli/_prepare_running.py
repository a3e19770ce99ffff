"""`lbopt prepare text` for language models: stores of byte-level tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lbopt import errors
from lbopt._shown import show
from lbopt.cli import _flags
from lbopt.data import store_folder
from lbopt.data.prepare import (
    PRESETS,
    CleanedCorpus,
    folder_corpus,
    folder_origin,
    make_running_store,
    preset_corpora,
    shipped_corpus,
)
from lbopt.data.text import SPLITS, check_vocab_size, read_about
from lbopt.errors import require
from lbopt.train import say

_VOCAB_SIZE = 4096
_TAKEN = ("data_dir", "folder", "for", "from", "name", "preset", "vocab_size")
FLAGS = {
    "preset": f"English that packages ship, for text_lm: {', '.join(PRESETS)}",
    "from": "with --preset, folder of packages that scripts/data made, or npm's node_modules",
    "for": "text_mlm (tokens of BERT) or text_lm (bytes, for language models; what --preset makes)",
}


def is_wanted(given: Mapping[str, str]) -> bool:
    """Return whether flags ask for a store of byte-level tokens."""
    kind = given.get("for", "text_lm" if "preset" in given else "text_mlm")
    errors.require_choice("--for", kind, ("text_mlm", "text_lm"))
    fix = "only with --preset, whose packages it has; leave it out, or give --preset"
    allowed = "from" not in given or "preset" in given
    require(allowed, "--from", given.get("from"), fix, code="unused")
    fix = "a preset is for text_lm; leave --for out"
    require(kind == "text_lm" or "preset" not in given, "--for", kind, fix, code="conflict")
    return kind == "text_lm"


def make(given: Mapping[str, str]) -> None:
    """Make the store that flags ask for, unless it exists, and show it."""
    for name in sorted(given.keys() - set(_TAKEN)):
        fix = "it is of text_mlm, and text for text_lm has bytes as tokens; leave it out"
        raise errors.UserError(f"--{name}", given[name], fix, code="unused")
    size = _flags.whole("vocab_size", given.get("vocab_size", str(_VOCAB_SIZE)))
    check_vocab_size(size)
    origins = _origins(given)
    store = store_folder(given["name"], given.get("data_dir"))
    exists = store.is_dir() and any(store.iterdir())
    documents = "--preset" if "preset" in given else "--folder"
    if not exists:
        with errors.under("", documents=documents, packages="--from"):
            make_running_store(store, _read(given), size, say)
    with errors.under("", builder="--name"):
        about = read_about(store)
    _check_same(given, about, origins, size)
    show(f"{store}{' is there already' if exists else ''}")
    _show(given["name"], about)


def _origins(given: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the name of each corpus, with its folder if it is the user's own."""
    if "preset" in given:
        fix = "leave it out: a store is of a preset or of a folder"
        require("folder" not in given, "--folder", given.get("folder"), fix, code="conflict")
        return [(corpus.name, "") for corpus in preset_corpora(given["preset"])]
    fix = "give --preset with --from, or a --folder of *.txt"
    require("folder" in given, "--preset", None, fix, code="missing")
    origin = folder_origin(given["folder"])
    return [(origin.name, origin.folder)]


def _read(given: Mapping[str, str]) -> list[CleanedCorpus]:
    if "preset" not in given:
        return [folder_corpus(given["folder"])]
    fix = f"name the folder that scripts/data {given['preset']} --to=FOLDER fills"
    require("from" in given, "--from", None, fix, code="missing")
    found = []
    for corpus in preset_corpora(given["preset"]):
        say(f"reading {corpus.name}: {corpus.title}; licence: {corpus.licence}")
        found.append(shipped_corpus(corpus, given["from"]))
    return found


def _check_same(
    given: Mapping[str, str], about: Mapping[str, Any], origins: list[tuple[str, str]], size: int
) -> None:
    """Raise `UserError` if a store that exists is another one than the flags ask for."""
    fix = "a store of this name exists, and is of text_mlm; use another --name, or remove it"
    require("corpora" in about, "--name", given["name"], fix, code="exists")
    made = [(corpus["name"], corpus.get("folder", "")) for corpus in about["corpora"]]
    texts = ", ".join(folder or name for name, folder in made)
    fix = f"a store of this name exists, and has the texts of {texts}; use another, or remove it"
    require(origins == made, "--name", given["name"], fix, code="exists")
    had = about["vocab_size_limit"]
    fix = f"a store of this name exists, and was made with {had}; leave it out, or use another name"
    same = "vocab_size" not in given or size == had
    require(same, "--vocab_size", size, fix, code="mismatch")


def _show(name: str, about: Mapping[str, Any]) -> None:
    totals = {split: {"documents": 0, "bytes": 0, "tokens": 0} for split in SPLITS}
    for corpus in about["corpora"]:
        show(f"{corpus['name']} ({corpus['package']}; licence: {corpus['licence']})")
        show(f"    {_sizes(corpus)}")
        for split, total in totals.items():
            for unit in total:
                total[unit] += corpus[split][unit]
    show(f"all: {_sizes(totals)}")
    gone = about["near_duplicates"]
    show(
        f"near-duplicates removed: {gone['sentences']} sentences, {gone['bytes']} bytes, "
        f"{gone['documents']} whole documents"
    )
    train = totals["train"]
    show(
        f"config.data.name = 'text_lm', config.data.builder = {name!r}, config.data.vocab_size = "
        f"{about['vocab_size']}; {train['bytes'] / train['tokens']:.3f} bytes a token"
    )


def _sizes(corpus: Mapping[str, Mapping[str, int]]) -> str:
    return "; ".join(
        f"{split} {corpus[split]['documents']} documents, {corpus[split]['bytes']} bytes, "
        f"{corpus[split]['tokens']} tokens"
        for split in SPLITS
    )
