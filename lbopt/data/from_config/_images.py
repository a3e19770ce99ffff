"""Images of classes in any TFDS data set, as a config asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lbopt.config import DataConfig
from lbopt.data._arrays import Dataset, Reading, Splits
from lbopt.data._damaged import DamagedCount
from lbopt.data._records import TfdsFolder
from lbopt.data.images import (
    LARGEST_IN_MEMORY_BYTES,
    ImageDataset,
    Policy,
    Preparation,
    SmallImages,
    load_image_arrays,
)
from lbopt.errors import require

_PIECE = 32
"""Examples that one thread prepares at a time."""


def load_images(data: DataConfig) -> tuple[Splits, int]:
    """Open the splits of a validated config; return them and the number of classes.

    Raises:
      UserError: naming the field that does not fit the data set.
      EnvironmentProblem: if the data set is not there, or damaged.
    """
    folder = TfdsFolder(data.builder, data.data_dir)
    folder.require_features("image", "label")
    num_classes: int = getattr(folder.features["label"], "num_classes", None) or 0
    fix = "its label is no class; give a data set with image and label of TFDS's kinds Image and ClassLabel"
    require(num_classes > 0, "config.data.builder", data.builder, fix)
    shape = tuple(folder.features["image"].shape)
    fix = f"images of {data.builder} are grey; give one number"
    for field in ("pixel_mean", "pixel_std"):
        value = getattr(data, field)
        require(shape[2] != 1 or len(value) == 1, f"config.data.{field}", value, fix)
    return Splits(*_splits(data, folder, shape, num_classes)), num_classes


def _splits(
    data: DataConfig, folder: TfdsFolder, shape: tuple, num_classes: int
) -> Iterator[Dataset]:
    opened: dict[str, Dataset] = {}
    for index, field in enumerate(("train_split", "validation_split", "test_split")):
        name, training = getattr(data, field), index == 0
        if training or name not in opened:
            records = folder.open(name, f"config.data.{field}", encoded=("image",))
            damaged = DamagedCount(f"{data.builder} {name}", data.max_damaged_records)
            opened[name] = _dataset(data, records, shape, num_classes, damaged, training)
        yield opened[name]
        if training:
            del opened[name]  # the same records are read in another way in evaluation


def _dataset(
    data: DataConfig,
    records: Any,
    shape: tuple,
    num_classes: int,
    damaged: DamagedCount,
    training: bool,
) -> Dataset:
    if data.train_crop == "resized":
        return ImageDataset(
            records, num_classes, _preparation(data, shape), damaged, _reading(data)
        )
    fix = f"images of {data.builder} have various sizes; use 'resized'"
    require(None not in shape, "config.data.train_crop", data.train_crop, fix)
    require(
        shape[0] == shape[1] and data.image_size in (None, shape[0]),
        "config.data.image_size",
        data.image_size,
        f"images of {data.builder} are {shape[0]} x {shape[1]}; leave it None, or set train_crop='resized'",
    )
    size = len(records) * shape[0] * shape[1] * shape[2]
    fix = f"all images are held in memory and would take {size / 2**30:.1f} GiB; use 'resized'"
    require(size <= LARGEST_IN_MEMORY_BYTES, "config.data.train_crop", data.train_crop, fix)
    arrays = load_image_arrays(records, shape, num_classes, damaged)
    if not training:
        return SmallImages(arrays, 0, False, Policy(), damaged)
    require(
        data.augmentation == "none" or shape[2] == 3,
        "config.data.augmentation",
        data.augmentation,
        f"images of {data.builder} are grey; use 'none'",
    )
    padding = data.crop_padding if data.train_crop == "padded" else 0
    return SmallImages(arrays, padding, data.flip, _policy(data), damaged)


def _preparation(data: DataConfig, shape: tuple) -> Preparation:
    fix = "images have various sizes; give the side that the network sees, for instance 224"
    side = data.image_size or shape[0]
    require(side is not None, "config.data.image_size", data.image_size, fix)
    return Preparation(
        side,
        data.crop_sampling,
        data.crop_area,
        data.crop_ratio,
        data.flip,
        data.interpolation,
        data.eval_fraction,
        _policy(data),
        data.space_to_depth,
    )


def _policy(data: DataConfig) -> Policy:
    if data.augmentation != "randaugment":
        return Policy(data.augmentation)
    return Policy(data.augmentation, data.randaugment_layers, data.randaugment_magnitude)


def _reading(data: DataConfig) -> Reading:
    return Reading(data.reader_threads, data.reader_processes, _PIECE)
