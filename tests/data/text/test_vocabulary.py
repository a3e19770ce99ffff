"""Files of vocabularies, and which file or field says whether text is lowercased."""

import json
import os
import re

import pytest

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
from lbopt.errors import EnvironmentProblem, UserError

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
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"", "it is empty"),
        (b"\xff\n", "cannot be read as UTF-8"),
        (f"{WHOLE}\na\na\n".encode(), r"\['a'\] occur more than once"),
        (f"{WHOLE}\n\na\n".encode(), "a line is empty"),
        (
            WHOLE.replace("[MASK]", "b").replace("[CLS]", "c").encode(),
            r"it has no \[CLS\] \[MASK\]",
        ),
    ],
)
def test_files_that_are_no_vocabulary_are_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(UserError, match=rf"vocabulary = '.*vocab.txt': .*{message}"):
        load_wordpiece(tmp_path / "vocab.txt")


def test_a_vocabulary_that_cannot_be_written(tmp_path):
    with pytest.raises(EnvironmentProblem, match=r"nowhere/vocab.txt cannot be written"):
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
        "lowercase = true counts, though .*/tokenizer_config.json says do_lower_case = false",
    ),
    "the flag, other accents": (
        "cased",
        {"tokenizer_config": {"do_lower_case": True, "strip_accents": False}},
        False,
        TextNormalization(False, False),
        "lowercase = false counts, though .*/tokenizer_config.json says do_lower_case = true",
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
    "a run of before": ("cased", {"config": RUN}, None, UNCASED, "have capitals"),
    "a store of before": ("cased", {"store": STORE}, None, UNCASED, "have capitals"),
    "a store": ("cased", {"store": {**STORE, "normalization": CASED._asdict()}}, None, CASED, ""),
    "a network of Transformers": ("uncased", {"config": {"model_type": "bert"}}, None, UNCASED, ""),
}


@pytest.mark.parametrize("case", DECIDED)
def test_who_decides_and_what_is_said(tmp_path, case):
    pieces, files, lowercase, expected, said = DECIDED[case]
    path, lines = write(tmp_path, pieces, **files), []
    assert (
        decide_normalization(path, read_vocabulary(path), lowercase, say=lines.append) == expected
    )
    assert len(lines) == bool(said)
    assert re.search(said, "".join(lines))


def test_a_library_warns_in_one_visible_line(tmp_path):
    save_vocabulary([*SPECIAL_TOKENS, "A\x1b[2J"], tmp_path / "vocab.txt")
    with pytest.warns(UserWarning, match="these pieces stay unused") as met:
        load_wordpiece(tmp_path / "vocab.txt", lowercase=True)
    assert met[0].filename == __file__
    assert str(met[0].message).isprintable()


MODEL = tokenizer()["model"]
REFUSED = {
    "nobody": ({}, "lowercase = None: 2 of 9 pieces of .* have capitals .*--lowercase=false"),
    "a silent config": (
        {"tokenizer_config": {"strip_accents": True}},
        "lowercase = None: 2 of 9 pieces",
    ),
    "a network of Transformers": (
        {"config": {"model_type": "bert"}},
        "lowercase = None: 2 of 9 pieces",
    ),
    "a config of another type": (
        {"tokenizer_config": []},
        "tokenizer_config.json: it cannot be read .*object",
    ),
    "a field of another type": (
        {"tokenizer_config": {"do_lower_case": "no"}},
        r"do_lower_case: expected bool, got str",
    ),
    "null": (
        {"tokenizer_config": {"do_lower_case": None}},
        r"do_lower_case: expected bool, got null",
    ),
    "no JSON": ({"tokenizer_config": "{"}, "tokenizer_config.json: it cannot be read"),
    "Japanese words": (
        {"tokenizer_config": {"word_tokenizer_type": "mecab"}},
        "word_tokenizer_type = 'mecab'",
    ),
    "no words": ({"tokenizer_config": {"do_basic_tokenize": False}}, "do_basic_tokenize = False"),
    "a damaged store": (
        {"store": {"normalization": 3}},
        "store.json: it cannot be read .normalization",
    ),
    "another normalizer": (
        {"tokenizer": tokenizer(normalizer={"type": "NFC"})},
        "normalizer = 'NFC'",
    ),
    "no normalizer": ({"tokenizer": tokenizer(normalizer=None)}, "normalizer = None"),
    "text that is not cleaned": (
        {"tokenizer": tokenizer(normalizer={"type": "BertNormalizer", "clean_text": False})},
        "normalizer.clean_text = False",
    ),
    "another cut": (
        {"tokenizer": tokenizer(pre_tokenizer={"type": "Whitespace"})},
        "pre_tokenizer = 'Whitespace'",
    ),
    "another model": (
        {"tokenizer": tokenizer(model={"type": "BPE", "vocab": {}})},
        "model.type = 'BPE'",
    ),
    "another prefix": (
        {"tokenizer": tokenizer(model={**MODEL, "continuing_subword_prefix": "@@"})},
        "model.continuing_subword_prefix = '@@'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_nobody_says_or_nobody_can_do_is_refused(tmp_path, case):
    files, message = REFUSED[case]
    path = write(tmp_path, "cased", **files)
    with pytest.raises(UserError, match=message) as error:
        load_wordpiece(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (tokenizer(model={**MODEL, "vocab": {}}), "it has no pieces"),
        (tokenizer(model={**MODEL, "vocab": {"a": 0, "b": 2}}), "not numbered from 0 on"),
        (tokenizer(model={**MODEL, "vocab": {"a": 0, "b": 0}}), "not numbered from 0 on"),
        (tokenizer(model={**MODEL, "vocab": {"a\n": 0, "": 1}}), "are no lines of text"),
        (tokenizer(model={**MODEL, "vocab": {"\ud800": 0}}), "are no lines of text"),
        (
            tokenizer(model={**MODEL, "vocab": [["a", 0.5]]}),
            "model.vocab: expected object, got list",
        ),
        (
            tokenizer(added_tokens=[{"id": 9, "content": "covid-19"}]),
            r"added_tokens = \['covid-19'\]",
        ),
    ],
)
def test_files_that_are_no_tokenizer_are_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        read_vocabulary(tmp_path / "tokenizer.json")


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
    with pytest.raises(UserError, match="a FIFO, not a regular file"):
        load_wordpiece(path)


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
