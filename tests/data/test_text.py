"""Cleaning, sentences, and WordPiece against a transcription of the greedy rule."""

import sys

import numpy as np
import pytest

from lbopt.data.pieces import SPECIAL_TOKENS, UNK
from lbopt.data.pydoc import load_topics, split_topics
from lbopt.data.text import (
    SpecialIds,
    WordPiece,
    learn_wordpiece,
    load_wordpiece,
    save_vocabulary,
    split_paragraphs,
    split_prose,
    split_sentences,
)
from lbopt.errors import EnvironmentProblem, UserError

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


@pytest.mark.parametrize(
    "text",
    [
        "He met Mr. Smith.|She left.",
        "Works of J. S. Bach are long.|They last.",
        "See e.g. Miller (i.e. the book), cf. Roe vs. Doe.|It is old.",
        "He was in the U.S. Army.|He left the U.S.|In 1950 he died.",
        "It cost 3.5 dollars.|It was No. 5 of 10.|He said no.|Others agreed.",
        'He said "Stop!"|Then he ran.|(It was late.)|"Why?" she asked.',
        "\u201cIt is.\u201d|\u201cIs it?\u201d|\u2018Yes.\u2019",
        "Wait... what?|Nothing\u2026|Now!",
        "Acme Inc. Chairman Roe left Acme Inc.|The firm failed.",
        "She has a Ph.D. from Yale.|However, she left.",
        "He was born on Jan. 5 in St. Louis.|It was c. 1850, p. 7, pp. 8.",
        "Time: noon; place: here.|Done.",
        "Henry I.|After him came Dr. No.",
        "no capitals here.|they are gone , e.g. here .|yes .",
        "King Henry VIII.|Roses are red.|1998 was hot.",
        "Smith, J. A., et al. Nature is a title.",
        "one",
    ],
)
def test_prose_is_split_where_sentences_end(text):
    assert split_prose(text.replace("|", " ")) == text.split("|")


def test_prose_keeps_every_word():
    paragraphs = [" ".join(topic) for part in split_topics() for topic in part]
    for paragraph in paragraphs:
        sentences = split_prose(paragraph)
        assert " ".join(sentences) == paragraph
        assert all(sentence == sentence.strip() for sentence in sentences)
        assert all(sentences)


CASED = ("I", "##f", "If", "Ca", "##fé", "T", "##he", "The", "É")


@pytest.fixture(scope="module")
def bert_file(tmp_path_factory):
    """Return a vocabulary file in the order of BERT's: [PAD] 0, 99 unused, [UNK] [CLS] [SEP] [MASK] at 100 to 103."""
    pad, *others = SPECIAL_TOKENS
    unused = [f"[unused{number}]" for number in range(99)]
    learned = load_topics(1024).pieces.pieces[len(SPECIAL_TOKENS) :]
    more = ["cafe", "##\u0301", "\u4e2d", "\u6587", "##\u6587", "a" * 100, *CASED]
    path = tmp_path_factory.mktemp("bert") / "vocab.txt"
    save_vocabulary(list(dict.fromkeys([pad, *unused, *others, *learned, *more])), path)
    return path


ODD = [
    "Café CAFE\u0301 na\u00efve \u00c9 \u00df \u0130",
    "\u4e2d\u6587 and\u4e2d\u6587together \uff0c\u3002 \u30ab\u30bf\u30ab\u30ca \uac00\ub098",
    "con\u0000trol \u200bzero\u200d \ufeffmark\u00ad soft \ufffd \x07 \x7f",
    "tabs\tand\u00a0spaces\u2003wide\r\nlines",
    "a" * 120,
    "a" * 100 + " " + "a" * 101,
    "d\u00e9j\u00e0-vu; it's $5.00 (50%) ... <x@y.z> ~`^_ \u20ac \u2014 \u201cquoted\u201d",
    "\U0001f600 emoji \U00020000 rare",
    "",
    "   ",
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("name", ["BertTokenizer", "BertTokenizerLegacy"])
def test_tokens_are_those_of_transformers(bert_file, name, lowercase):
    """`BertTokenizer` is made of the same library with its own settings; the legacy one is plain Python."""
    theirs = getattr(pytest.importorskip("transformers"), name)(str(bert_file), do_lower_case=lowercase)
    sentences = [*ODD, *(sentence for part in split_topics() for topic in part for sentence in topic)]
    ours = load_wordpiece(bert_file, lowercase)
    assert ours.special == SpecialIds(pad=0, unk=100, cls=101, sep=102, mask=103)
    for sentence in sentences:
        expected = theirs.convert_tokens_to_ids(theirs.tokenize(sentence))
        assert ours.encode([sentence]).tokens.tolist() == expected, repr(sentence)


def test_a_cased_vocabulary_keeps_case_and_accents(bert_file):
    names = {lower: load_wordpiece(bert_file, lower) for lower in (True, False)}
    found = {lower: pieces.decode(pieces.encode(["If Café"]).tokens) for lower, pieces in names.items()}
    assert found == {True: "if cafe", False: "If Café"}


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
        (WHOLE.replace("[MASK]", "b").replace("[CLS]", "c").encode(), r"it has no \[CLS\] \[MASK\]"),
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


def test_documents_together_are_documents_alone():
    pieces = WordPiece(PIECES)
    documents = [["unaff b", "", "a"], [], ["", " "], ["b b ."], ["a"]]
    for together, alone in zip(pieces.encode_many(documents), map(pieces.encode, documents), strict=True):
        assert together.tokens.tolist() == alone.tokens.tolist()
        assert together.sentences.tolist() == alone.sentences.tolist()
    assert [one.sentences.tolist() for one in pieces.encode_many(documents)] == [[0, 3], [], [], [0], [0]]
    assert pieces.encode_many([]) == []
