"""What Hugging Face's `datasets` saved is read where it lies; its own reader is the oracle."""

import pickle

import datasets
import numpy as np
import pytest
from PIL import Image
from refusal import refused

from lbopt.config import ArraysConfig, ImageFolderConfig, TrainConfig
from lbopt.data.from_config import load_source
from lbopt.data.own import _load, load_arrays, open_images
from lbopt.data.own._joined import JoinedArrays
from lbopt.data.own._saved import SavedTable

FEATURES = datasets.Features(
    {
        "kind": datasets.ClassLabel(names=["a", "b", "c"]),
        "number": datasets.Value("float32"),
        "flag": datasets.Value("bool"),
        "ids": datasets.List(datasets.Value("int64")),
        "fixed": datasets.List(datasets.Value("float64"), length=3),
        "grid": datasets.Array2D((2, 3), "float32"),
        "text": datasets.Value("string"),
        "ragged": datasets.List(datasets.Value("int32")),
    }
)
NUMBERS = ("number", "flag", "ids", "fixed", "grid")


@pytest.fixture(autouse=True)
def no_bars():
    datasets.disable_progress_bars()


def made(count, start=0):
    rng = np.random.default_rng(start)
    rows = {
        "kind": [(start + n) % 2 for n in range(count)],
        "number": [float(start + n) for n in range(count)],
        "flag": [n % 2 == 0 for n in range(count)],
        "ids": [[start + n, 2, 3, 4] for n in range(count)],
        "fixed": rng.normal(size=(count, 3)).tolist(),
        "grid": rng.normal(size=(count, 2, 3)).tolist(),
        "text": [f"text {n}" for n in range(count)],
        "ragged": [[1] * (n % 3) for n in range(count)],
    }
    return datasets.Dataset.from_dict(rows, features=FEATURES)


@pytest.fixture
def saved(tmp_path):
    """Save two splits, the training one in two files of several record batches."""
    train = datasets.concatenate_datasets([made(150), made(150, 150)])
    folder = tmp_path / "saved"
    whole = datasets.DatasetDict({"train": train, "validation": made(10, 300)})
    whole.save_to_disk(str(folder), num_shards={"train": 2, "validation": 1})
    return folder


@pytest.mark.parametrize("in_memory", [True, False])
def test_columns_are_those_of_datasets(saved, in_memory, monkeypatch):
    if not in_memory:
        monkeypatch.setattr(_load, "_LARGEST_IN_MEMORY_BYTES", 0)
    found = load_arrays(saved, target="kind", features=NUMBERS, normalize=False)
    assert (found.task, found.outputs, found.class_names) == ("classification", 3, ("a", "b", "c"))
    assert found.features == NUMBERS
    assert [len(split) for split in found.splits] == [269, 10, 31]

    oracle = datasets.load_from_disk(str(saved)).with_format("numpy")
    every = np.arange(10)
    batch = found.splits.validation.take(every)
    assert set(batch) == {*NUMBERS, "kind"}
    for name, array in batch.items():
        assert array.dtype in (np.float32, np.int32, bool)
        np.testing.assert_allclose(array, oracle["validation"][:][name], rtol=1e-6)
    train = found.splits.train.take(np.arange(269))
    rows = train["number"].astype(int)
    for name in NUMBERS:
        np.testing.assert_allclose(train[name], oracle["train"][:][name][rows], rtol=1e-6)


def test_numbers_are_read_where_they_lie(saved):
    columns = SavedTable(saved).columns()
    assert isinstance(columns["fixed"], JoinedArrays)
    part = columns["fixed"]._parts[0]
    assert not part.flags.writeable
    assert not part.flags.owndata
    np.testing.assert_array_equal(columns["fixed"][[5, 305, 5]][0], columns["fixed"][5])
    assert columns["number"][[3, 1, 305]].tolist() == [3, 1, 305]
    assert columns["number"][2:4].tolist() == [2, 3]
    assert np.asarray(columns["number"]).tolist() == list(range(310))
    mask = np.arange(310) > 308
    assert columns["number"][mask].tolist() == [309]


def test_a_text_column_may_be_the_target_or_the_split(tmp_path):
    words = ["left", "right"] * 5
    parts = ["train"] * 6 + ["validation"] * 2 + ["test"] * 2
    rows = {"x": np.arange(10.0), "side": words, "part": parts}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "one"))
    found = load_arrays(tmp_path / "one", target="side", split_column="part", normalize=False)
    assert found.class_names == ("left", "right")
    assert found.splits.test.arrays["x"].tolist() == [8, 9]


@pytest.mark.parametrize(
    ("features", "words"), [((), "text"), (("number", "ragged"), "lengths"), (("gone",), "")]
)
def test_columns_of_no_numbers_are_refused_by_name(features, words, saved):
    field = "data.features"
    with refused(field, code="choice" if features == ("gone",) else "type") as caught:
        load_source(ArraysConfig(str(saved), target="kind", features=features))
    assert words in str(caught.value)


def picture(number):
    return Image.fromarray(np.full((8, 8, 3), number, np.uint8))


@pytest.fixture
def pictures(tmp_path):
    kind = datasets.ClassLabel(names=["dark", "bright"])
    features = {"img": datasets.Image(), "fine": kind, "coarse": kind, "id": FEATURES["number"]}
    rows = {
        "img": [picture(n) for n in range(20)],
        "fine": [int(n >= 10) for n in range(20)],
        "coarse": [0] * 20,
        "id": list(range(20)),
    }
    whole = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    whole.save_to_disk(str(tmp_path / "pictures"))
    return tmp_path / "pictures"


def test_images_keep_the_names_of_their_columns(pictures):
    settings = TrainConfig()
    settings.data = str(pictures)
    assert settings.data == ImageFolderConfig(str(pictures))
    for crop in ("resized", "none"):
        given = ImageFolderConfig(str(pictures), target="fine", train_crop=crop)
        source = load_source(given)
        assert (source.features, source.target) == (("img",), "fine")
        assert source.class_names == ("dark", "bright")
        for split in source.splits:
            batch = split.take(np.arange(len(split)))
            values = batch["img"][:, 4, 4, 0]
            assert batch["fine"].tolist() == (values >= 10).tolist()
        drawn = source.splits.train.draw(np.arange(3), np.zeros(3, int), 0)
        assert drawn["img"].shape == (3, 8, 8, 3)
    records = open_images(pictures, "fine").records
    assert pickle.loads(pickle.dumps(records))[7] == records[7]


@pytest.mark.parametrize(
    ("fields", "field", "code"),
    [
        ({}, "target", "missing"),
        ({"target": "id"}, "target", "choice"),
        ({"target": "fine", "features": ("id",)}, "features", "choice"),
    ],
)
def test_columns_of_images_are_named_where_there_are_several(fields, field, code, pictures):
    with refused(f"data.{field}", code=code):
        load_source(ImageFolderConfig(str(pictures), **fields))


def test_damaged_folders_and_unknown_splits_are_refused(saved, tmp_path):
    with refused("data.target", code="choice"):
        load_source(ArraysConfig(str(saved), target="gone"))
    (file, _) = sorted((saved / "train").glob("*.arrow"))
    file.write_bytes(file.read_bytes()[:100])
    with refused("data.path", str(saved), "damaged"):
        load_source(ArraysConfig(str(saved), target="kind"))
    (saved / "dataset_dict.json").write_text("[]")
    with refused("data.path", str(saved), "damaged"):
        load_source(ArraysConfig(str(saved), target="kind"))
    datasets.DatasetDict({"train": made(9), "dev": made(3)}).save_to_disk(str(tmp_path / "dev"))
    with refused("data.path", code="choice"):
        load_source(ArraysConfig(str(tmp_path / "dev"), target="kind"))
