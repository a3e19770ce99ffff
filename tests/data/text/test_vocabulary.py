"""Vocabulary files, and the file or field that decides whether text is lowercased."""

import json
import os
import re

import pytest
from refusal import ANY, names_in, refused, troubled

from lbopt.data.text import (
    StoreWriter,
    TextNormalization,
    Vocabulary,
    find_vocabulary,
    load_wordpiece,
    read_vocabulary,
)
from lbopt.data.text._pieces import SPECIAL_TOKENS
from lbopt.data.text._vocabulary import UNCASED, decide_normalization, save_vocabulary
from lbopt.data.text._wordpiece import Document

CASED = TextNormalization(do_lower_case=False)
PIECES = {
    "cased": ("The", "##e", "the", "H"),
    "uncased": ("the", "##e", "\u00e9", "\u6587", "\u211d", "[unusedX]", "<S>"),
}


def write(folder, pieces, **files):
    """Write a vocabulary and JSON files beside it; return its path."""
    save_vocabulary([*SPECIAL_TOKENS, *PIECES[pieces]], folder / "vocab.txt")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(
            content if isinstance(content, str) else json.dumps(content)
        )
    return folder / "vocab.txt"


def tokenizer(lowercase=True, pieces="cased", **parts):
    vocabulary = {piece: number for number, piece in enumerate([*SPECIAL_TOKENS, *PIECES[pieces]])}
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "strip_accents": None,
        "lowercase": lowercase,
    }
    plain = {"model": {"type": "WordPiece", "vocab": vocabulary}, "normalizer": normalizer}
    return {**plain, "pre_tokenizer": {"type": "BertPreTokenizer"}, **parts}


RUN = {"kind": "train", "versions": {"lbopt": "0"}}
STORE = {"format": 1, "tokens": 3}


def test_a_saved_vocabulary_is_the_same(tmp_path):
    pieces = [*SPECIAL_TOKENS, "a", "##\u00e9", "\u2028", "x ", "\u4e2d"]
    save_vocabulary(pieces, tmp_path / "vocab.txt")
    assert load_wordpiece(tmp_path / "vocab.txt").pieces == tuple(pieces)
    (tmp_path / "vocab.txt").write_bytes("\r\n".join(pieces).encode())
    assert load_wordpiece(tmp_path / "vocab.txt").pieces == tuple(pieces)


WHOLE = "\n".join(SPECIAL_TOKENS)


@pytest.mark.parametrize(
    ("content", "code", "quoted"),
    [
        (None, "missing", ""),
        (b"", "damaged", ""),
        (b"\xff\n", "damaged", "UTF-8"),
        (f"{WHOLE}\na\na\n".encode(), "damaged", "['a']"),
        (f"{WHOLE}\n\na\n".encode(), "damaged", ""),
        (WHOLE.replace("[MASK]", "b").replace("[CLS]", "c").encode(), "missing", "[CLS] [MASK]"),
    ],
)
def test_files_that_are_no_vocabulary_are_refused(tmp_path, content, code, quoted):
    if content is not None:
        (tmp_path / "vocab.txt").write_bytes(content)
    with refused("vocabulary", str(tmp_path / "vocab.txt"), code) as caught:
        load_wordpiece(tmp_path / "vocab.txt")
    assert quoted in str(caught.value)


def test_a_vocabulary_that_cannot_be_written(tmp_path):
    with troubled("vocabulary", str(tmp_path / "nowhere/vocab.txt"), "resource"):
        save_vocabulary(["a"], tmp_path / "nowhere/vocab.txt")


DECIDED = {
    "nothing, no capitals": ("uncased", {}, None, UNCASED, ""),
    "a config without do_lower_case": (
        "uncased",
        {"tokenizer_config": {"strip_accents": False}},
        None,
        TextNormalization(strip_accents=False),
        "",
    ),
    "a config": ("cased", {"tokenizer_config": {"do_lower_case": False}}, None, CASED, ""),
    "a config of all": (
        "cased",
        {
            "tokenizer_config": {
                "do_lower_case": False,
                "strip_accents": True,
                "tokenize_chinese_chars": False,
            }
        },
        None,
        TextNormalization(False, True, False),
        "",
    ),
    "a tokenizer": ("cased", {"tokenizer": tokenizer(False)}, None, CASED, ""),
    "a config above a tokenizer": (
        "cased",
        {"tokenizer": tokenizer(True), "tokenizer_config": {"do_lower_case": False}},
        None,
        CASED,
        "",
    ),
    "a tokenizer and a silent config": (
        "cased",
        {"tokenizer": tokenizer(False), "tokenizer_config": {"tokenize_chinese_chars": False}},
        None,
        TextNormalization(False, None, False),
        "",
    ),
    "the flag alone": ("cased", {}, False, CASED, ""),
    "the flag and a config": (
        "cased",
        {"tokenizer_config": {"do_lower_case": False}},
        False,
        CASED,
        "",
    ),
    "the flag against a config": (
        "uncased",
        {"tokenizer_config": {"do_lower_case": False}},
        True,
        UNCASED,
        "lowercase = true .*/tokenizer_config.json, .* do_lower_case = false",
    ),
    "the flag, other accents": (
        "cased",
        {"tokenizer_config": {"do_lower_case": True, "strip_accents": False}},
        False,
        TextNormalization(False, False),
        "lowercase = false .*/tokenizer_config.json, .* do_lower_case = true",
    ),
    "capitals without use, by flag": (
        "cased",
        {},
        True,
        UNCASED,
        r"2 of 9 pieces of .* have capitals \(The, H\)",
    ),
    "capitals without use": (
        "cased",
        {"tokenizer_config": {"do_lower_case": True}},
        None,
        UNCASED,
        "have capitals",
    ),
    "no piece for capitals": ("uncased", {}, False, CASED, "words with capitals become .UNK."),
    "a run of an earlier version": ("cased", {"config": RUN}, None, UNCASED, "have capitals"),
    "a store of an earlier version": ("cased", {"store": STORE}, None, UNCASED, "have capitals"),
    "a store": ("cased", {"store": {**STORE, "normalization": CASED._asdict()}}, None, CASED, ""),
    "a network of Transformers": ("uncased", {"config": {"model_type": "bert"}}, None, UNCASED, ""),
}


@pytest.mark.parametrize("case", DECIDED)
def test_who_decides_and_what_is_said(tmp_path, case):
    pieces, files, lowercase, expected, said = DECIDED[case]
    path = write(tmp_path, pieces, **files)
    lines = []
    found = decide_normalization(path, read_vocabulary(path), lowercase, say=lines.append)
    assert found == expected
    assert len(lines) == bool(said)
    assert re.search(said, "".join(lines))


def test_a_library_warns_in_one_visible_line(tmp_path):
    save_vocabulary([*SPECIAL_TOKENS, "A\x1b[2J"], tmp_path / "vocab.txt")
    with pytest.warns(UserWarning, match=re.escape(str(tmp_path / "vocab.txt"))) as met:
        load_wordpiece(tmp_path / "vocab.txt", lowercase=True)
    assert met[0].filename == __file__
    assert str(met[0].message).isprintable()


MODEL = tokenizer()["model"]
SETTINGS = "{}/tokenizer_config.json"
TOKENIZER = "{}/tokenizer.json"
REFUSED = {
    "no statement": ({}, "lowercase", None, "missing"),
    "a config without do_lower_case": (
        {"tokenizer_config": {"strip_accents": True}},
        "lowercase",
        None,
        "missing",
    ),
    "a network of Transformers": ({"config": {"model_type": "bert"}}, "lowercase", None, "missing"),
    "a config of another type": ({"tokenizer_config": []}, SETTINGS, ANY, "damaged"),
    "a field of another type": (
        {"tokenizer_config": {"do_lower_case": "no"}},
        SETTINGS,
        ANY,
        "damaged",
    ),
    "null": ({"tokenizer_config": {"do_lower_case": None}}, SETTINGS, ANY, "damaged"),
    "no JSON": ({"tokenizer_config": "{"}, SETTINGS, ANY, "damaged"),
    "Japanese words": (
        {"tokenizer_config": {"word_tokenizer_type": "mecab"}},
        f"{SETTINGS}: word_tokenizer_type",
        "mecab",
        "mismatch",
    ),
    "no words": (
        {"tokenizer_config": {"do_basic_tokenize": False}},
        f"{SETTINGS}: do_basic_tokenize",
        False,
        "mismatch",
    ),
    "a damaged store": ({"store": {"normalization": 3}}, "{}/store.json", ANY, "damaged"),
    "another normalizer": (
        {"tokenizer": tokenizer(normalizer={"type": "NFC"})},
        f"{TOKENIZER}: normalizer",
        "NFC",
        "mismatch",
    ),
    "no normalizer": (
        {"tokenizer": tokenizer(normalizer=None)},
        f"{TOKENIZER}: normalizer",
        None,
        "mismatch",
    ),
    "text that is not cleaned": (
        {"tokenizer": tokenizer(normalizer={"type": "BertNormalizer", "clean_text": False})},
        f"{TOKENIZER}: normalizer.clean_text",
        False,
        "mismatch",
    ),
    "another way to split": (
        {"tokenizer": tokenizer(pre_tokenizer={"type": "Whitespace"})},
        f"{TOKENIZER}: pre_tokenizer",
        "Whitespace",
        "mismatch",
    ),
    "another model": (
        {"tokenizer": tokenizer(model={"type": "BPE", "vocab": {}})},
        f"{TOKENIZER}: model.type",
        "BPE",
        "mismatch",
    ),
    "another prefix": (
        {"tokenizer": tokenizer(model={**MODEL, "continuing_subword_prefix": "@@"})},
        f"{TOKENIZER}: model.continuing_subword_prefix",
        "@@",
        "mismatch",
    ),
}
"""Name -> (files, field of the error with "{}" for the folder, its value, its code)."""


@pytest.mark.parametrize("case", REFUSED)
def test_unknown_or_unsupported_normalization_is_refused(tmp_path, case):
    files, field, value, code = REFUSED[case]
    path = write(tmp_path, "cased", **files)
    with refused(field.format(tmp_path), value, code) as caught:
        load_wordpiece(path)
    assert field != "lowercase" or "give lowercase=false" in str(caught.value)


def with_vocab(vocab):
    return tokenizer(model={**MODEL, "vocab": vocab})


@pytest.mark.parametrize(
    ("content", "field", "code", "quoted"),
    [
        (None, "vocabulary", "missing", ""),
        (with_vocab({}), "vocabulary", "damaged", ""),
        (with_vocab({"a": 0, "b": 2}), "vocabulary", "damaged", "2 pieces"),
        (with_vocab({"a": 0, "b": 0}), "vocabulary", "damaged", "2 pieces"),
        (with_vocab({"a\n": 0, "": 1}), "vocabulary", "damaged", repr("a\n")),
        (with_vocab({"\ud800": 0}), "vocabulary", "damaged", repr("\ud800")),
        (with_vocab([["a", 0.5]]), TOKENIZER, "damaged", "model.vocab"),
        (
            tokenizer(added_tokens=[{"id": 9, "content": "covid-19"}]),
            f"{TOKENIZER}: added_tokens",
            "mismatch",
            "covid-19",
        ),
    ],
)
def test_files_that_are_no_tokenizer_are_refused(tmp_path, content, field, code, quoted):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with refused(field.format(tmp_path), code=code) as caught:
        read_vocabulary(tmp_path / "tokenizer.json")
    assert quoted in str(caught.value)


def test_a_tokenizer_file_is_a_vocabulary(tmp_path):
    added = [{"id": 0, "content": "[PAD]"}, {"id": 9, "content": "[NEW]"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer(False, added_tokens=added)))
    assert find_vocabulary(tmp_path) == tmp_path / "tokenizer.json"
    found = load_wordpiece(tmp_path / "tokenizer.json")
    assert found.vocabulary == Vocabulary((*SPECIAL_TOKENS, *PIECES["cased"], "[NEW]"), CASED)
    save_vocabulary(["a"], tmp_path / "vocab.txt")
    assert find_vocabulary(tmp_path) == tmp_path / "vocab.txt"


def test_files_that_are_not_regular_are_not_waited_for(tmp_path):
    path = write(tmp_path, "uncased")
    os.mkfifo(tmp_path / "tokenizer_config.json")
    with refused(str(tmp_path / "tokenizer_config.json"), code="damaged") as caught:
        load_wordpiece(path)
    assert "FIFO" in names_in(caught)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings",
    [UNCASED, CASED, TextNormalization(True, False), TextNormalization(False, True, False)],
)
def test_what_is_kept_is_read_again_here_and_by_transformers(tmp_path, settings):
    pieces = (*SPECIAL_TOKENS, *PIECES["cased"], *PIECES["uncased"][2:])
    for name, content in Vocabulary(pieces, settings).files().items():
        (tmp_path / name).write_text(content)
    assert load_wordpiece(tmp_path / "vocab.txt").vocabulary == Vocabulary(pieces, settings)
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path)
    text = "The H\u00e9 \u6587\u6587 the"
    expected = theirs(text, add_special_tokens=False)["input_ids"]
    assert load_wordpiece(tmp_path / "vocab.txt").encode([text]).tokens.tolist() == expected


def test_a_store_beside_its_vocabulary_says_it(tmp_path):
    pieces = [*SPECIAL_TOKENS, *PIECES["cased"]]
    with StoreWriter(tmp_path / "store", pieces, "a test", CASED) as writer:
        writer.append(Document(*load_wordpiece(write(tmp_path, "cased"), False).encode(["The H"])))
    assert load_wordpiece(tmp_path / "store" / "vocab.txt").normalization == CASED
