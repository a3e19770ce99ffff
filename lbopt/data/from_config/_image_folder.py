"""A folder of labelled images as a config says, with statistics measured on training images."""

from __future__ import annotations

import concurrent.futures

from lbopt import paths
from lbopt.config import DataConfig
from lbopt.data._arrays import Dataset, Splits
from lbopt.data._damaged import DamagedCount, DamagedRecord
from lbopt.data._records import read_any_record
from lbopt.data.from_config._images import check_task, make_images
from lbopt.data.from_config._measured import PixelScale, measured_scale, sample
from lbopt.data.images import image_size_of
from lbopt.data.own import ChosenRecords, LabelledImages, open_images, split_rows


def load_image_folder(data: DataConfig) -> tuple[Splits, LabelledImages, PixelScale]:
    """Return the splits of a validated config, the images that they are of, and their statistics.

    Raises:
      UserError: If a field, named without the config's prefix, does not fit the images.
      EnvironmentProblem: If files are missing, or too many images are damaged.
    """
    root = paths.readable(data.path, "path")
    found = open_images(root, data.target, data.features)
    check_task(data, len(found.class_names))

    fractions = data.validation_fraction, data.test_fraction
    rows = split_rows(found.split_of, found.labels, "classification", *fractions, data.split_seed)
    records = {name: ChosenRecords(found.records, chosen) for name, chosen in rows.items()}
    known = data.train_crop == "resized" and data.image_size is not None
    shape = (None, None, 3) if known else _common_shape(data, records["train"])
    if data.train_crop == "resized" and shape[0] != shape[1]:
        shape = (None, None, 3)
    splits = Splits(*(_split(data, name, records[name], shape, found) for name in Splits._fields))
    given = (data.pixel_mean, data.pixel_std)
    measured = (splits.train, found.names[0], data.reader_threads, "path", data.path)
    scale = given if data.pixel_mean else measured_scale(*measured)
    return splits, found, scale


def _split(
    data: DataConfig, name: str, records: ChosenRecords, shape: tuple, found: LabelledImages
) -> Dataset:
    # Images are read during training, when only the fields of a run get a prefix.
    limit = (data.max_damaged_records, "data.max_damaged_records")
    damaged = DamagedCount(f"{data.path} {name}", *limit)
    training = name == "train"
    classes = len(found.class_names)
    return make_images(data, data.path, records, shape, classes, damaged, training, found.names)


def _common_shape(data: DataConfig, records: ChosenRecords) -> tuple:
    """Return the shape of images that all have one size, and otherwise (None, None, 3)."""

    def size(index: int) -> tuple[int, int] | None:
        try:
            return image_size_of(read_any_record(records, index))
        except DamagedRecord:
            return None  # it is counted when it is read as an example

    with concurrent.futures.ThreadPoolExecutor(data.reader_threads) as pool:
        found = pool.map(size, sample(len(records)).tolist())
        sizes = {one for one in found if one is not None}
    height, width = next(iter(sizes)) if len(sizes) == 1 else (None, None)
    return height, width, 3
