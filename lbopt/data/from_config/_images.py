"""Labelled images of any data set in the format of TensorFlow Datasets (TFDS), as a config says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lbopt.config import DataConfig
from lbopt.data._arrays import Dataset, Reading, Splits
from lbopt.data._damaged import DamagedCount
from lbopt.data._records import Records, TfdsFolder
from lbopt.data.images import (
    LARGEST_IN_MEMORY_BYTES,
    ImageDataset,
    Policy,
    Preparation,
    SmallImages,
    load_image_arrays,
)
from lbopt.errors import require

_EXAMPLES_PER_SLICE = 32
"""Number of examples that one thread prepares at a time."""
_SPLIT_FIELDS = ("train_split", "validation_split", "test_split")


class NamedImages:
    """Records whose image and class have other names than `image` and `label`.

    Args:
      records: The records.
      names: Names of the image and of the class.
    """

    def __init__(self, records: Records, names: tuple[str, str]):
        self._records = records
        self._names = names

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        record = self._records[index]
        image, label = self._names
        return {**record, "image": record[image], "label": record[label]}


def load_images(
    data: DataConfig, names: tuple[str, str] = ("image", "label")
) -> tuple[Splits, tuple[str, ...]]:
    """Return the splits of a validated config, and the names of the classes.

    Args:
      data: The config.
      names: Names of the image and of the class in a record, and in a batch.

    Raises:
      UserError: If a field, named without the config's prefix, does not fit the data set.
      EnvironmentProblem: If the data set is missing or damaged.
    """
    folder = TfdsFolder(data.builder, data.data_dir)
    folder.require_features(*names)
    image, label = (folder.features[name] for name in names)
    num_classes: int = getattr(label, "num_classes", None) or 0
    fix = (
        "its label is no class; give a data set whose image and label are of TFDS's kinds Image "
        "and ClassLabel"
    )
    require(num_classes > 0, "builder", data.builder, fix, code="mismatch")

    shape = tuple(image.shape)
    fix = f"images of {data.builder} are grey; give one number"
    for field in ("pixel_mean", "pixel_std"):
        value = getattr(data, field)
        require(shape[2] != 1 or len(value) < 2, field, value, fix, code="mismatch")
    splits = Splits(*_splits(data, folder, shape, num_classes, names))
    return splits, tuple(map(str, label.names))


def _splits(
    data: DataConfig, folder: TfdsFolder, shape: tuple, num_classes: int, names: tuple[str, str]
) -> Iterator[Dataset]:
    for_evaluation: dict[str, Dataset] = {}
    for field in _SPLIT_FIELDS:
        split = getattr(data, field)
        if split in for_evaluation:  # test and validation may be one split
            yield for_evaluation[split]
            continue
        records = NamedImages(folder.open(split, field, encoded=names[:1]), names)
        # Images are read during training, when only the fields of a run get a prefix.
        limit = (data.max_damaged_records, "data.max_damaged_records")
        damaged = DamagedCount(f"{data.builder} {split}", *limit)
        training = field == "train_split"
        of_split = (num_classes, damaged, training, names)
        dataset = make_images(data, data.builder, records, shape, *of_split)
        if not training:
            for_evaluation[split] = dataset
        yield dataset


def check_task(data: DataConfig, num_classes: int) -> None:
    """Raise `UserError` unless the config leaves the task to images of some classes."""
    fix = "images are read with their classes; leave it ''"
    require(data.task in ("", "classification"), "task", data.task, fix, code="conflict")
    fix = f"there are {num_classes} classes; leave it None"
    require(data.outputs in (None, num_classes), "outputs", data.outputs, fix, code="mismatch")


def make_images(
    data: DataConfig,
    place: str,
    records: Records,
    shape: tuple,
    num_classes: int,
    damaged: DamagedCount,
    training: bool,
    names: tuple[str, str] = ("image", "label"),
) -> ImageDataset | SmallImages:
    """Return a split of labelled images, cropped and augmented as a config says.

    Args:
      data: The config.
      place: Name of the data set, for errors.
      records: Records with `image`, the bytes of a file, and `label`.
      shape: (height, width, channels) of every image; None for sides that vary.
      num_classes: Number of classes.
      damaged: Count of the damaged records.
      training: Whether this is the training split.
      names: Names of the image and of the label in a batch.

    Raises:
      UserError: If a field, named without the config's prefix, does not fit the images.
      EnvironmentProblem: If too many records are damaged.
    """
    if data.train_crop == "resized":
        return ImageDataset(
            records, num_classes, _preparation(data, shape), damaged, _reading(data), names
        )
    _check_small(data, place, len(records), shape)
    found = load_image_arrays(records, shape, num_classes, damaged)
    arrays = dict(zip(names, (found["image"], found["label"]), strict=True))
    if not training:
        return SmallImages(arrays, 0, False, Policy(), damaged, names[0])

    fix = f"images of {place} are grey; use 'none'"
    fits = data.augmentation == "none" or shape[2] == 3
    require(fits, "augmentation", data.augmentation, fix, code="mismatch")
    padding = data.crop_padding if data.train_crop == "padded" else 0
    return SmallImages(arrays, padding, data.flip, _policy(data), damaged, names[0])


def _check_small(data: DataConfig, place: str, num_records: int, shape: tuple) -> None:
    """Raise `UserError` unless all images have one size, and fit in memory."""
    fix = f"images of {place} have various sizes; use 'resized'"
    require(None not in shape, "train_crop", data.train_crop, fix, code="mismatch")
    height, width, channels = shape
    fix = (
        f"images of {place} are {height} x {width}; leave it None, or set {{train_crop}}='resized'"
    )
    fits = height == width and data.image_size in (None, height)
    also = ["train_crop"]
    require(fits, "image_size", data.image_size, fix, code="mismatch", also=also)
    size = num_records * height * width * channels
    fix = f"all images are held in memory and would take {size / 2**30:.1f} GiB; use 'resized'"
    fits = size <= LARGEST_IN_MEMORY_BYTES
    require(fits, "train_crop", data.train_crop, fix, code="resource")


def _preparation(data: DataConfig, shape: tuple) -> Preparation:
    fix = "not all images are squares of one size; give the side that the network sees, 224 perhaps"
    side = data.image_size or shape[0]
    require(side is not None, "image_size", data.image_size, fix, code="missing")
    return Preparation(
        side,
        data.crop_sampling,
        data.crop_area,
        data.crop_ratio,
        data.flip,
        data.interpolation,
        data.eval_fraction,
        _policy(data),
        bool(data.space_to_depth),
    )


def _policy(data: DataConfig) -> Policy:
    if data.augmentation != "randaugment":
        return Policy(data.augmentation)
    return Policy(data.augmentation, data.randaugment_layers, data.randaugment_magnitude)


def _reading(data: DataConfig) -> Reading:
    return Reading(data.reader_threads, data.reader_processes, _EXAMPLES_PER_SLICE)
