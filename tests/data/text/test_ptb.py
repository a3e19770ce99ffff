"""The three files of the Penn Treebank become word indices."""

import numpy as np
import pytest
from refusal import names_in, refused, troubled

from lbopt.data.text import load_ptb

TEXTS = {
    "ptb.train.txt": " the cat <unk> the mat \n a cat sat \n",
    "ptb.valid.txt": " the dog sat \n",
    "ptb.test.txt": " a mat \n the \n",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def words(found, part):
    return " ".join(found.words[token] for token in getattr(found, part))


def test_words_are_numbered_by_frequency_and_alphabet(folder):
    found = load_ptb(folder, expected_vocab_size=7)
    assert found.words == ("<eos>", "cat", "the", "<unk>", "a", "mat", "sat")
    assert words(found, "train") == "the cat <unk> the mat <eos> a cat sat <eos>"
    assert words(found, "validation") == "the <unk> sat <eos>"
    assert words(found, "test") == "a mat <eos> the <eos>"
    assert {part.dtype for part in found[1:]} == {np.dtype(np.int32)}


def test_a_last_line_without_an_end_has_one_all_the_same(folder):
    (folder / "ptb.test.txt").write_text("the cat")
    assert words(load_ptb(folder), "test") == "the cat <eos>"


def test_another_vocabulary_than_the_model_has(folder):
    with refused("expected_vocab_size", 10000, "mismatch"):
        load_ptb(folder, expected_vocab_size=10000)


def test_an_unknown_word_without_a_token_for_it(folder):
    (folder / "ptb.train.txt").write_text("the cat sat\n")
    with refused("word", "dog", "mismatch"):
        load_ptb(folder)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe"])
def test_a_file_that_is_missing_or_empty_or_no_text(folder, name, content):
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    missing = content is None
    field, code = ("ptb", "missing") if missing else (str(folder / name), "damaged")
    with troubled(field, code=code) as caught:
        load_ptb(folder)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("data_dir", "command"),
    [(None, "lbopt prepare ptb "), ("/data", "lbopt prepare ptb --data_dir=/data ")],
)
def test_missing_files_are_named_with_the_command(data_dir, command, folder):
    (folder / "ptb.test.txt").unlink()
    with troubled("ptb", code="missing") as caught:
        load_ptb(folder, data_dir=data_dir)
    assert {"ptb.test.txt", str(folder)} <= names_in(caught)
    assert command in str(caught.value)
