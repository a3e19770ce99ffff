"""Cleaning, sentences, and WordPiece against a transcription of the greedy rule."""

import sys

import numpy as np
import pytest

from lbopt.data.pieces import SPECIAL_TOKENS, UNK
from lbopt.data.text import WordPiece, learn_wordpiece, split_paragraphs, split_sentences
from lbopt.errors import EnvironmentProblem

PIECES = [*SPECIAL_TOKENS, "un", "##aff", "##able", "##a", "##ff", "a", "a ", ".", "b", "é", "e"]


def greedy(word):
    """Cut the longest piece off the left, again and again; one letter that is no piece makes the word unknown."""
    found, rest = [], word
    while rest:
        prefix = "" if not found else "##"
        fitting = [n for n in range(len(rest), 0, -1) if prefix + rest[:n] in PIECES]
        if not fitting:
            return [UNK]
        found.append(PIECES.index(prefix + rest[: fitting[0]]))
        rest = rest[fitting[0] :]
    return found


@pytest.mark.parametrize("word", ["unaffable", "unaff", "aable", "b", "unz", "a"])
def test_words_are_cut_greedily(word):
    assert WordPiece(PIECES).encode([word]).tokens.tolist() == greedy(word)


def test_case_and_accents_are_dropped_and_punctuation_stands_alone():
    pieces = WordPiece(PIECES)
    assert pieces.encode(["UNAFF.b\tÉ"]).tokens.tolist() == [
        PIECES.index(piece) for piece in ("un", "##aff", ".", "b", "e")
    ]


def test_sentences_begin_where_they_say():
    document = WordPiece(PIECES).encode(["unaff b", "", "   ", "a", "b b ."])
    assert document.sentences.tolist() == [0, 3, 4]
    assert document.tokens.dtype == np.int32
    assert len(document.tokens) == 7


def test_no_text_is_no_tokens():
    document = WordPiece(PIECES).encode([])
    assert len(document.tokens) == len(document.sentences) == 0


def test_decoding_joins_the_pieces_of_a_word():
    pieces = WordPiece(PIECES)
    assert pieces.decode(pieces.encode(["unaffable b."]).tokens) == "unaffable b ."


def test_a_learned_vocabulary_knows_its_text():
    text = ["the cat sat on the mat.", "the cat."] * 3
    pieces = learn_wordpiece(text, 60)
    assert UNK not in pieces.encode(text).tokens
    assert pieces.pieces[:5] == SPECIAL_TOKENS
    assert {"the", "cat", "."} <= set(pieces.pieces)


def test_letters_that_were_never_seen_are_unknown():
    pieces = learn_wordpiece(["aa ab ba"] * 2, 20)
    assert pieces.encode(["ab xyz"]).tokens.tolist()[-1] == UNK


def test_paragraphs_are_lines_without_rules():
    text = "Title\n*****\n\n\n  one\n  two...\n \n+----+----+\n"
    assert split_paragraphs(text) == ["Title *", "one two.", "+-+-+"]


def test_sentences_keep_every_word():
    paragraph = "One. Two? Three: four e.g.five! six 3.14"
    assert split_sentences(paragraph) == ["One.", "Two?", "Three:", "four e.g.five!", "six 3.14"]
    assert " ".join(split_sentences(paragraph)) == paragraph


def test_without_the_library_the_fix_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for use in (lambda: learn_wordpiece(["a"], 10), lambda: WordPiece(PIECES)):
        with pytest.raises(EnvironmentProblem, match=r"pip install 'lbopt\[text\]'"):
            use()
