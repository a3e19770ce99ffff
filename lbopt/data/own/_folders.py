"""Folders of class folders of image files, as numbered records."""

from __future__ import annotations

import itertools
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lbopt.data._records import Records
from lbopt.data.own._split_names import stated_splits
from lbopt.errors import UserError, require

IMAGES = (
    *(".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp"),
    *(".tif", ".tiff", ".ppm", ".pgm", ".jp2"),
)
"""Suffixes of image files, in small letters."""
_LOOKED_AT = 100
"""Entries of a folder that tell what it holds."""


class LabelledImages(NamedTuple):
    """Encoded images with their classes.

    Attributes:
      records: Records with `image`, the bytes of a file, and `label`.
      labels: [records] int32, the number of each record's class.
      split_of: [records], "train", "validation" or "test", or "" where no split is stated.
      class_names: Names of the classes.
      names: Names of the image and of the class in a batch.
    """

    records: Records
    labels: np.ndarray
    split_of: np.ndarray
    class_names: tuple[str, ...]
    names: tuple[str, str] = ("image", "label")


class ImageFiles:
    """Image files as records, read when they are asked for.

    Args:
      folders: Paths of the folders.
      folder_of: [files] int, number of each file's folder.
      names: [files] bytes, name of each file in its folder.
      labels: [files] int, number of each file's class.
    """

    def __init__(
        self,
        folders: Sequence[pathlib.Path],
        folder_of: np.ndarray,
        names: np.ndarray,
        labels: np.ndarray,
    ):
        self._folders = tuple(folders)
        self._folder_of = folder_of
        self._names = names
        self._labels = labels

    def __len__(self) -> int:
        return len(self._names)

    def file(self, index: int) -> pathlib.Path:
        """Return the path of a file."""
        return self._folders[self._folder_of[index]] / os.fsdecode(self._names[index])

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        file = self.file(index)
        label = int(self._labels[index])
        return {"image": file.read_bytes(), "label": label, "file_name": str(file)}


def find_images(root: pathlib.Path, field: str = "path") -> LabelledImages:
    """Return the images in `root/CLASS/FILE`, or in `root/SPLIT/CLASS/FILE` with stated splits.

    Classes have the order of their names, and files that of theirs. Hidden files and folders are
    left out.

    Args:
      root: The folder.
      field: Parameter that holds it, for errors.

    Raises:
      UserError: If it is missing or holds no image, if a class folder is empty or holds something
        else, or if the classes of a split are not those of the training split.
    """
    fix = "there is no such folder; give one with a folder of images for each class"
    require(root.is_dir(), field, str(root), fix, code="missing")
    try:
        parts = {split: _classes(folder, field) for split, folder in _splits(root, field).items()}
    except OSError as error:
        fix = f"it cannot be read ({error}); repair it"
        raise UserError(field, str(root), fix, code="damaged") from error
    known = sorted(next(iter(parts.values())))
    for split, classes in parts.items():
        for name in sorted(classes.keys() - set(known)):
            fix = f"class {name!r} of {split} is not in train; add it there, or take it away"
            raise UserError(field, str(root), fix, code="mismatch")

    found = [
        (split, known.index(name), folder, files)
        for split, classes in parts.items()
        for name, (folder, files) in sorted(classes.items())
    ]
    counts = [len(files) for *_, files in found]
    labels = np.repeat(np.asarray([number for _, number, _, _ in found], np.int32), counts)
    folders = [folder for _, _, folder, _ in found]
    names = np.asarray([name for *_, files in found for name in files])
    files = ImageFiles(folders, np.repeat(np.arange(len(folders)), counts), names, labels)
    split_of = np.repeat([split for split, *_ in found], counts)
    return LabelledImages(files, labels, split_of, tuple(known))


def holds_class_folders(root: pathlib.Path) -> bool:
    """Return whether folders in a folder, or in these, hold images; few entries are looked at."""
    inner = _looked(root, os.DirEntry.is_dir)
    deeper = [folder for one in inner for folder in _looked(one, os.DirEntry.is_dir)]
    return any(_looked(folder, _is_image) for folder in (*inner, *deeper))


def _looked(folder: pathlib.Path, keeps: Any) -> list[pathlib.Path]:
    with os.scandir(folder) as entries:
        some = itertools.islice(entries, _LOOKED_AT)
        return [pathlib.Path(one.path) for one in some if one.name[0] != "." and keeps(one)]


def _is_image(entry: os.DirEntry) -> bool:
    return os.path.splitext(entry.name)[1].lower() in IMAGES and entry.is_file()


def _splits(root: pathlib.Path, field: str) -> dict[str, pathlib.Path]:
    """Return the folder of each stated split, or the whole as ""."""
    folders = {entry.name: pathlib.Path(entry.path) for entry in _entries(root) if entry.is_dir()}
    fix = f"{root} has no folder in it; give one with a folder of images for each class"
    require(folders, field, str(root), fix, code="missing")
    if not any(map(_holds_folders, folders.values())):
        return {"": root}
    found = stated_splits(list(folders), field, str(root))
    return {split: folders[name] for split, name in found.items()}


def _classes(folder: pathlib.Path, field: str) -> dict[str, tuple[pathlib.Path, list[bytes]]]:
    """Return the folder of each class and the names of its images, sorted."""
    found = {}
    for entry in _entries(folder):
        if entry.is_dir():
            inner = pathlib.Path(entry.path)
            found[entry.name] = (inner, _images(inner, field))
        fix = f"{entry.name!r} is in no class folder; move it into one, or take it away"
        require(not _is_image(entry), field, str(folder), fix)
    fix = "it holds no class folder; add some"
    require(found, field, str(folder), fix, code="missing")
    return found


def _images(folder: pathlib.Path, field: str) -> list[bytes]:
    names = []
    for entry in _entries(folder):
        fix = f"{entry.name!r} is no image ({', '.join(IMAGES)}); move it, or convert it"
        require(_is_image(entry), field, str(folder), fix, code="type")
        names.append(os.fsencode(entry.name))
    fix = "this class folder has no image; add some, or take it away"
    require(names, field, str(folder), fix, code="missing")
    return sorted(names)


def _holds_folders(folder: pathlib.Path) -> bool:
    return any(entry.is_dir() for entry in itertools.islice(_entries(folder), _LOOKED_AT))


def _entries(folder: pathlib.Path) -> Iterator[os.DirEntry]:
    with os.scandir(folder) as entries:
        yield from (entry for entry in entries if not entry.name.startswith("."))
