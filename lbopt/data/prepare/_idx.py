"""MNIST and Fashion-MNIST from the four IDX files in which both are distributed."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import pathlib
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from lbopt._regular import open_regular
from lbopt.data.prepare._generated import Examples
from lbopt.errors import MissingPackage, UserError, require

_SIDE = 28
_IMAGES_HEADER = 16
_LABELS_HEADER = 8
"""Bytes of an IDX file before its data: a magic number, and the size of each of its axes."""


class IdxPair(NamedTuple):
    """The two files of one split.

    Attributes:
      images: Name of the file of images, without ".gz".
      labels: Name of the file of labels, without ".gz".
      size: Number of examples.
    """

    images: str
    labels: str
    size: int


PARTS = {
    "train": IdxPair("train-images-idx3-ubyte", "train-labels-idx1-ubyte", 60_000),
    "test": IdxPair("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte", 10_000),
}
BYTES = {
    **{one.images: _IMAGES_HEADER + one.size * _SIDE**2 for one in PARTS.values()},
    **{one.labels: _LABELS_HEADER + one.size for one in PARTS.values()},
}
"""File -> its size, unpacked."""
CHECKSUMS = {
    "fashion_mnist": {
        "train-images-idx3-ubyte": (
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"
        ),
        "train-labels-idx1-ubyte": (
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"
        ),
        "t10k-images-idx3-ubyte": (
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"
        ),
        "t10k-labels-idx1-ubyte": (
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"
        ),
    },
    "mnist": {
        "train-images-idx3-ubyte": (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
        ),
        "train-labels-idx1-ubyte": (
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
        ),
        "t10k-images-idx3-ubyte": (
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"
        ),
        "t10k-labels-idx1-ubyte": (
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"
        ),
    },
}
"""Data set -> SHA-256 of each of its files, unpacked: gzip's header has a name and a time, so equal
data have other checksums in every package.

fashion_mnist: computed from Debian's dataset-fashion-mnist 0.0~git20200523.55506a9-1. The packed
files there, with their name and the time 1504176606 (train) or 1504176627 (t10k) in gzip's header,
have the SHA-256 of url_checksums/fashion_mnist.txt in TFDS 4.9.10: the data are the same.

mnist: published with the release v0.1.0 of matraass11/mygrad. The files themselves were not at hand
to compute them.
"""


class IdxFiles:
    """A folder with the IDX files of a data set, packed as `NAME.gz` or not.

    Args:
      name: A name in `CHECKSUMS`.
      folder: The folder.

    Attributes:
      splits: Split -> function that yields its examples, once the files are checked. Keys and
        records are those of TFDS's own builder, so their order on disk is too.
    """

    def __init__(self, name: str, folder: pathlib.Path):
        self._name = name
        self._folder = folder
        self._data: dict[str, bytes] = {}
        self.splits: Mapping[str, Callable[[], Examples]] = {
            split: functools.partial(self._examples, part) for split, part in PARTS.items()
        }

    def check(self) -> None:
        """Read the files.

        Raises:
          UserError: Naming `idx_dir`, if one is missing; naming the file, if it cannot be read, was
            cut short, or has the data of another data set.
        """
        fix = "there is no such folder; give the folder of the IDX files"
        require(self._folder.is_dir(), "idx_dir", str(self._folder), fix, code="missing")
        files = {name: self._found(name) for name in BYTES}
        missing = ", ".join(f"{name}.gz" for name, file in files.items() if file is None)
        fix = f"these files are missing: {missing}; add them, or give another folder"
        require(not missing, "idx_dir", str(self._folder), fix, code="missing")
        self._data = {name: self._checked(name, file) for name, file in files.items() if file}

    def _found(self, name: str) -> pathlib.Path | None:
        candidates = (self._folder / f"{name}.gz", self._folder / name)
        return next((file for file in candidates if file.exists()), None)

    def _checked(self, name: str, file: pathlib.Path) -> bytes:
        size = BYTES[name]
        data = _unpacked(file, max(BYTES.values()) + 1)
        digest = hashlib.sha256(data).hexdigest()
        if digest == CHECKSUMS[self._name][name]:
            return data

        others = [
            f"{known_name} of {other}"
            for other, known in CHECKSUMS.items()
            for known_name, theirs in known.items()
            if theirs == digest
        ]
        fix = f"its data have the SHA-256 {digest}, not that of {self._name}; give the files of "
        fix += f"{self._name}"
        if others:
            fix = f"it is {others[0]}; give {name} of {self._name}"
        elif len(data) < size:
            fix = f"it has {len(data)} of {size} bytes, so it was cut short; fetch it again"
        raise UserError(str(file), reason=fix, code="mismatch" if others else "damaged")

    def _examples(self, part: IdxPair) -> Examples:
        images = np.frombuffer(self._data[part.images], np.uint8, offset=_IMAGES_HEADER)
        labels = np.frombuffer(self._data[part.labels], np.uint8, offset=_LABELS_HEADER)
        for number, image in enumerate(images.reshape(-1, _SIDE, _SIDE)):
            yield number, {"image": _png(image), "label": int(labels[number])}


def _unpacked(file: pathlib.Path, most: int) -> bytes:
    """Return up to `most` bytes of a file, unpacked if its name ends in ".gz"."""
    try:
        with open_regular(file) as stream:
            packed = file.suffix == ".gz"
            return (gzip.GzipFile(fileobj=stream) if packed else stream).read(most)
    except EOFError as error:
        fix = "it ends too early, so it was cut short; fetch it again"
        raise UserError(str(file), reason=fix, code="damaged") from error
    except (OSError, zlib.error) as error:  # gzip's own errors are among them
        fix = f"it cannot be read ({error}); fetch it again"
        raise UserError(str(file), reason=fix, code="damaged") from error


def _png(image: np.ndarray) -> bytes:
    """Return a grey image as PNG; TFDS itself writes arrays with TensorFlow only."""
    try:
        from PIL import Image
    except ImportError as error:
        fix = "it writes the images, and is not installed: pip install 'lbopt[images]'"
        raise MissingPackage("Pillow", reason=fix) from error
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    return stream.getvalue()
