"""Records parsed from their stored messages equal those of TFDS; missing and damaged data."""

import json
import os
import pickle
import shutil

import numpy as np
import pytest
import tensorflow_datasets as tfds
from refusal import names_in, refused, troubled
from tfds_sets import write, write_images

from lbopt.data import TfdsFolder
from lbopt.data._damaged import DamagedRecord
from lbopt.data._records import read_record


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    files = [(bytes([255, 216, number]), min(number - 1, 2)) for number in range(5)]
    write_images(folder, "pictures", {"train": files, "test": files[:2]}, 3)
    kinds = {
        "text": tfds.features.Text(),
        "numbers": tfds.features.Tensor(shape=(2,), dtype=np.int64),
    }
    write(folder, "mixed", {"train": [{"text": "a", "numbers": [1, 2]}]}, kinds, version="1.2.3")
    write(
        folder, "mixed", {"train": [{"text": "b", "numbers": [3, 4]}] * 2}, kinds, version="1.10.0"
    )
    return folder


def test_plain_records_are_those_of_tfds(root):
    ours = TfdsFolder("pictures", str(root)).open("train[1:]", "field", encoded=("image",))
    builder = tfds.builder_from_directory(root / "pictures" / "1.0.0")
    theirs = builder.as_data_source(
        split="train[1:]", decoders={"image": tfds.decode.SkipDecoding()}
    )
    assert len(ours) == len(theirs) == 4
    for mine, other in zip((ours[index] for index in range(4)), theirs, strict=True):
        assert mine == other
        assert {name: type(value) for name, value in mine.items()} == {
            "image": bytes,
            "label": int,
            "file_name": bytes,
        }
    again = pickle.loads(pickle.dumps(ours))
    assert again[3] == ours[3]


def test_other_records_go_through_tfds(root):
    folder = TfdsFolder("mixed", str(root))
    record = folder.open("train", "field")[1]
    assert record["text"] == b"b"
    np.testing.assert_array_equal(record["numbers"], [3, 4])


def test_the_newest_version_is_taken_unless_one_is_named(root):
    assert TfdsFolder("mixed", str(root)).num_examples == {"train": 2}
    assert TfdsFolder("mixed:1.2.3", str(root)).num_examples == {"train": 1}


def test_a_label_out_of_range_is_damage(root):
    records = TfdsFolder("pictures", str(root)).open("train", "field", encoded=("image",))
    assert read_record(records, 1, 2)["label"] == 0
    for index in (0, 3, 4):
        with pytest.raises(DamagedRecord, match=str(records[index]["label"])):
            read_record(records, index, 2)
    with pytest.raises(DamagedRecord):
        read_record(records, 99, 2)


@pytest.mark.parametrize("name", ["nothing", "mixed:9.9.9", "mixed/config"])
def test_a_missing_data_set_names_the_command(name, root):
    with troubled("builder", name, "missing") as caught:
        TfdsFolder(name, str(root))
    assert f"lbopt prepare {name}" in str(caught.value)  # a command to type


@pytest.mark.parametrize("split", ["validation", "train[:", "train[:0]"])
def test_an_unknown_or_empty_split_is_refused_with_the_known_ones(split, root):
    with refused("train_split", split, "choice") as caught:
        TfdsFolder("pictures", str(root)).open(split, "train_split")
    assert {"train", "5"} <= names_in(caught)


def test_another_format_is_refused(root, tmp_path):
    folder = shutil.copytree(root / "mixed" / "1.10.0", tmp_path / "mixed" / "1.10.0")
    file = folder / "dataset_info.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "fileFormat": "tfrecord"}))
    with troubled(str(folder), code="type") as caught:
        TfdsFolder("mixed", str(tmp_path))
    assert "tfrecord" in str(caught.value)
    file.write_text("{")
    with troubled(str(folder), code="damaged"):
        TfdsFolder("mixed", str(tmp_path))
    (folder / "features.json").unlink()
    os.mkfifo(folder / "features.json")
    with troubled(str(folder), code="damaged") as caught:
        TfdsFolder("mixed", str(tmp_path))
    assert "FIFO" in names_in(caught)
