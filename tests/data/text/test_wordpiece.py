"""Paragraphs, sentences, and WordPiece compared with a transcription of the greedy rule."""

import itertools
import sys

import numpy as np
import pytest
from refusal import troubled

from lbopt.data.text import (
    TextNormalization,
    WordPiece,
    load_pydoc_topics,
    load_wordpiece,
    read_vocabulary,
    split_pydoc_topics,
)
from lbopt.data.text._pieces import SPECIAL_TOKENS, UNK
from lbopt.data.text._vocabulary import save_vocabulary
from lbopt.data.text._wordpiece import (
    SpecialIds,
    learn_wordpiece,
    split_paragraphs,
    split_prose,
    split_sentences,
)

PIECES = [*SPECIAL_TOKENS, "un", "##aff", "##able", "##a", "##ff", "a", "a ", ".", "b", "é", "e"]


def greedy(word):
    """Return the longest tokens from the left; one unknown letter makes the word unknown."""
    found = []
    rest = word
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
        with troubled("tokenizers", code="installation") as caught:
            use()
        assert "pip install 'lbopt[text]'" in str(caught.value)


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
    paragraphs = [" ".join(topic) for part in split_pydoc_topics() for topic in part]
    for paragraph in paragraphs:
        sentences = split_prose(paragraph)
        assert " ".join(sentences) == paragraph
        assert all(sentence == sentence.strip() for sentence in sentences)
        assert all(sentences)


CASED = (
    "I",
    "##f",
    "If",
    "Ca",
    "##fé",
    "T",
    "##he",
    "The",
    "\u00c9",
    "café",
    "M",
    "##AS",
    "##K",
    "MASK",
    "mask",
)


@pytest.fixture(scope="module")
def bert_file(tmp_path_factory):
    """Return a vocabulary file in BERT's order: [PAD], 99 unused, [UNK] [CLS] [SEP] [MASK]."""
    pad, *others = SPECIAL_TOKENS
    unused = [f"[unused{number}]" for number in range(99)]
    learned = load_pydoc_topics(1024).pieces.pieces[len(SPECIAL_TOKENS) :]
    more = ["cafe", "##\u0301", "\u4e2d", "\u6587", "##\u6587", "\u4e2d\u6587", "a" * 100, *CASED]
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


SPECIAL = [
    "a [MASK] b [SEP] c",
    "glued[MASK]on[SEP]",
    "[MASK]",
    "[mask] [Mask] [ MASK ] [MASK [UNK] [unused1]",
    "[CLS]One.[SEP]Two.[SEP][PAD][PAD]",
]
TOPICS = [sentence for part in split_pydoc_topics() for topic in part for sentence in topic]
SETTINGS = [
    TextNormalization(*fields)
    for fields in itertools.product([True, False], [None, True, False], [True, False])
]


def transformers_tokenizer(name, *arguments, **settings):
    return getattr(pytest.importorskip("transformers"), name)(*arguments, **settings)


@pytest.mark.filterwarnings("ignore")
def test_tokens_are_those_of_transformers_for_all_settings(bert_file, tmp_path):
    """Settings are read from tokenizer_config.json, and from the files that Transformers saves."""
    found = set()

    for number, settings in enumerate(SETTINGS):
        theirs = transformers_tokenizer("BertTokenizerFast", str(bert_file), **settings._asdict())
        beside = tmp_path / f"beside{number}"
        saved = tmp_path / f"saved{number}"
        theirs.save_pretrained(saved)
        beside.mkdir()
        (beside / "vocab.txt").write_bytes(bert_file.read_bytes())
        (beside / "tokenizer_config.json").write_bytes(
            (saved / "tokenizer_config.json").read_bytes()
        )

        ours = load_wordpiece(beside / "vocab.txt")
        theirs.split_special_tokens = True
        expected = theirs([*ODD, *SPECIAL, *TOPICS[::10]], add_special_tokens=False)["input_ids"]
        for sentence, tokens in zip([*ODD, *SPECIAL, *TOPICS[::10]], expected, strict=True):
            assert ours.encode([sentence]).tokens.tolist() == tokens, (settings, sentence)

        for whole in (saved / "tokenizer_config.json", None):
            if whole is None:
                (saved / "tokenizer_config.json").unlink()
            again = load_wordpiece(saved / "tokenizer.json")
            assert (again.normalization, again.pieces) == (settings, ours.pieces)
        found.add(tuple(itertools.chain(*expected)))

    assert len(found) == 8  # by default accents are dropped with case


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", SETTINGS[::3], ids=str)
def test_tokens_are_those_of_plain_python(bert_file, settings):
    """`BertTokenizer` is made of the same library as ours; the legacy one is plain Python."""
    theirs = transformers_tokenizer("BertTokenizerLegacy", str(bert_file), **settings._asdict())
    ours = WordPiece(read_vocabulary(bert_file), settings)
    assert ours.special == SpecialIds(pad=0, unk=100, cls=101, sep=102, mask=103)
    for sentence in [*ODD, *TOPICS[::4]]:
        expected = theirs.convert_tokens_to_ids(theirs.tokenize(sentence))
        assert ours.encode([sentence]).tokens.tolist() == expected, repr(sentence)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lower", [True, False])
def test_no_text_has_special_tokens(bert_file, lower):
    """The text "[MASK]" in a document is not the special token, as it is in Transformers."""
    ours = WordPiece(read_vocabulary(bert_file), TextNormalization(lower))
    special = set(ours.special) - {ours.special.unk}
    assert not special & set(ours.encode(SPECIAL).tokens.tolist())
    theirs = transformers_tokenizer("BertTokenizerFast", str(bert_file), do_lower_case=lower)
    assert special <= set(itertools.chain(*theirs(SPECIAL, add_special_tokens=False)["input_ids"]))
    inside = ours.decode(ours.encode(["glued[MASK]on"]).tokens)
    assert inside.endswith(f"[ {'mask' if lower else 'MASK'} ] on")


def test_a_cased_vocabulary_keeps_case_and_accents(bert_file):
    names = {
        lower: WordPiece(read_vocabulary(bert_file), TextNormalization(lower))
        for lower in (True, False)
    }
    found = {
        lower: pieces.decode(pieces.encode(["If Café"]).tokens) for lower, pieces in names.items()
    }
    assert found == {True: "if cafe", False: "If Café"}


def test_documents_together_are_documents_alone():
    pieces = WordPiece(PIECES)
    documents = [["unaff b", "", "a"], [], ["", " "], ["b b ."], ["a"]]
    for together, alone in zip(
        pieces.encode_many(documents), map(pieces.encode, documents), strict=True
    ):
        assert together.tokens.tolist() == alone.tokens.tolist()
        assert together.sentences.tolist() == alone.sentences.tolist()
    assert [one.sentences.tolist() for one in pieces.encode_many(documents)] == [
        [0, 3],
        [],
        [],
        [0],
        [0],
    ]
    assert pieces.encode_many([]) == []
