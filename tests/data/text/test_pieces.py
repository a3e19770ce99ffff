"""Learned vocabularies compared with small cases, a slow algorithm and another process."""

import collections
import itertools
import subprocess
import sys

import pytest
from refusal import refused

from lbopt.data.text import load_pydoc_topics
from lbopt.data.text._pieces import CLS, MASK, PAD, SEP, SPECIAL_TOKENS, UNK, learn_pieces

WORDS = {"low": 5, "lower": 2, "newest": 6, "widest": 3, "new": 1, "wwww": 2, "x": 1}


def slowly(words, size):
    """Count all pairs again before each merge."""
    spelt = {word: (word[0], *("##" + letter for letter in word[1:])) for word in words}
    pieces = [*SPECIAL_TOKENS, *sorted({symbol for word in spelt.values() for symbol in word})]

    while len(pieces) < size:
        pairs = collections.Counter()
        for word, symbols in spelt.items():
            for pair in itertools.pairwise(symbols):
                pairs[pair] += words[word]
        if not pairs or max(pairs.values()) < 2:
            break

        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merged = best[0] + best[1].removeprefix("##")
        for word, symbols in spelt.items():
            joined = []
            place = 0
            while place < len(symbols):
                if symbols[place : place + 2] == best:
                    joined.append(merged)
                    place += 2
                else:
                    joined.append(symbols[place])
                    place += 1
            spelt[word] = tuple(joined)

        if merged not in pieces:
            pieces.append(merged)

    return pieces


@pytest.mark.parametrize("size", range(22, 45))
def test_the_pieces_are_those_of_the_definition(size):
    assert learn_pieces(WORDS, size) == slowly(WORDS, size)


def test_special_tokens_come_first():
    assert learn_pieces(WORDS, 30)[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert (PAD, UNK, CLS, SEP, MASK) == (0, 1, 2, 3, 4)


def test_the_order_of_the_words_does_not_matter():
    assert learn_pieces(dict(reversed(WORDS.items())), 35) == learn_pieces(WORDS, 35)


def test_pairs_that_occur_once_are_not_merged():
    assert learn_pieces({"ab": 1, "cd": 1}, 100)[5:] == ["##b", "##d", "a", "c"]


def test_no_room_for_the_alphabet():
    with refused("vocab_size", 8, "value"):
        learn_pieces({"abcd": 2}, 8)


PROGRAM = """
from lbopt.data.text import load_pydoc_topics
print(repr(load_pydoc_topics(600).pieces.pieces))
"""


@pytest.mark.process
def test_every_process_learns_the_same_pieces():
    """The library's own trainer differs: every process seeds its hash maps anew."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "1"}
    )
    assert done.stdout.strip() == repr(load_pydoc_topics(600).pieces.pieces)
