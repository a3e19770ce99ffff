"""Records read straight from their messages are those that TFDS makes of them."""

import json
import os
import pickle
import shutil

import numpy as np
import pytest
import tensorflow_datasets as tfds
from tfds_sets import write, write_images

from lbopt.data import TfdsFolder
from lbopt.data._damaged import DamagedRecord
from lbopt.data._records import read_record
from lbopt.errors import EnvironmentProblem, UserError


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
        with pytest.raises(DamagedRecord, match="its label is"):
            read_record(records, index, 2)
    with pytest.raises(DamagedRecord, match="cannot be read"):
        read_record(records, 99, 2)


@pytest.mark.parametrize("name", ["nothing", "mixed:9.9.9", "mixed/config"])
def test_what_is_not_there_says_the_command(name, root):
    with pytest.raises(
        EnvironmentProblem, match=rf"config.data.builder = '{name}'.*lbopt prepare {name}"
    ):
        TfdsFolder(name, str(root))


def test_what_is_no_split_lists_those_that_are(root):
    folder = TfdsFolder("pictures", str(root))
    for split in ("validation", "train[:", "train[:0]"):
        with pytest.raises(UserError, match=r"config.data.train_split = .*train.*5.*"):
            folder.open(split, "config.data.train_split")


def test_another_format_is_refused(root, tmp_path):
    folder = shutil.copytree(root / "mixed" / "1.10.0", tmp_path / "mixed" / "1.10.0")
    file = folder / "dataset_info.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "fileFormat": "tfrecord"}))
    with pytest.raises(EnvironmentProblem, match="in the format tfrecord"):
        TfdsFolder("mixed", str(tmp_path))
    file.write_text("{")
    with pytest.raises(EnvironmentProblem, match="is damaged"):
        TfdsFolder("mixed", str(tmp_path))
    (folder / "features.json").unlink()
    os.mkfifo(folder / "features.json")
    with pytest.raises(EnvironmentProblem, match=r"is damaged .* a FIFO, not a regular file"):
        TfdsFolder("mixed", str(tmp_path))
