"""Articles and books become a store with the same text."""

import os

import numpy as np
import pytest
from refusal import names_in, refused, troubled

from lbopt.data.text import (
    _corpora,
    build_store,
    folder_documents,
    learn_vocabulary,
    open_store,
    split_pydoc_topics,
    wikipedia_documents,
)
from lbopt.data.text._pieces import UNK
from lbopt.data.text._wordpiece import learn_wordpiece

ARTICLE = """Bourg is a town in the U.S. state of Ohio. It has 3.5 mills.

History
It was founded c. 1850 by J. S. Miller. See also
the mill of 1870.

References
in culture and elsewhere. Not a heading.

People

 Jane Roe, miller
 John Doe, baker

See also
 Another town

References

External links
 Official site

Category:Towns
Category:Mills"""


def article(text, title="Bourg"):
    return {"title": title, "text": text}


def test_an_article_is_its_sentences_without_the_last_sections():
    (sentences,) = wikipedia_documents(
        [article(ARTICLE.replace("References\nin", "References in", 1))]
    )
    assert sentences == [
        "Bourg is a town in the U.S. state of Ohio.",
        "It has 3.5 mills.",
        "History",
        "It was founded c. 1850 by J. S. Miller.",
        "See also the mill of 1870.",
        "References in culture and elsewhere.",
        "Not a heading.",
        "People",
        "Jane Roe, miller",
        "John Doe, baker",
    ]


@pytest.mark.parametrize(
    "heading", ["References", "== External links ==", "further reading", "See also "]
)
def test_last_sections_have_several_forms(heading):
    (sentences,) = wikipedia_documents([article(f"Text.\n\n{heading}\nA book.\n\nMore\n\nOthers.")])
    assert sentences == ["Text."]


def test_bytes_are_text_and_articles_without_any_are_left_out():
    records = [
        article(b"One. Two."),
        article(""),
        article("References\n\nA book."),
        article("Category:Towns"),
        article("É"),
    ]
    assert list(wikipedia_documents(records)) == [["One.", "Two."], ["É"]]


def test_articles_that_are_not_utf8_are_named():
    with troubled("title", "Bourg", "damaged"):
        list(wikipedia_documents([article(b"\xff")]))


def test_records_without_text():
    with refused("records", code="missing"):
        list(wikipedia_documents([article("")]))


def test_files_are_documents_in_the_order_of_names(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b/a.txt").write_text("Third\nline.\n\nAnother. And more.\n")
    (tmp_path / "a.txt").write_text("First.")
    (tmp_path / "b.txt").write_text(" \n\n")
    (tmp_path / "a b.txt").write_text("Zeroth: café.", "utf-8")
    (tmp_path / "c.md").write_text("No text.")
    assert list(folder_documents(tmp_path)) == [
        ["Zeroth: café."],
        ["First."],
        ["Third line.", "Another.", "And more."],
    ]


def test_folders_without_text(tmp_path):
    with refused("folder", str(tmp_path), "missing"):
        folder_documents(tmp_path)
    with refused("folder", str(tmp_path / "nowhere"), "missing"):
        folder_documents(tmp_path / "nowhere")
    (tmp_path / "a.txt").write_text("\n\n")
    with refused("folder", str(tmp_path), "missing"):
        list(folder_documents(tmp_path))


def test_files_that_are_not_text_are_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with troubled(str(tmp_path / "a.txt"), code="damaged"):
        list(folder_documents(tmp_path))
    (tmp_path / "a.txt").unlink()
    (tmp_path / "b.txt").mkdir()
    with troubled(str(tmp_path / "b.txt"), code="damaged"):
        list(folder_documents(tmp_path))
    (tmp_path / "b.txt").rmdir()
    os.mkfifo(tmp_path / "b.txt")
    with troubled(str(tmp_path / "b.txt"), code="damaged") as caught:
        list(folder_documents(tmp_path))
    assert "FIFO" in names_in(caught)


@pytest.mark.parametrize(
    ("size", "most", "every"), [(10, 10, 1), (11, 10, 2), (1000, 10, 128), (3, 10, 1)]
)
def test_samples_are_evenly_spaced(size, most, every):
    found = _corpora._evenly(map(str, range(size)), most)
    assert found == [str(number) for number in range(0, size, every)]


def test_a_vocabulary_of_a_sample():
    documents = split_pydoc_topics()[0][:20]
    sentences = [sentence for document in documents for sentence in document]
    assert learn_vocabulary(iter(documents), 400).pieces == learn_wordpiece(sentences, 400).pieces
    assert (
        learn_vocabulary(documents, 400, len(sentences) - 1).pieces
        == learn_wordpiece(sentences[::2], 400).pieces
    )


def test_rare_characters_take_no_pieces(monkeypatch):
    monkeypatch.setattr(_corpora, "MAX_ALPHABET", 3)
    rare = [chr(0x4E00 + number) for number in range(100)]
    pieces = learn_vocabulary([["abc cab " * 5, *rare, "az"]], 20)
    assert set("".join(pieces.pieces[5:])) == set("abc#")
    assert pieces.encode(["abz"]).tokens.tolist() == [UNK]


@pytest.mark.parametrize("batch_characters", [1, 500, 10**9])
def test_a_store_has_the_documents(tmp_path, monkeypatch, batch_characters):
    monkeypatch.setattr(_corpora, "_BATCH_CHARACTERS", batch_characters)
    documents = [*split_pydoc_topics()[1][:8], ["\x00"], *split_pydoc_topics()[2][:2]]
    pieces = learn_wordpiece([sentence for one in documents for sentence in one], 300)
    seen = []
    counts = build_store(tmp_path / "store", iter(documents), pieces, "topics", seen.append)
    store = open_store(tmp_path / "store")
    expected = [pieces.encode(document) for document in documents if document != ["\x00"]]
    assert counts == seen[-1] == (10, len(store.sentences), len(store.tokens))
    assert seen == sorted(seen)
    assert (store.made_from, store.pieces) == ("topics", pieces.pieces)
    for found, document in zip(store, expected, strict=True):
        np.testing.assert_array_equal(found.tokens, document.tokens)
        np.testing.assert_array_equal(found.sentences, document.sentences)


def test_long_documents_are_encoded_at_once_and_short_ones_together(monkeypatch):
    monkeypatch.setattr(_corpora, "_BATCH_CHARACTERS", 10)
    documents = [["aaaa"], ["bbb", "cccc"], ["d" * 100], ["e"]]
    assert list(_corpora._batches(documents)) == [documents[:2], documents[2:3], documents[3:]]
