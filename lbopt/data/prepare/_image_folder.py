"""A folder of class folders of images, written as a data set that is read fast on any disk."""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lbopt.data._records import default_data_dir
from lbopt.data.own import (
    NO_SPLIT,
    PREPARED,
    ImageFiles,
    LabelledImages,
    find_images,
    prepared_metadata,
)
from lbopt.data.prepare._datasets import Prepared, prepare_source
from lbopt.data.prepare._generated import GeneratedDataset
from lbopt.data.prepare._requirements import check_disk_space
from lbopt.errors import EnvironmentProblem, require

_NAME = re.compile(r"[a-z][a-z0-9_]{0,59}")
_SHARD_BYTES = 2**28
_AT_A_TIME = 256
_THREADS = 16
"""Number of files that are read at a time; a disk on the network answers each after some time."""

Example = tuple[str, dict[str, Any]]
Watch = Callable[[Iterator[Example], int], Iterator[Example]]
"""(examples, their number) -> the same examples; it reports progress while they are consumed."""


def prepare_image_folder(
    images: pathlib.Path,
    name: str | None,
    data_dir: str | None,
    watch: Watch = lambda examples, total: examples,
) -> Prepared:
    """Write the files of a folder of images, unchanged and in their order, unless that was done.

    Args:
      images: Folder of class folders, see `lbopt.data.own.find_images`.
      name: Name of the data set; None for that of the folder.
      data_dir: Folder of data sets, see `default_data_dir`.
      watch: Function that reports progress.

    Raises:
      UserError: If the folder holds no such images, or the name has other characters than small
        letters, digits and "_".
      EnvironmentProblem: If a data set of other images has this name, or if the disk is too small
        or cannot be written.
    """
    root = default_data_dir(data_dir)
    if name is None:
        name = re.sub(r"\W+", "_", images.absolute().name.lower())
    fix = "give a name of small letters, digits and '_' that begins with a letter"
    require(_NAME.fullmatch(name), "name", name, fix)
    found = find_images(images, "images")
    for one in found.class_names:
        fix = f"its class {one!r} has a name that no text file can hold; rename its folder"
        require(one.isprintable() and one == one.strip(), "images", str(images), fix)
    digest, size = _digest(found, images)
    counts = _counts(found)
    total = len(found.labels)
    watched = watch(_examples(found, images), total)
    source = GeneratedDataset(
        name,
        f"{total} images of {len(found.class_names)} classes.",
        lambda kinds: {
            "image": kinds.Image(shape=(None, None, 3)),
            "label": kinds.ClassLabel(names=list(found.class_names)),
            "file_name": kinds.Text(),
        },
        {
            # The splits are written one after another, in their order in the folder.
            split: functools.partial(itertools.islice, watched, sum(each))
            for split, each in counts.items()
        },
        metadata={PREPARED: {"counts": counts, "digest": digest}},
        records_per_shard=max(1, _SHARD_BYTES * total // max(size, 1)),
    )

    prepared = prepare_source(source, data_dir, lambda: check_disk_space(name, size, root))
    made = prepared_metadata(prepared.folder.folder).get(PREPARED, {}).get("digest")
    fix = f"{prepared.folder.folder} was made of other files; give another {{name}}, or remove it"
    if made != digest:
        raise EnvironmentProblem("images", str(images), fix, code="exists", also=["name"])
    return prepared


def _digest(found: LabelledImages, root: pathlib.Path) -> tuple[str, int]:
    """Return a digest of the names and sizes of all files, and the sum of their sizes."""
    assert isinstance(found.records, ImageFiles)
    digest = hashlib.sha256()
    total = 0
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        files = [found.records.file(index) for index in range(len(found.records))]
        sizes = pool.map(lambda file: file.stat().st_size, files)
    for file, size in zip(files, sizes, strict=True):
        total += size
        digest.update(b"%s\0%d\0" % (os.fsencode(file.relative_to(root)), size))
    return digest.hexdigest(), total


def _counts(found: LabelledImages) -> dict[str, list[int]]:
    """Return the number of images of each class, by split in the order of the records."""
    classes = len(found.class_names)
    return {
        split or NO_SPLIT: np.bincount(found.labels[found.split_of == split], minlength=classes)
        .astype(int)
        .tolist()
        for split in dict.fromkeys(found.split_of.tolist())
    }


def _examples(found: LabelledImages, root: pathlib.Path) -> Iterator[Example]:
    def read(index: int) -> Example:
        record = dict(found.records[index])
        file = os.fsencode(pathlib.Path(record["file_name"]).relative_to(root))
        return str(index), record | {"file_name": file}

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(found.records), _AT_A_TIME):
            stop = min(start + _AT_A_TIME, len(found.records))
            yield from pool.map(read, range(start, stop))
