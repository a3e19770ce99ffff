"""Stores in memory and on disk give back their documents; incomplete ones are refused."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from refusal import names_in, refused, troubled

from lbopt.data.text import (
    StoreWriter,
    TextNormalization,
    learn_byte_pairs,
    open_store,
    read_about,
    split_store,
)
from lbopt.data.text._tokens import gather_documents, token_dtype
from lbopt.data.text._vocabulary import UNCASED
from lbopt.data.text._wordpiece import Document

PIECES = tuple(f"p{number}" for number in range(50))


def make_documents(count=7, largest=50):
    random = np.random.default_rng(0)
    sizes = random.integers(1, 40, count)
    return [
        Document(random.integers(0, largest, size).astype(np.int32), np.arange(0, size, 6))
        for size in sizes
    ]


def write(folder, documents, pieces=PIECES):
    with StoreWriter(folder, pieces, "a test") as writer:
        for document in documents:
            writer.append(document)


def assert_same(store, documents):
    assert len(store) == len(documents)
    for found, document in zip(store, documents, strict=True):
        np.testing.assert_array_equal(found.tokens, document.tokens)
        np.testing.assert_array_equal(found.sentences, document.sentences)
        assert found.tokens.dtype == np.int32


@pytest.mark.parametrize(
    ("pieces", "dtype"), [(50, np.uint16), (2**16, np.uint16), (2**16 + 1, np.int32)]
)
def test_documents_come_back(tmp_path, pieces, dtype):
    documents = make_documents(largest=pieces)
    documents[0].tokens[0] = pieces - 1
    write(tmp_path / "store", documents, [f"p{number}" for number in range(pieces)])
    for store in (open_store(tmp_path / "store"), gather_documents(documents)):
        assert store.tokens.dtype == dtype == token_dtype(pieces)
        assert_same(store, documents)
    store = open_store(tmp_path / "store", expected_vocab_size=pieces)
    assert (store.pieces[-1], store.made_from) == (f"p{pieces - 1}", "a test")
    assert not store.tokens.flags.owndata


def test_the_normalization_comes_back_and_earlier_stores_were_lowercased(tmp_path):
    settings = TextNormalization(do_lower_case=False, strip_accents=True)
    with StoreWriter(tmp_path / "store", PIECES, "a test", settings) as writer:
        writer.append(make_documents()[0])
    assert open_store(tmp_path / "store").normalization == settings
    description = tmp_path / "store/store.json"
    found = json.loads(description.read_text())
    description.write_text(json.dumps({**found, "normalization": {"do_lower_case": "no"}}))
    with troubled(str(description), code="damaged") as caught:
        open_store(tmp_path / "store")
    assert "normalization" in str(caught.value)
    del found["normalization"]
    description.write_text(json.dumps(found))
    assert open_store(tmp_path / "store").normalization == UNCASED


def test_what_the_folder_says(tmp_path):
    documents = make_documents()
    write(
        tmp_path / "store",
        [documents[0], Document(np.zeros(0, np.int32), np.zeros(0, int)), *documents[1:]],
    )
    found = json.loads((tmp_path / "store/store.json").read_text())
    assert sorted(os.listdir(tmp_path / "store")) == [
        "documents.bin",
        "sentences.bin",
        "store.json",
        "tokens.bin",
        "vocab.txt",
    ]
    assert (found["format"], found["vocab_size"], found["made_from"]) == (1, 50, "a test")
    assert found["documents"] == 7
    assert found["sentences"] == sum(len(one.sentences) for one in documents)
    assert found["tokens"] == sum(len(one.tokens) for one in documents)


def test_documents_without_sentences(tmp_path):
    documents = [Document(np.arange(4, dtype=np.int32), np.zeros(0, int))]
    write(tmp_path / "store", documents)
    assert_same(open_store(tmp_path / "store"), documents)


def test_nothing_is_left_of_a_store_that_failed(tmp_path):
    def fail():
        with StoreWriter(tmp_path / "store", PIECES, "a test") as writer:
            writer.append(make_documents()[0])
            assert not (tmp_path / "store").exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert not list(tmp_path.iterdir())


@pytest.mark.process
def test_nothing_is_in_the_folder_of_a_writer_that_was_killed(tmp_path):
    program = f"""
import os, signal
import numpy as np
from lbopt.data.text import StoreWriter
from lbopt.data.text._wordpiece import Document
with StoreWriter({str(tmp_path / "store")!r}, ["a"], "a test") as writer:
    writer.append(Document(np.zeros(10**6, np.int32), np.zeros(1, int)))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    with troubled("builder", "store", "missing"):
        open_store(tmp_path / "store")
    write(tmp_path / "store", make_documents())
    assert_same(open_store(tmp_path / "store"), make_documents())


def test_a_store_is_not_overwritten(tmp_path):
    write(tmp_path / "store", make_documents(3))
    with refused("folder", str(tmp_path / "store"), "exists"):
        write(tmp_path / "store", make_documents(4))
    assert_same(open_store(tmp_path / "store"), make_documents(3))

    def race():
        with StoreWriter(tmp_path / "other", PIECES, "a test") as writer:
            writer.append(make_documents()[0])
            write(tmp_path / "other", make_documents(3))

    with refused("folder", str(tmp_path / "other"), "exists"):
        race()
    assert_same(open_store(tmp_path / "other"), make_documents(3))
    assert sorted(os.listdir(tmp_path)) == ["other", "store"]


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "store").mkdir()
    write(tmp_path / "store", make_documents())
    assert_same(open_store(tmp_path / "store"), make_documents())


def test_no_text_is_no_store(tmp_path):
    with refused("documents", 0, "missing"):
        write(tmp_path / "store", [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("token", [50, -1])
def test_tokens_outside_the_vocabulary_are_a_bug(tmp_path, token):
    with refused("document.tokens", (token, token), "value"):
        write(tmp_path / "store", [Document(np.asarray([token], np.int32), np.zeros(1, int))])


def test_a_disk_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with troubled(str(tmp_path / "file/store"), code="resource"):
        write(tmp_path / "file/store", make_documents())


@pytest.mark.parametrize(
    ("folder", "default", "flag"),
    [
        ("books", None, ""),
        ("lbopt_text/books", None, " --data_dir={}"),
        ("lbopt_text/books", "{}", ""),
    ],
)
def test_a_missing_store_names_the_command(folder, default, flag, tmp_path, monkeypatch):
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    if default:
        monkeypatch.setenv("TFDS_DATA_DIR", default.format(tmp_path))
    with troubled("builder", "books", "missing") as caught:
        open_store(tmp_path / folder)
    command = f"lbopt prepare text --name=books --folder=DIR{flag.format(tmp_path)} (or"
    assert command in str(caught.value)


def test_a_folder_without_a_description_is_no_store(tmp_path):
    write(tmp_path / "store", make_documents())
    (tmp_path / "store/store.json").unlink()
    with troubled("builder", "store", "missing") as caught:
        open_store(tmp_path / "store")
    assert "lbopt prepare" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokens.bin", "sentences.bin", "documents.bin"])
def test_a_truncated_file_is_named(tmp_path, name):
    write(tmp_path / "store", make_documents())
    path = tmp_path / "store" / name
    path.write_bytes(path.read_bytes()[:-2])
    with troubled(str(path), code="damaged"):
        open_store(tmp_path / "store")


def test_a_missing_file_is_named(tmp_path):
    write(tmp_path / "store", make_documents())
    (tmp_path / "store/tokens.bin").unlink()
    with troubled(str(tmp_path / "store"), code="resource") as caught:
        open_store(tmp_path / "store")
    assert "tokens.bin" in str(caught.value)


def test_another_vocabulary_file_is_noticed(tmp_path):
    write(tmp_path / "store", make_documents())
    (tmp_path / "store/vocab.txt").write_text("a\n" * 50)
    with troubled(str(tmp_path / "store/vocab.txt"), code="damaged"):
        open_store(tmp_path / "store")


@pytest.mark.parametrize("device", ["/dev/zero", None])
def test_no_fifo_and_no_device_is_read_in_the_place_of_the_vocabulary(device, tmp_path):
    write(tmp_path / "store", make_documents())
    file = tmp_path / "store/vocab.txt"
    file.unlink()
    file.symlink_to(device) if device else os.mkfifo(file)
    with troubled(str(tmp_path / "store"), code="resource") as caught:
        open_store(tmp_path / "store")
    assert {str(file), "device" if device else "FIFO"} <= names_in(caught)


def test_documents_that_do_not_follow_each_other_are_damaged(tmp_path):
    write(tmp_path / "store", make_documents())
    file = tmp_path / "store/documents.bin"
    file.write_bytes(bytes(file.stat().st_size - 8) + file.read_bytes()[-8:])
    with troubled(str(file), code="damaged"):
        open_store(tmp_path / "store")


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1}', "{}"])
def test_a_damaged_description_is_named(tmp_path, text):
    write(tmp_path / "store", make_documents())
    (tmp_path / "store/store.json").write_text(text)
    with troubled(str(tmp_path / "store/store.json"), code="damaged"):
        open_store(tmp_path / "store")


def test_another_format_is_named(tmp_path):
    write(tmp_path / "store", make_documents())
    (tmp_path / "store/store.json").write_text('{"format": 3}')
    with troubled(f"{tmp_path / 'store/store.json'}: format", 3, "mismatch"):
        open_store(tmp_path / "store")


def test_another_vocabulary_size_is_refused(tmp_path):
    write(tmp_path / "store", make_documents())
    with refused("expected_vocab_size", 60, "mismatch"):
        open_store(tmp_path / "store", expected_vocab_size=60)


def test_parts_share_nothing_and_are_the_whole():
    documents = make_documents(60)
    store = gather_documents(documents)
    parts = split_store(store, 10, 15)
    numbers = [part.chosen.tolist() for part in parts]
    assert numbers[1] == [9, 19, 29, 39, 49, 59]
    assert numbers[2] == [13, 28, 43, 58]
    assert sorted(number for part in numbers for number in part) == list(range(60))
    for part, chosen in zip(parts, numbers, strict=True):
        assert_same(part, [documents[number] for number in chosen])
        assert part.tokens is store.tokens
        assert (part.stops - part.starts).tolist() == [
            len(documents[number].tokens) for number in chosen
        ]


def test_a_view_of_a_view():
    documents = make_documents(10)
    view = gather_documents(documents).select(np.asarray([1, 3, 5, 7])).select(np.asarray([0, 3]))
    assert_same(view, [documents[1], documents[7]])
    with pytest.raises(IndexError):
        view[2]


def test_too_few_documents_for_three_parts():
    with refused("validation_every", 200, "value"):
        split_store(gather_documents(make_documents(60)))


SPLITS = {"train": 2, "validation": 1, "test": 1}


def write_bytes(folder):
    """Write a store of byte-level tokens; return its documents without their ends."""
    pairs = learn_byte_pairs(["ab ab abc"], 260)
    documents = [pairs.encode_many([text])[0] for text in ("ab", "abc a", "c", "b ab")]
    with StoreWriter(folder, pairs.pieces, "a test", byte_pairs=pairs) as writer:
        for tokens in documents:
            writer.append(Document(np.append(tokens, pairs.end), np.zeros(1, np.int64)))
        writer.about = {"splits": SPLITS}
    return documents, pairs


def test_a_store_of_bytes_has_its_tokenizer_and_its_splits(tmp_path):
    documents, pairs = write_bytes(tmp_path / "store")
    store = open_store(tmp_path / "store", len(pairs.pieces))
    assert (store.tokenizer_json, store.pieces) == (pairs.tokenizer_json, pairs.pieces)
    np.testing.assert_array_equal(store.token_bytes, pairs.num_bytes)
    end = [pairs.end]
    joined = [
        np.concatenate([end, *((part, end)[n] for part in parts for n in (0, 1))])
        for parts in (documents[:2], documents[2:3], documents[3:])
    ]
    for found, wanted in zip(store.split_texts(), joined, strict=True):
        np.testing.assert_array_equal(found, wanted)
        assert not found.flags.owndata
    assert_same(store, [Document(np.append(part, end), np.zeros(1, int)) for part in documents])
    assert read_about(tmp_path / "store")["splits"] == SPLITS


def test_the_bytes_of_a_token_are_those_that_it_decodes_to(tmp_path):
    _, pairs = write_bytes(tmp_path / "store")
    store = open_store(tmp_path / "store")
    tokenizer = tokenizers.Tokenizer.from_str(store.tokenizer_json)
    for text in ("ab abc", "naïve \U0001f600"):
        tokens = tokenizer.encode(text).ids
        assert store.token_bytes[tokens].sum() == len(text.encode())
    assert store.token_bytes[pairs.end] == 0
    names = ["documents.bin", "sentences.bin", "store.json", "tokenizer.json", "tokens.bin"]
    assert sorted(os.listdir(tmp_path / "store")) == names


@pytest.mark.parametrize(
    ("file", "spoil"),
    [
        ("tokenizer.json", lambda content: content.replace(b"merges", b"Merges")),
        ("store.json", lambda content: content.replace(b'"vocab_size": 2', b'"vocab_size": 3')),
        ("store.json", lambda content: content.replace(b'"train": 2', b'"train": 3')),
        ("store.json", lambda content: content.replace(b'"train": 2', b'"trein": 2')),
        ("documents.bin", lambda content: bytes(8) + content[8:]),
    ],
)
def test_a_damaged_store_of_bytes(tmp_path, file, spoil):
    write_bytes(tmp_path / "store")
    path = tmp_path / "store" / file
    path.write_bytes(spoil(path.read_bytes()))
    with troubled(str(path), code="damaged"):
        open_store(tmp_path / "store")
