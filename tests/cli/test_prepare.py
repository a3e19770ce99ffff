"""`lbopt prepare`, without a network."""

import io
import json
import os
import pathlib
import re
import shutil
import types
import urllib.error
import urllib.request

import numpy as np
import pytest
import requests
import tensorflow_datasets as tfds
from refusal import names_in, numbers_in, refused, troubled

from lbopt.cli import _prepare
from lbopt.data import TfdsFolder
from lbopt.data.prepare import GeneratedDataset, _builders, _requirements, prepare_source
from lbopt.data.text import TextNormalization, load_pydoc_topics, open_store
from lbopt.data.text._pieces import SPECIAL_TOKENS
from lbopt.data.text._vocabulary import save_vocabulary
from lbopt.errors import NO_VALUE


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Fail as soon as the network is used."""

    def refuse(*arguments, **named):
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


@pytest.mark.parametrize("name", ["generated_images", "mnist1d", "pydoc_squad"])
def test_a_made_data_set_is_made_once(lbopt, name, tmp_path, fingerprint):
    code, out, err = lbopt("prepare", name, f"--data_dir={tmp_path}")
    assert (code, err) == (0, "")
    folder = TfdsFolder(name, str(tmp_path))
    counts = ", ".join(f"{split} {size}" for split, size in sorted(folder.num_examples.items()))
    assert out.splitlines() == [
        str(folder.folder),
        f"config.data.builder = {name!r}; records: {counts}",
    ]
    before = fingerprint(tmp_path)
    code, again, err = lbopt("prepare", name, f"--data_dir={tmp_path}")
    assert (code, err) == (0, "")
    assert again.splitlines() == [f"{folder.folder} is there already", out.splitlines()[1]]
    assert fingerprint(tmp_path) == before


def test_a_data_set_that_is_there_needs_nothing(lbopt, tmp_path):
    """It needs no builder of its name in TFDS either."""
    lbopt("prepare", "generated_images", f"--data_dir={tmp_path}")
    (tmp_path / "generated_images").rename(tmp_path / "mine")
    code, out, err = lbopt("prepare", "mine:1.0.0", f"--data_dir={tmp_path}")
    assert (code, err) == (0, "")
    assert "mine/1.0.0 is there already" in out


def test_a_data_set_of_tfds_is_written_where_its_default_config_belongs(
    lbopt, tmp_path, monkeypatch
):
    """`squad` with a download that finds its files already there."""
    answers = [{"text": "Ada", "answer_start": 0}]
    article = {"title": "Ada", "paragraphs": [{"context": "Ada wrote it.", "qas": []}]}
    article["paragraphs"][0]["qas"] = [
        {"id": str(n), "question": "Who?", "answers": answers} for n in range(3)
    ]
    file = tmp_path / "file.json"
    file.write_text(json.dumps({"data": [article]}))

    monkeypatch.setattr(urllib.request, "urlopen", lambda *arguments, **named: io.BytesIO())
    monkeypatch.setattr(
        tfds.download.DownloadManager,
        "download_and_extract",
        lambda self, urls: dict.fromkeys(urls, str(file)),
    )

    code, out, err = lbopt("prepare", "squad", f"--data_dir={tmp_path}/data")
    assert code == 0
    assert (
        err == f"squad/v1.1:3.0.0 is downloaded and prepared in {tmp_path}/data/squad/v1.1/3.0.0\n"
    )
    assert "config.data.builder = 'squad/v1.1'; records: train 3, validation 3" in out

    for name in ("squad", "squad/v1.1"):
        assert "is there already" in lbopt("prepare", name, f"--data_dir={tmp_path}/data")[1]


def whole(archive):
    """Make a sparse file of an archive's size."""
    archive.touch()
    os.truncate(archive, _requirements.ARCHIVES["imagenet2012"].sizes[archive.name])


def test_imagenet_says_which_files_the_user_has_to_download(refusing, tmp_path):
    train = "ILSVRC2012_img_train.tar"
    validation = "ILSVRC2012_img_val.tar"
    with troubled("DATASET", "imagenet2012", "missing") as caught:
        refusing("prepare", "imagenet2012", f"--data_dir={tmp_path}")
    assert {train, "138", validation, "6"} <= names_in(caught)  # files, each before its GiB
    assert "https://image-net.org/download-images" in caught.value.reason
    assert f"{tmp_path}/downloads/manual" in names_in(caught)
    assert list(tmp_path.iterdir()) == []

    whole(tmp_path / train)
    with troubled("DATASET", "imagenet2012", "missing") as caught:
        flags = (f"--data_dir={tmp_path}/data", f"--manual_dir={tmp_path}")
        refusing("prepare", "imagenet2012", *flags)
    assert {validation, str(tmp_path)} <= names_in(caught)
    assert train not in names_in(caught)


@pytest.fixture
def archives(tmp_path, monkeypatch):
    for name in _requirements.ARCHIVES["imagenet2012"].sizes:
        whole(tmp_path / name)
    monkeypatch.setitem(_requirements.PACKAGES, "imagenet2012", {})
    return tmp_path


def prepare_imagenet(archives):
    """Return the words of a command that finds the archives."""
    flags = (f"--data_dir={archives}/data", f"--manual_dir={archives}")
    return ("prepare", "imagenet2012", *flags)


def test_an_archive_that_was_cut_short(refusing, archives):
    os.truncate(archives / "ILSVRC2012_img_val.tar", 5)
    with troubled(f"{archives}/ILSVRC2012_img_val.tar", NO_VALUE, "damaged") as caught:
        refusing(*prepare_imagenet(archives))
    assert numbers_in(caught) == [5, 6744924160]


def test_what_preparing_takes_is_said_before_it_begins(refusing, archives, monkeypatch):
    packages = {"no_such_module": "no-such-package"}
    monkeypatch.setitem(_requirements.PACKAGES, "imagenet2012", packages)
    with troubled("DATASET", "imagenet2012", "missing") as caught:
        refusing(*prepare_imagenet(archives))
    assert "pip install no-such-package" in caught.value.reason  # a command to type


def test_a_small_disk_is_seen_before_it_begins(refusing, archives, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: types.SimpleNamespace(free=7))
    with troubled("DATASET", "imagenet2012", "resource") as caught:
        refusing(*prepare_imagenet(archives))
    assert {"144.0", "--data_dir"} <= names_in(caught)
    assert not (archives / "data").exists()


def test_files_to_download_are_described_by_tfds(refusing, tmp_path):
    with troubled("DATASET", "chexpert", "missing") as caught:
        refusing("prepare", "chexpert", f"--data_dir={tmp_path}")
    assert "downloads/manual" in caught.value.reason
    assert "CheXpert" in caught.value.reason  # in the text of TFDS


def test_no_network(refusing, tmp_path):
    with troubled("DATASET", "squad/v1.1", "resource") as caught:
        refusing("prepare", "squad", f"--data_dir={tmp_path}")
    assert {"rajpurkar.github.io", "HTTPS_PROXY"} <= names_in(caught)
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_package_are_a_way_around_network_and_tensorflow(
    refusing, tmp_path, monkeypatch
):
    monkeypatch.setitem(_requirements.PACKAGES, "fashion_mnist", {})
    with troubled("DATASET", "fashion_mnist", "resource") as caught:
        refusing("prepare", "fashion_mnist", f"--data_dir={tmp_path}")
    assert "--from" in names_in(caught)
    monkeypatch.setitem(_requirements.PACKAGES, "fashion_mnist", {"no_such_module": "tensorflow"})
    with troubled("DATASET", "fashion_mnist", "missing") as caught:
        refusing("prepare", "fashion_mnist", f"--data_dir={tmp_path}")
    assert {"pip", "--from"} <= names_in(caught)


def test_a_network_that_breaks_off(refusing, tmp_path, monkeypatch):
    def refuse(self, urls):
        raise requests.exceptions.ConnectionError("Max retries\nexceeded")

    monkeypatch.setattr(urllib.request, "urlopen", lambda *arguments, **named: io.BytesIO())
    monkeypatch.setattr(tfds.download.DownloadManager, "download_and_extract", refuse)
    with troubled("DATASET", "squad/v1.1", "resource") as caught:
        refusing("prepare", "squad", f"--data_dir={tmp_path}", lines=2)
    assert "(Max retries exceeded)" in str(caught.value)  # the words of requests
    assert [path.name for path in (tmp_path / "squad" / "v1.1").iterdir()] == []


# Arguments, the refused field with its value and code, and what else the message must name.
WRONG = {
    "a misspelt name": (
        ["imagnet2012"],
        ("DATASET", "imagnet2012", "choice"),
        "'imagenet2012'",
    ),
    "an unknown name": (["qqqqqqqq"], ("DATASET", "qqqqqqqq", "choice"), "lbopt prepare --help"),
    "a name that TFDS forgets without h5py": (
        ["wikipedai"],
        ("DATASET", "wikipedai", "choice"),
        "'wikipedia'",
    ),
    "a misspelt config": (
        ["squad/v1"],
        ("DATASET", "squad/v1", "choice"),
        "squad ",
        "'v1'",
        "'v1.1'",
    ),
    "a config of one without": (
        ["mnist/large"],
        ("DATASET", "mnist/large", "choice"),
        "mnist ",
        "'large'",
    ),
    "another version": (["mnist:9.9.9"], ("DATASET", "mnist:9.9.9", "choice"), "3.0.1"),
    "no name": ([], ("DATASET", NO_VALUE, "missing")),
    "an empty name": ([""], ("DATASET", "", "value")),
    "two names": (["mnist", "cifar10"], ("argument", "cifar10", "choice")),
    "a flag first": (["--data_dir=x", "mnist"], ("DATASET", "--data_dir=x", "value")),
    "an unknown flag": (["mnist", "--dir=x"], ("--dir", NO_VALUE, "choice")),
    "a flag of another": (
        ["generated_images", "--manual_dir=x"],
        ("--manual_dir", NO_VALUE, "choice"),
    ),
    "files of one that has none": (
        ["cifar10", "--from={tmp}"],
        ("--from", "{tmp}", "unused"),
        "fashion_mnist",
    ),
    "no files": (
        ["fashion_mnist", "--from={tmp}"],
        ("--from", "{tmp}", "missing"),
        "train-images-idx3-ubyte.gz",
        "t10k-labels-idx1-ubyte.gz",
    ),
    "text without a name": (["text", "--folder=x"], ("--name", NO_VALUE, "missing")),
    "text with a bad name": (
        ["text", "--name=a/b", "--folder=x"],
        ("--name", "a/b", "value"),
    ),
    "text of nothing": (["text", "--name=x"], ("--tfds", None, "missing"), "--folder"),
    "text of no folder": (
        ["text", "--name=x", "--folder={tmp}/no"],
        ("--folder", "{tmp}/no", "missing"),
        "*.txt",
    ),
    "two vocabularies": (
        ["text", "--name=x", "--vocab=v", "--vocab_size=9"],
        ("--vocab_size", "9", "conflict"),
        "--vocab ",
    ),
    "no number": (
        ["text", "--name=x", "--vocab_size=many"],
        ("--vocab_size", "many", "value"),
    ),
    "a case that is no case": (
        ["text", "--name=x", "--vocab=v", "--lowercase=no"],
        ("--lowercase", "no", "value"),
    ),
    "a case of what is learned": (
        ["text", "--name=x", "--lowercase=false"],
        ("--lowercase", "false", "unused"),
        "--vocab",
    ),
    "no vocabulary": (["text", "--name=x", "--vocab={tmp}/v"], ("--vocab", "{tmp}/v", "missing")),
}


@pytest.mark.parametrize("case", WRONG)
def test_it_is_refused_in_one_line(refusing, case, tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    arguments, (field, value, code), *named = WRONG[case]
    if isinstance(value, str):
        value = value.replace("{tmp}", str(tmp_path))
    with refused(field, value, code) as caught:
        refusing("prepare", *(text.replace("{tmp}", str(tmp_path)) for text in arguments))
    for part in named:
        assert part in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [["generated_images"], ["text", "--name=x", "--folder={texts}", "--vocab_size=200"]],
)
def test_a_place_where_nothing_can_be_written(refusing, arguments, tmp_path, articles_folder):
    (tmp_path / "file").write_text("")
    arguments = [argument.replace("{texts}", str(articles_folder)) for argument in arguments]
    with troubled("--data_dir", NO_VALUE, "resource") as caught:
        refusing("prepare", *arguments, f"--data_dir={tmp_path}/file/data")
    assert f"{tmp_path}/file" in caught.value.reason


def test_help_lists_what_can_be_made(lbopt):
    code, out, err = lbopt("prepare", "--help")
    assert (code, err) == (0, "")
    for name in (
        "imagenet2012",
        "cifar10",
        "mnist",
        "squad",
        "wikipedia/20230601.en",
        *_prepare.LISTED,
    ):
        assert any(line.split()[0] == name for line in out.splitlines() if line.strip())


SENTENCES = [
    "The cat sat on the mat.",
    "It was warm there.",
    "A dog came in.",
    "The cat ran away from the dog.",
]


@pytest.fixture(scope="module")
def articles_folder(tmp_path_factory):
    """Return a folder of three texts: one in a subfolder, one without words."""
    folder = tmp_path_factory.mktemp("texts") / "books"
    (folder / "below").mkdir(parents=True)
    (folder / "a.txt").write_text(" ".join(SENTENCES[:2]) + "\n\n" + SENTENCES[2])
    (folder / "below" / "b.txt").write_text("\n".join(SENTENCES))
    (folder / "c.txt").write_text("\n\n")
    return folder


@pytest.fixture(scope="module")
def with_articles(tmp_path_factory):
    """Return a folder of data sets that has `articles`, with the fields of wikipedia."""

    def examples():
        for number in range(5):
            text = f"{SENTENCES[number % 4]} This is article {number}.\n\nReferences\n\nNobody."
            yield str(number), {"title": f"Article {number}", "text": text}

    def features(kinds):
        return {"title": kinds.Text(), "text": kinds.Text()}

    folder = tmp_path_factory.mktemp("sets")
    prepare_source(
        GeneratedDataset("articles", "Articles.", features, {"train": examples}), str(folder)
    )
    return folder


def decoded(store):
    pieces = np.asarray(store.pieces)
    return [" ".join(pieces[document.tokens]).replace(" ##", "") for document in store]


def test_text_of_a_folder_with_a_learned_vocabulary(lbopt, articles_folder, tmp_path, fingerprint):
    arguments = [
        "prepare",
        "text",
        "--name=mine",
        f"--folder={articles_folder}",
        f"--data_dir={tmp_path}",
    ]

    code, out, err = lbopt(*arguments, "--vocab_size=80")
    assert code == 0, err
    assert [line for line in err.splitlines() if line] == [
        "learning the vocabulary",
        "writing tokens",
    ]

    store = open_store(tmp_path / "lbopt_text" / "mine")
    assert (len(store), store.made_from) == (2, "texts of books")
    assert decoded(store)[0] == "the cat sat on the mat . it was warm there . a dog came in ."
    assert f"2 documents, {len(store.tokens)} tokens" in out
    assert f"config.data.builder = 'mine', config.data.vocab_size = {len(store.pieces)}" in out

    before = fingerprint(tmp_path)
    code, again, err = lbopt(*arguments)
    assert (code, err) == (0, "")
    assert again.splitlines() == [
        f"{tmp_path}/lbopt_text/mine is there already",
        out.splitlines()[1],
    ]
    assert fingerprint(tmp_path) == before


def test_text_of_a_data_set_and_a_folder_with_a_loaded_vocabulary(
    lbopt, with_articles, articles_folder, tmp_path
):
    vocabulary = tmp_path / "vocab.txt"
    save_vocabulary(load_pydoc_topics(512).pieces.pieces, vocabulary)
    sources = ["--tfds=articles", f"--folder={articles_folder}", f"--data_dir={with_articles}"]
    code, _, err = lbopt("prepare", "text", "--name=both", *sources, f"--vocab={vocabulary}")
    assert code == 0, err
    assert err.splitlines() == ["writing tokens"]
    store = open_store(with_articles / "lbopt_text" / "both", expected_vocab_size=512)
    assert (len(store), store.made_from) == (7, "articles 1.0.0, texts of books")
    texts = decoded(store)
    assert sum("this is article" in text for text in texts[:5]) == 5
    assert not any("nobody" in text or "references" in text for text in texts)
    assert texts[5].startswith("the cat sat on")


@pytest.fixture
def cased(tmp_path, articles_folder):
    """Return the flags of a store for a cased vocabulary, and the vocabulary."""
    folder = tmp_path / "bert"
    folder.mkdir()
    words = sorted({word for sentence in SENTENCES for word in re.findall(r"\w+|\.", sentence)})
    save_vocabulary([*SPECIAL_TOKENS, *words], folder / "vocab.txt")
    flags = [
        "prepare",
        "text",
        "--name=mine",
        f"--folder={articles_folder}",
        f"--data_dir={tmp_path / 'data'}",
    ]
    return [*flags, f"--vocab={folder / 'vocab.txt'}"], folder / "vocab.txt"


def test_a_cased_vocabulary_needs_somebody_who_says_so(lbopt, refusing, cased, tmp_path):
    arguments, vocabulary = cased
    with refused("--lowercase", None, "missing") as caught:
        refusing(*arguments)
    assert {str(vocabulary), "A", "It", "The", "false"} <= names_in(caught)
    assert not (tmp_path / "data").exists()
    code, out, err = lbopt(*arguments, "--lowercase=false")
    assert (code, err.splitlines()) == (0, ["writing tokens"])
    assert out.endswith("tokens, cased\n")
    store = open_store(tmp_path / "data" / "lbopt_text" / "mine")
    assert store.normalization == TextNormalization(do_lower_case=False)
    assert decoded(store)[0] == "The cat sat on the mat . It was warm there . A dog came in ."
    code, again, _ = lbopt(*arguments[:-1])
    assert (code, again.splitlines()[1]) == (0, out.splitlines()[1])
    with refused("--lowercase", "true", "mismatch") as caught:
        refusing(*arguments, "--lowercase=true")
    assert str(tmp_path / "data" / "lbopt_text" / "mine") in names_in(caught)


def test_settings_beside_a_vocabulary_are_followed_and_a_flag_overrides_them(
    lbopt, cased, tmp_path
):
    arguments, vocabulary = cased
    (vocabulary.parent / "tokenizer_config.json").write_text(
        '{"do_lower_case": false, "strip_accents": true}'
    )
    assert lbopt(*arguments)[0] == 0
    assert open_store(tmp_path / "data" / "lbopt_text" / "mine").normalization == TextNormalization(
        False, True
    )
    code, out, err = lbopt(*arguments, "--name=other", "--lowercase=true")
    assert code == 0
    counts, unused, *_ = err.splitlines()
    assert counts.startswith("--lowercase = true ")
    assert "tokenizer_config.json" in counts
    assert unused.startswith("3 of 23 pieces")
    assert out.endswith("tokens, lowercased\n")
    assert decoded(open_store(tmp_path / "data" / "lbopt_text" / "other"))[0].startswith(
        "the cat sat on the mat . [UNK]"
    )


def test_text_of_a_data_set_that_is_not_there_or_has_no_articles(
    lbopt, refusing, tmp_path, with_articles
):
    name = "wikipedia/20230601.en"
    with troubled("--tfds", name, "missing") as caught:
        refusing("prepare", "text", "--name=x", f"--tfds={name}", f"--data_dir={tmp_path}")
    assert f"lbopt prepare {name}" in str(caught.value)  # a command to type
    lbopt("prepare", "pydoc_squad", f"--data_dir={with_articles}")
    with refused("--tfds", "pydoc_squad", "mismatch") as caught:
        refusing("prepare", "text", "--name=x", "--tfds=pydoc_squad", f"--data_dir={with_articles}")
    assert "text" in names_in(caught)


def test_damaged_articles_are_left_out_and_counted(lbopt, refusing, with_articles, tmp_path):
    folder = shutil.copytree(with_articles / "articles", tmp_path / "articles").parent
    (file,) = folder.glob("articles/1.0.0/*train*")
    whole = bytearray(file.read_bytes())
    # The articles lie in the first thousand bytes.
    whole[300:308] = bytes(byte ^ 255 for byte in whole[300:308])
    file.write_bytes(bytes(whole))

    arguments = [
        "prepare",
        "text",
        "--name=x",
        "--tfds=articles",
        "--vocab_size=80",
        f"--data_dir={folder}",
    ]

    with troubled("--max_damaged_records", 0, "damaged") as caught:
        refusing(*arguments, lines=None)
    assert {"articles", "train"} <= names_in(caught)

    code, out, _ = lbopt(*arguments, "--max_damaged_records=5")
    assert code == 0
    left = 5 - len(open_store(folder / "lbopt_text" / "x"))
    assert 0 < left < 5
    assert f"{left} damaged articles were left out" in out


@pytest.mark.parametrize(
    ("flags", "field", "value", "code"),
    [
        (["--folder={empty}"], "--folder", "{empty}", "missing"),
        (["--folder={texts}", "--vocab_size=9"], "--vocab_size", 9, "value"),
        (["--folder={texts}", "--vocab={there}/v.txt"], "--vocab", "{there}/v.txt", "damaged"),
        (
            ["--folder={texts}", "--max_damaged_records=some"],
            "--max_damaged_records",
            "some",
            "value",
        ),
    ],
)
def test_messages_name_the_flags(refusing, flags, field, value, code, articles_folder, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "v.txt").write_text("")
    places = {"empty": empty, "there": tmp_path, "texts": articles_folder}
    flags = [flag.format(**places) for flag in flags]
    value = value.format(**places) if isinstance(value, str) else value
    with refused(field, value, code):
        refusing("prepare", "text", "--name=x", *flags, f"--data_dir={tmp_path}/data", lines=None)


def test_a_store_that_fails_halfway_leaves_nothing(lbopt, refusing, articles_folder, tmp_path):
    store = tmp_path / "lbopt_text"
    (store / ".x.partial-killed").mkdir(parents=True)
    folder = tmp_path / "texts"
    shutil.copytree(articles_folder, folder)
    (folder / "z.txt").write_bytes(b"\xff\xfe")
    arguments = [
        "prepare",
        "text",
        "--name=x",
        f"--folder={folder}",
        "--vocab_size=80",
        f"--data_dir={tmp_path}",
    ]
    with troubled(str(folder / "z.txt"), NO_VALUE, "damaged"):
        refusing(*arguments, lines=None)
    assert list(store.iterdir()) == []
    (folder / "z.txt").unlink()
    assert lbopt(*arguments)[0] == 0
    assert [entry.name for entry in store.iterdir()] == ["x"]


def test_ptb_says_which_files_the_user_has_to_download(lbopt, refusing, tmp_path):
    files = ["ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"]
    with troubled("ptb", NO_VALUE, "missing") as caught:
        refusing("prepare", "ptb", f"--data_dir={tmp_path}")
    assert {*files, "Mikolov", f"{tmp_path}/ptb"} <= names_in(caught)
    (tmp_path / "ptb").mkdir()
    for name, text in {"train": "a <unk> b\n", "valid": "a c\n"}.items():
        (tmp_path / "ptb" / f"ptb.{name}.txt").write_text(text)
    with troubled("ptb", NO_VALUE, "missing") as caught:
        refusing("prepare", "ptb", f"--data_dir={tmp_path}")
    assert names_in(caught) & set(files) == {"ptb.test.txt"}
    assert f"{tmp_path}/ptb" in names_in(caught)
    (tmp_path / "ptb" / "ptb.test.txt").write_text("b\nb\n")
    code, out, _ = lbopt("prepare", "ptb", f"--data_dir={tmp_path}")
    assert code == 0
    assert "vocab_size = 4; tokens: train 4, validation 3, test 4" in out


def test_categories_are_found_where_tfds_stops_looking():
    """TFDS's own search ends at the first category whose packages are missing."""
    assert _builders.named("wikipedia/20230601.en", pathlib.Path("/nowhere")).name == "wikipedia"
