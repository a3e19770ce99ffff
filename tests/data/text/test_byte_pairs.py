"""Byte-level byte-pair encoding loses nothing, and Transformers reads it in the same way."""

import subprocess
import sys

import numpy as np
import pytest
from refusal import refused
from transformers import PreTrainedTokenizerFast

from lbopt.data.text import BytePairs, learn_byte_pairs, split_pydoc_topics

TEXTS = [" ".join(topic) for topic in split_pydoc_topics()[0][:30]]
STRANGE = [
    "<|endoftext|> is text",
    "  two\n\n\tblanks \r\n",
    "café cafe\u0301 \u65e5\u672c \U0001f389 \x00\x7f\u200b",
    "",
    " ",
    "'s 12345 !!!???",
    *split_pydoc_topics()[2][0],
]


@pytest.fixture(scope="module")
def pairs():
    return learn_byte_pairs(TEXTS, 400)


def test_every_text_comes_back_and_has_the_bytes_of_its_tokens(pairs):
    for text, tokens in zip(STRANGE, pairs.encode_many(STRANGE), strict=True):
        assert pairs.decode(tokens) == text
        assert pairs.num_bytes[tokens].sum() == len(text.encode())
        assert pairs.end not in tokens


def test_a_vocabulary_has_all_bytes_and_the_end(pairs):
    assert len(pairs.pieces) == len(set(pairs.pieces)) == 400
    assert (pairs.num_bytes == 1).sum() == 256
    assert (pairs.num_bytes == 0).nonzero()[0].tolist() == [pairs.end]
    assert learn_byte_pairs([], 300).pieces == learn_byte_pairs(TEXTS, 257).pieces


def test_transformers_reads_it(pairs, tmp_path):
    (tmp_path / "tokenizer.json").write_text(pairs.tokenizer_json)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text, tokens in zip(STRANGE[1:], pairs.encode_many(STRANGE[1:]), strict=True):
        assert theirs(text)["input_ids"] == tokens.tolist()


def test_the_vocabulary_may_not_be_smaller_than_the_bytes():
    with refused("vocab_size", 256, "value"):
        learn_byte_pairs(TEXTS, 256)


@pytest.mark.process
def test_another_process_learns_the_same(pairs):
    program = (
        "import sys; from lbopt.data.text import *;"
        "texts = [' '.join(topic) for topic in split_pydoc_topics()[0][:30]];"
        "sys.stdout.write(learn_byte_pairs(texts, 400).tokenizer_json)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert found.stdout.decode() == pairs.tokenizer_json
    again = BytePairs(found.stdout.decode())
    np.testing.assert_array_equal(again.num_bytes, pairs.num_bytes)
