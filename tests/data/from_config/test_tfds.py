"""Data sets of TFDS with fields of any name, as TFDS wrote them."""

import io

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image
from refusal import refused, troubled
from tfds_sets import write

from lbopt.config import TfdsConfig, TrainConfig
from lbopt.data.from_config import _tfds_roles, load_source
from lbopt.recipes import with_layout

COUNTS = {"train": 12, "validation": 3, "test": 5}


def records(count):
    rng = np.random.default_rng(count)
    for number in range(count):
        yield {
            "size": rng.normal(size=3).astype(np.float32),
            "rooms": number,
            "price": np.float32(2 * number),
            "kind": number % 2,
            "note": "good",
        }


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    features = {
        "size": tfds.features.Tensor(shape=(3,), dtype=np.float32),
        "rooms": tfds.features.Scalar(np.int64),
        "price": tfds.features.Scalar(np.float32),
        "kind": tfds.features.ClassLabel(names=["flat", "house"]),
        "note": tfds.features.Text(),
    }
    whole = {split: list(records(n)) for split, n in COUNTS.items()}
    write(folder, "homes", whole, features)
    write(folder, "stated", whole, features, supervised=("size", "price"))

    def photos(count):
        for number in range(count):
            stream = io.BytesIO()
            Image.new("RGB", (8, 8), (number, 100, 200)).save(stream, "PNG")
            yield {"photo": io.BytesIO(stream.getvalue()), "kind": number % 3 == 0}

    features = {
        "photo": tfds.features.Image(shape=(8, 8, 3), encoding_format="png"),
        "kind": tfds.features.ClassLabel(num_classes=2),
    }
    write(folder, "photos", {split: list(photos(n)) for split, n in COUNTS.items()}, features)
    return str(folder)


@pytest.mark.parametrize(
    ("fields", "task", "target", "outputs"),
    [
        ({"features": ("size", "rooms")}, "classification", "kind", 2),
        ({"target": "price", "features": ("size",)}, "regression", "price", 1),
    ],
)
def test_tensors_have_the_task_of_their_target(fields, task, target, outputs, data_dir):
    source = load_source(TfdsConfig("homes", data_dir=data_dir, normalize=False, **fields))
    assert (source.task, source.target, source.outputs) == (task, target, outputs)
    assert source.features == fields["features"]
    assert source.class_names == (("flat", "house") if target == "kind" else ())
    for split, count in COUNTS.items():
        batch = getattr(source.splits, split).take(np.arange(count))
        for name in (*source.features, target):
            wanted = np.stack([record[name] for record in records(count)])
            np.testing.assert_array_equal(batch[name], wanted)
    assert batch["kind" if target == "kind" else "price"].dtype in (np.int32, np.float32)


def test_a_recipe_reads_tensors(data_dir):
    """It chooses the layout of images, which are read the same way, for every data set of TFDS."""
    settings = TrainConfig(data=TfdsConfig("homes", data_dir=data_dir, features=("size",)))
    chosen = with_layout(settings, "cpu").data
    assert load_source(chosen).features == ("size",)


def test_the_input_and_the_target_may_be_stated_by_the_data_set(data_dir):
    source = load_source(TfdsConfig("stated", data_dir=data_dir))
    assert (source.task, source.features, source.target) == ("regression", ("size",), "price")
    chosen = load_source(TfdsConfig("stated", "kind", data_dir=data_dir, features=("rooms",)))
    assert (chosen.task, chosen.features) == ("classification", ("rooms",))


@pytest.mark.parametrize("crop", ["resized", "none"])
def test_images_of_any_name_are_found_by_their_kind(crop, data_dir):
    settings = TrainConfig()
    settings.data = "tfds:photos"
    assert settings.data == TfdsConfig("photos")
    settings.data.data_dir = data_dir
    settings.data.train_crop = crop
    settings.data.train_split = "train[:6]"
    settings.validate()
    source = load_source(settings.data)
    assert (source.task, source.features, source.target) == ("classification", ("photo",), "kind")
    batch = source.splits.train.take(np.arange(6))
    assert batch["photo"][:, 4, 4, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert batch["kind"].tolist() == [1, 0, 0, 1, 0, 0]
    mean, std = source.pixel_scale
    assert mean == pytest.approx((2.5 / 255, 100 / 255, 200 / 255))
    assert std[0] == pytest.approx(np.std(range(6)) / 255, rel=1e-4)


@pytest.mark.parametrize(
    ("builder", "fields", "field", "code"),
    [
        ("homes", {}, "features", "type"),  # the note is text
        ("homes", {"target": "cost"}, "target", "choice"),
        ("homes", {"features": ("cost",)}, "features", "choice"),
        ("homes", {"features": ("size",), "flip": False}, "flip", "unused"),
        ("homes", {"features": ("size",), "image_size": 8}, "image_size", "unused"),
        ("homes", {"features": ("size",), "test_split": "dev"}, "test_split", "choice"),
        ("photos", {"task": "regression"}, "task", "conflict"),
        ("photos", {"outputs": 3}, "outputs", "mismatch"),
    ],
)
def test_fields_that_do_not_fit_are_refused(builder, fields, field, code, data_dir):
    with refused(f"data.{field}", code=code):
        load_source(TfdsConfig(builder, data_dir=data_dir, **fields))


def test_what_is_missing_or_too_large_is_named(data_dir, monkeypatch):
    with troubled("data.builder", "gone", "missing"):
        load_source(TfdsConfig("gone", data_dir=data_dir))
    monkeypatch.setattr(_tfds_roles, "_LARGEST_IN_MEMORY_BYTES", 100)
    with refused("data.builder", "homes", "resource"):
        load_source(TfdsConfig("homes", data_dir=data_dir, features=("size",)))
