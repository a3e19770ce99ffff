"""What is read from a bucket, and written to one, is what a folder would give."""

import json

import jax
import memory_buckets
import numpy as np
import pytest
import tensorflow_datasets as tfds
import torch_networks
from PIL import Image
from refusal import ANY, refused
from tfds_sets import write

from lbopt.cli import _doctor, _plan
from lbopt.config import (
    ArraysConfig,
    DataConfig,
    ImageFolderConfig,
    TrainConfig,
    config_from_json,
)
from lbopt.data import TfdsFolder
from lbopt.data.from_config import load_source
from lbopt.data.own._load import MappedArrays
from lbopt.data.prepare import prepare_image_folder
from lbopt.data.text import load_wordpiece, open_store
from lbopt.interchange import (
    load_huggingface,
    load_safetensors,
    read_safetensors_metadata,
    save_huggingface,
    save_safetensors,
)
from lbopt.models import Bert
from lbopt.recipes import _initial
from lbopt.workdir import read_config

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "The", "the", "cat", "sat", "."]


@pytest.fixture
def buckets(tmp_path, monkeypatch):
    monkeypatch.setenv("LBOPT_BUCKET_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with memory_buckets.serving() as found:
        yield found
    assert list((tmp_path / "here").iterdir()) == []


def examples(dataset):
    return dataset.take(np.arange(len(dataset)))


def test_arrays_of_a_folder_stay_on_disk(buckets, tmp_path):
    values = np.random.default_rng(0)
    for split, size in {"train": 12, "validation": 4, "test": 4}.items():
        (tmp_path / "own" / split).mkdir(parents=True)
        np.save(tmp_path / "own" / split / "x.npy", values.normal(size=(size, 3)))
        np.save(tmp_path / "own" / split / "y.npy", np.arange(size) % 2)
    buckets.fill("gs://bucket/own", tmp_path / "own")

    here = load_source(ArraysConfig(str(tmp_path / "own"))).splits
    there = load_source(ArraysConfig("gs://bucket/own/")).splits
    for ours, theirs in zip(here, there, strict=True):
        jax.tree.map(np.testing.assert_array_equal, examples(theirs), examples(ours))


def test_one_file_of_arrays_is_mapped(buckets, tmp_path, monkeypatch):
    monkeypatch.setattr("lbopt.data.own._load._LARGEST_IN_MEMORY_BYTES", 0)
    np.savez(tmp_path / "own.npz", x=np.ones((20, 3), np.float32), y=np.arange(20) % 2)
    buckets.pipe_file("gs://bucket/own.npz", (tmp_path / "own.npz").read_bytes())
    found = load_source(ArraysConfig("gs://bucket/own.npz", normalize=False)).splits.train
    assert isinstance(found, MappedArrays)
    assert isinstance(found.arrays["x"], np.memmap)


def test_a_table(buckets):
    lines = [f"{number},{number % 3}" for number in range(30)]
    buckets.pipe_file("gs://bucket/a/own.csv", "\n".join(["size,label", *lines]).encode())
    found = load_source(ArraysConfig("gs://bucket/a/own.csv"))
    assert (found.outputs, found.task, len(found.splits.train)) == (3, "classification", 24)
    buckets.pipe_file("gs://bucket/a/own.csv", b"size,label\n,1\n2,1\n")
    with refused("data.path", ANY, "damaged") as caught:
        load_source(ArraysConfig("gs://bucket/a/own.csv"))
    assert str(caught.value).startswith("data.path = 'gs://bucket/a/own.csv': ")


def test_a_folder_of_images_as_files_and_prepared(buckets, tmp_path):
    for name, red in {"dark": 0, "bright": 200}.items():
        (tmp_path / "own" / name).mkdir(parents=True)
        for number in range(10):
            picture = Image.new("RGB", (8, 8), (red + number, 0, 0))
            picture.save(tmp_path / "own" / name / f"{number}.png")
    buckets.fill("gs://bucket/own", tmp_path / "own")
    prepare_image_folder(tmp_path / "own", "own", str(tmp_path / "sets"))
    buckets.fill("gs://bucket/sets", tmp_path / "sets")

    here = load_source(ImageFolderConfig(str(tmp_path / "own"), train_crop="none"))
    for place in ("gs://bucket/own", "gs://bucket/sets/own/1.0.0"):
        there = load_source(ImageFolderConfig(place, train_crop="none"))
        assert there.pixel_scale == here.pixel_scale
        for ours, theirs in zip(here.splits, there.splits, strict=True):
            jax.tree.map(np.testing.assert_array_equal, examples(theirs), examples(ours))
    buckets.pipe_file("gs://bucket/own/dark/notes.txt", b"")
    with refused("data.path", ANY, "type") as caught:
        load_source(ImageFolderConfig("gs://bucket/own"))
    assert str(caught.value).startswith("data.path = 'gs://bucket/own/dark': ")


def test_the_newest_version_of_a_prepared_data_set(buckets, tmp_path):
    kinds = {"text": tfds.features.Text()}
    for version, text in {"1.2.3": "old", "1.10.0": "new"}.items():
        write(tmp_path / "sets", "mixed", {"train": [{"text": text}]}, kinds, version=version)
    buckets.fill("gs://bucket/sets", tmp_path / "sets")
    buckets.pipe_file("gs://bucket/sets/mixed/2.0.0/not_finished", b"")

    found = TfdsFolder("mixed", "gs://bucket/sets")
    assert found.open("train", "split")[0] == {"text": b"new"}
    assert not any("1.2.3" in name for name in buckets.copied)
    found = TfdsFolder("mixed:1.2.3", "gs://bucket/sets")
    assert found.open("train", "split")[0] == {"text": b"old"}
    with refused("builder", "other", "missing", kind=RuntimeError) as caught:
        TfdsFolder("other", "gs://bucket/sets")
    assert "gs://bucket/sets" in str(caught.value)


def test_text_prepared_from_a_bucket_and_read_from_one(buckets, lbopt, tmp_path, monkeypatch):
    buckets.pipe_file("gs://bucket/text/a.txt", b"The cat sat.\n\nThe cat sat.")
    buckets.pipe_file("gs://bucket/text/deep/b.txt", b"The dog sat.")
    buckets.pipe_file("gs://bucket/bert/vocab.txt", "\n".join(PIECES).encode())
    buckets.pipe_file("gs://bucket/bert/tokenizer_config.json", b'{"do_lower_case": false}')
    assert not load_wordpiece("gs://bucket/bert/vocab.txt").normalization.do_lower_case

    flags = ["--folder=gs://bucket/text", "--vocab=gs://bucket/bert/vocab.txt"]
    code, out, err = lbopt("prepare", "text", "--name=x", *flags, f"--data_dir={tmp_path}")
    assert code == 0, err
    assert "made from texts of text: 2 documents" in out
    assert out.endswith("tokens, cased\n")

    buckets.fill("gs://bucket/sets", tmp_path / "lbopt_text")
    here = open_store(tmp_path / "lbopt_text" / "x")
    there = open_store("gs://bucket/sets/x")
    np.testing.assert_array_equal(there.tokens, here.tokens)


def test_the_variable_names_a_bucket(buckets, tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", "gs://bucket/sets/")
    for split in ("train", "valid", "test"):
        text = " the cat sat on the <unk> mat \n" * 9
        buckets.pipe_file(f"gs://bucket/sets/ptb/ptb.{split}.txt", text.encode())
    found = load_source(DataConfig("ptb", vocab_size=7, sequence_length=4))
    assert set(found.vocabulary.pieces) == {"<eos>", "the", "cat", "sat", "on", "<unk>", "mat"}
    assert "TFDS_DATA_DIR is gs://bucket/sets," in _doctor._data()


def test_weights_are_written_and_read(buckets):
    values = {"params": {"a": np.arange(3.0, dtype=np.float32), "b": np.float32(2)}}
    for _ in range(2):  # the second one replaces the first
        save_safetensors("gs://bucket/model.safetensors", values, {"step": "3"})
    assert buckets.names() == ["bucket/model.safetensors"]
    found, metadata = load_safetensors("gs://bucket/model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, found, values)
    assert metadata["step"] == "3"
    assert read_safetensors_metadata("gs://bucket/model.safetensors") == metadata


def test_a_folder_of_transformers_is_written_and_read(buckets):
    module = Bert(vocab_size=11, num_layers=1, width=8, num_heads=2, max_length=4, inner_width=8)
    values = torch_networks.randomized_variables(module, {"input_ids": np.zeros((1, 4), int)})
    save_huggingface("gs://bucket/bert/", module, values, beside={"vocab.txt": "a\n"})
    names = [f"bucket/bert/{name}" for name in ("config.json", "model.safetensors", "vocab.txt")]
    assert buckets.names() == names
    found, back = load_huggingface("gs://bucket/bert")
    assert (found.width, found.num_layers) == (8, 1)
    jax.tree.map(np.testing.assert_array_equal, back, values)
    with refused("directory", "gs://bucket/bert", "exists"):
        save_huggingface("gs://bucket/bert", module, values)


def test_an_export_to_a_bucket_is_a_start_for_the_next_run(buckets, lbopt, refusing, trained):
    place = "gs://bucket/exports/cnn"
    flags = ["export", f"--workdir={trained}", "--format=safetensors", f"--output={place}"]
    code, out, err = lbopt(*flags)
    assert (code, out) == (0, f"{place}\n"), err
    assert buckets.names() == ["bucket/exports/cnn/model.safetensors"]

    model = config_from_json(TrainConfig, read_config(trained)["config"]).model
    found = _initial.read(f"{place}/model.safetensors", model)
    here = _initial.read(str(trained), model)
    jax.tree.map(np.testing.assert_array_equal, found["params"], here["params"])
    with refused("--output", place, "exists"):
        refusing(*flags)


def test_a_plan_is_written(buckets, capsys):
    for fits in (True, False):
        _plan._write("gs://bucket/plan.json", {"fits": fits})
        assert json.loads(buckets.cat_file("gs://bucket/plan.json")) == {"fits": fits}
    assert capsys.readouterr().out.endswith("written to gs://bucket/plan.json\n")
