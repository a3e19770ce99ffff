"""Labelled images from what a folder holds: class folders, a prepared data set, or a saved one."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lbopt.data._records import Records, TfdsFolder
from lbopt.data.own._folders import LabelledImages, find_images, holds_class_folders
from lbopt.data.own._saved import SavedImages, SavedTable, is_saved, kind_of
from lbopt.errors import UserError, require

PREPARED = "lbopt_image_folder"
"""Entry of the metadata of a prepared folder: the number of images by split and class."""
NO_SPLIT = "whole"
"""Split of a prepared folder that states none."""


class ChosenRecords:
    """Some of the records of a source.

    Args:
      records: The source.
      rows: Numbers of the chosen records.
    """

    def __init__(self, records: Records, rows: np.ndarray):
        self._records = records
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._records[int(self._rows[index])]


class ChainedRecords:
    """The records of several sources, one source after another."""

    def __init__(self, sources: Sequence[Records]):
        self._sources = tuple(sources)
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        number = int(np.searchsorted(self._ends, index, "right"))
        return self._sources[number][index - (int(self._ends[number - 1]) if number else 0)]


def open_images(
    root: pathlib.Path, target: str = "", features: Sequence[str] = ()
) -> LabelledImages:
    """Return the labelled images of a folder.

    Args:
      root: Folder of class folders, see `find_images`; a folder that `lbopt prepare folder` made;
        or one that Hugging Face's `save_to_disk` made, with columns of the kinds Image and
        ClassLabel.
      target: Column of the class, in a folder of the last kind; "" for the only one.
      features: The column of the image; () for the only one.

    Raises:
      UserError: Naming `path`, `target` or `features`, if the folder holds no such images.
      EnvironmentProblem: If files of a prepared folder are missing, or a package to read them.
    """
    if is_saved(root):
        return _saved_images(SavedTable(root), target, tuple(features))
    fix = "a folder of images has no columns; leave it at its default"
    require(not target, "target", target, fix, code="unused")
    require(not features, "features", tuple(features), fix, code="unused")
    prepared = prepared_folder(root)
    return find_images(root) if prepared is None else prepared_images(prepared)


def holds_images(root: pathlib.Path) -> bool:
    """Return whether `open_images` is meant for a path; few files are looked at."""
    try:
        if is_saved(root):
            features = SavedTable(root).features.values()
            return any(kind_of(feature) == "Image" for feature in features)
        return root.is_dir() and (prepared_folder(root) is not None or holds_class_folders(root))
    except (OSError, UserError):
        return False  # the error is raised when it is read


def _saved_images(saved: SavedTable, target: str, features: tuple[str, ...]) -> LabelledImages:
    images = [name for name, kind in saved.features.items() if kind_of(kind) == "Image"]
    fix = f"its columns of images are {images}; name one of them"
    image = features or tuple(images)
    fits = len(image) == 1 and image[0] in images
    require(fits, "features", features, fix, code="choice" if features else "missing")
    fix = f"its columns of classes are {list(saved.class_names)}; name one of them"
    label = [target] if target else list(saved.class_names)
    fits = len(label) == 1 and label[0] in saved.class_names
    require(fits, "target", target, fix, code="choice" if target else "missing")

    names = saved.class_names[label[0]]
    labels = np.asarray(saved.columns()[label[0]])
    fix = f"it holds classes beyond its {len(names)} names, or none; leave these records out"
    fits = labels.dtype.kind == "i" and labels.min() >= 0 and labels.max() < len(names)
    require(fits, "target", label[0], fix)
    records = SavedImages(saved, image[0], label[0])
    classes = labels.astype(np.int32)
    return LabelledImages(records, classes, saved.split_of(), names, (image[0], label[0]))


def prepared_folder(root: pathlib.Path) -> pathlib.Path | None:
    """Return the folder, or the newest version in it, that `lbopt prepare folder` made, if any."""
    versions = sorted(root.glob("*.*.*/"), reverse=True)
    found = (folder for folder in (root, *versions) if PREPARED in prepared_metadata(folder))
    return next(found, None)


def prepared_metadata(root: pathlib.Path) -> dict[str, Any]:
    """Return the metadata of a data set of TFDS; {} if it has none."""
    try:
        found = json.loads((root / "metadata.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def prepared_images(root: pathlib.Path) -> LabelledImages:
    """Return the images of a folder that `lbopt prepare folder` made."""
    folder = TfdsFolder("folder --images=DIR", folder=root)
    counts: dict[str, list[int]] = prepared_metadata(root)[PREPARED]["counts"]
    sources = [folder.open(split, "path", encoded=("image",)) for split in counts]
    sizes = [len(source) for source in sources]
    classes = [np.repeat(np.arange(len(each), dtype=np.int32), each) for each in counts.values()]
    fix = f"it has {sizes} images, and its metadata {list(map(len, classes))}; prepare it again"
    require(sizes == list(map(len, classes)), "path", str(root), fix, code="damaged")
    split_of = np.repeat(["" if split == NO_SPLIT else split for split in counts], sizes)
    names = tuple(folder.features["label"].names)
    return LabelledImages(ChainedRecords(sources), np.concatenate(classes), split_of, names)
