"""Folders of images become the same splits as files, as records, and as one text."""

import io
import itertools
import pathlib
import pickle

import numpy as np
import pytest
from PIL import Image
from refusal import refused, troubled

from lbopt.cli import load_config
from lbopt.config import ArraysConfig, ImageFolderConfig, TfdsConfig, TrainConfig
from lbopt.data import DAMAGED
from lbopt.data.from_config import load_source
from lbopt.data.own import holds_images, open_images
from lbopt.data.prepare import _image_folder, _requirements, prepare_image_folder

CLASSES = ("ant", "bee", "cat")
COUNT = 10


def picture(number):
    """Return an image of one colour, whose red tells its number."""
    return Image.new("RGB", (8, 8), (number, 100, 200))


@pytest.fixture
def flowers(tmp_path):
    """Make ten PNGs in each class folder; image n of all is the n-th by class and name."""
    root = tmp_path / "flowers"
    for place, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for number in range(COUNT):
            picture(COUNT * place + number).save(root / name / f"{number}.png")
    (root / "README.txt").write_text("not an image")
    (root / "cat" / ".DS_Store").write_text("")
    return root


def config(root, **fields):
    return ImageFolderConfig(str(root), image_size=8, eval_fraction=1.0, **fields)


def reds(split):
    """Return the numbers that the colours of a split tell, and its labels."""
    batch = split.take(np.arange(len(split)))
    return batch["image"][:, 4, 4, 0].tolist(), batch["label"].tolist()


def test_drawn_splits_have_every_image_once_and_equal_shares(flowers):
    source = load_source(config(flowers, validation_fraction=0.2, test_fraction=0.3))
    assert source.class_names == CLASSES
    assert [len(split) for split in source.splits] == [15, 6, 9]
    numbers, labels = zip(*map(reds, source.splits), strict=True)
    assert sorted(itertools.chain(*numbers)) == list(range(30))
    assert np.bincount(labels[2]).tolist() == [3, 3, 3]
    for split in range(3):
        assert labels[split] == [number // COUNT for number in numbers[split]]

    # Statistics are those of the training images in [0, 1]; green and blue do not vary.
    mean, std = source.pixel_scale
    red = np.asarray(numbers[0]) / 255
    assert mean == pytest.approx((red.mean(), 100 / 255, 200 / 255))
    assert std == pytest.approx((red.std(), 1, 1), rel=1e-4)


def test_stated_splits_are_kept_and_those_that_lack_are_drawn(flowers, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    flowers.rename(root / "train")
    (root / "train" / "README.txt").unlink()
    (root / "val" / "bee").mkdir(parents=True)
    picture(77).save(root / "val" / "bee" / "x.JPG", "PNG")
    source = load_source(config(root, test_fraction=0.1))
    assert reds(source.splits.validation) == ([77], [1])
    assert [len(split) for split in source.splits] == [27, 1, 3]


def test_a_class_may_be_called_train(flowers):
    (flowers / "bee").rename(flowers / "train")
    assert load_source(config(flowers)).class_names == ("ant", "cat", "train")


def test_a_prepared_folder_gives_the_batches_of_the_files(flowers, tmp_path):
    (flowers / "cat" / "3.png").write_bytes(b"")  # written as it is; reading decides
    prepared = prepare_image_folder(flowers, None, str(tmp_path / "data"))
    assert (prepared.name, prepared.made) == ("flowers", True)
    folder = prepared.folder.folder
    fields = {"max_damaged_records": 1, "crop_area": (0.5, 1.0)}
    sources = [load_source(config(root, **fields)) for root in (flowers, folder)]
    assert sources[0].pixel_scale == sources[1].pixel_scale
    assert sources[0].class_names == sources[1].class_names
    for one, other in zip(*(source.splits for source in sources), strict=True):
        every = np.arange(len(one))
        pickled = pickle.loads(pickle.dumps(other)) if one is sources[0].splits.test else other
        for batch, same in (
            (one.take(every), pickled.take(every)),
            (one.draw(every, every, 5), other.draw(every, every, 5)),
        ):
            assert batch.keys() == same.keys()
            damaged = batch.pop(DAMAGED), same.pop(DAMAGED)
            assert [index for index, _ in damaged[0]] == [index for index, _ in damaged[1]]
            for name in batch:
                np.testing.assert_array_equal(batch[name], same[name])

    for path in (folder, folder.parent):
        assert holds_images(path)
        assert open_images(path).class_names == CLASSES
    again = prepare_image_folder(flowers, "flowers", str(tmp_path / "data"))
    assert not again.made
    (flowers / "cat" / "3.png").write_bytes(b"more")
    with troubled("images", str(flowers), "exists"):
        prepare_image_folder(flowers, "flowers", str(tmp_path / "data"))
    assert prepare_image_folder(flowers, "other", str(tmp_path / "data")).made


def test_records_are_written_in_order_to_shards_of_bounded_size(flowers, tmp_path, monkeypatch):
    monkeypatch.setattr(_image_folder, "_SHARD_BYTES", 500)
    monkeypatch.setattr(_image_folder, "_AT_A_TIME", 7)
    folder = prepare_image_folder(flowers, None, str(tmp_path / "data")).folder
    assert len(list(folder.folder.glob("*.array_record*"))) > 3
    records = open_images(folder.folder).records
    found = [Image.open(io.BytesIO(records[n]["image"])).getpixel((0, 0))[0] for n in range(30)]
    assert found == list(range(30))
    assert records[13]["file_name"] == b"bee/3.png"


def test_what_fails_halfway_leaves_nothing(flowers, tmp_path):
    def stop(examples, total):
        assert total == 30
        (flowers / "cat" / "9.png").unlink()  # after it was listed
        yield from examples

    with troubled("name", "flowers", "resource"):
        prepare_image_folder(flowers, None, str(tmp_path / "data"), stop)
    assert not list((tmp_path / "data" / "flowers").iterdir())
    assert prepare_image_folder(flowers, None, str(tmp_path / "data")).made


def test_a_disk_that_is_too_small_is_refused_first(flowers, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr(_requirements.shutil, "disk_usage", lambda folder: usage)
    with troubled("name", "flowers", "resource"):
        prepare_image_folder(flowers, None, str(tmp_path / "data"))
    assert not (tmp_path / "data").exists()


def test_one_text_means_images_where_class_folders_hold_some(flowers, tmp_path):
    settings = TrainConfig()
    settings.data = f"{flowers}/"
    assert settings.data == ImageFolderConfig(f"{flowers}/")
    (tmp_path / "arrays" / "train").mkdir(parents=True)
    np.save(tmp_path / "arrays" / "train" / "x.npy", np.ones(3))
    for path in (f"{tmp_path}/arrays", f"{tmp_path}/absent", "gs://bucket/x"):
        settings.data = path
        assert settings.data == ArraysConfig(path)


def test_images_of_one_size_need_no_size_and_may_be_held_in_memory(flowers):
    for crop in ("resized", "padded", "none"):
        found = load_source(ImageFolderConfig(str(flowers), train_crop=crop))
        assert found.splits.train.take(np.arange(2))["image"].shape == (2, 8, 8, 3)
    Image.new("RGB", (9, 8)).save(flowers / "bee" / "0.png")
    for crop, field in (("resized", "image_size"), ("none", "train_crop")):
        with refused(f"data.{field}", code="missing" if crop == "resized" else "mismatch"):
            load_source(ImageFolderConfig(str(flowers), train_crop=crop))


def test_images_of_one_size_that_are_no_squares_need_a_size(tmp_path):
    (tmp_path / "one").mkdir()
    for number in range(10):
        Image.new("RGB", (9, 8)).save(tmp_path / "one" / f"{number}.png")
    for crop, code in (("resized", "missing"), ("none", "mismatch")):
        with refused("data.image_size", code=code):
            load_source(ImageFolderConfig(str(tmp_path), train_crop=crop))


def test_a_damaged_image_is_counted_and_named(flowers):
    file = flowers / "ant" / "0.png"
    file.write_bytes(file.read_bytes()[:40])
    with troubled("data.max_damaged_records", 0, "damaged") as caught:
        load_source(ImageFolderConfig(str(flowers), train_crop="none", split_seed=3))
    assert str(file) in str(caught.value)
    source = load_source(config(flowers, max_damaged_records=1, split_seed=3))
    train = source.splits.train
    damaged = train.take(np.arange(len(train)))[DAMAGED]
    ((index, reason),) = damaged
    assert str(file) in reason
    train.damaged.add(index, reason)
    with troubled("data.max_damaged_records", 1, "damaged"):
        train.damaged.add(index + 1, reason)


def test_a_class_that_tfds_cannot_name_is_not_written(flowers, tmp_path):
    (flowers / "bee").rename(flowers / "bee ")
    assert load_source(config(flowers)).class_names == ("ant", "bee ", "cat")
    with refused("images", str(flowers)):
        prepare_image_folder(flowers, None, str(tmp_path / "data"))


def test_statistics_are_measured_or_given_by_flags(flowers, tmp_path):
    file = tmp_path / "conf.py"
    file.write_text("from lbopt.config import *\ndef get_config(arg): return TrainConfig()\n")
    given = [f"--config.data={flowers}", "--config.data.image_size=8"]
    assert load_config(str(file), given, TrainConfig).data.pixel_mean == ()
    numbers = ["--config.data.pixel_mean=(0.5,)", "--config.data.pixel_std=(0.25,)"]
    for flags in (given + numbers, numbers + given):
        assert load_config(str(file), flags, TrainConfig).data.pixel_std == (0.25,)
    named = load_config(str(file), ["--config.data=tfds:iris"], TrainConfig)
    assert named.data == TfdsConfig("iris")


def spoiled(root, how):
    if how == "empty class":
        (root / "dog").mkdir()
    elif how == "text in class":
        (root / "cat" / "notes.txt").write_text("")
    elif how == "beside":
        picture(0).save(root / "beside.png")
    elif how == "deep":
        (root / "cat" / "more").mkdir()
    elif how == "no folder":
        for name in CLASSES:
            (root / name).rename(root.parent / name)
    elif how == "absent":
        root.rename(root.parent / "elsewhere")


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("empty class", "missing"),
        ("text in class", "type"),
        ("beside", "value"),
        ("deep", "choice"),
        ("no folder", "missing"),
        ("absent", "missing"),
    ],
)
def test_a_folder_that_is_none_of_images_is_refused(how, code, flowers):
    spoiled(flowers, how)
    with refused("data.path", code=code):
        load_source(config(flowers))


@pytest.mark.parametrize(
    ("folders", "code"),
    [
        (["val/ant", "test/ant"], "missing"),
        (["train/ant", "val/ant", "valid/ant"], "missing"),
        (["train/ant", "holdout/ant"], "choice"),
        (["train/ant", "val/bee"], "mismatch"),
    ],
)
def test_splits_that_do_not_fit_are_refused(folders, code, tmp_path):
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
        picture(0).save(tmp_path / folder / "0.png")
    with refused("data.path", code=code):
        load_source(config(tmp_path))


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"target": "label"}, "unused"),
        ({"features": ("image",)}, "unused"),
        ({"task": "regression"}, "conflict"),
        ({"outputs": 4}, "mismatch"),
        ({"test_fraction": 0.0}, "value"),
    ],
)
def test_fields_that_do_not_fit_images_are_refused(fields, code, flowers):
    (field,) = fields
    with refused(f"data.{field}", code=code):
        load_source(config(flowers, **fields))


def test_statistics_may_be_given(flowers):
    given = config(flowers, pixel_mean=(0.5,), pixel_std=(0.25,))
    assert load_source(given).pixel_scale == ((0.5,), (0.25,))
    with refused("config.data.pixel_mean", code="mismatch"):
        TrainConfig(data=config(flowers, pixel_mean=(0.5,))).validate()
    assert pathlib.Path(given.path) == flowers
