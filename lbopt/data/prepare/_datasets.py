"""Data sets in the format of TensorFlow Datasets (TFDS), opened, or made if they are missing."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from lbopt import errors, paths
from lbopt.data._records import TfdsFolder, default_data_dir
from lbopt.data.prepare import _builders, _requirements
from lbopt.data.prepare._alone import alone_in
from lbopt.data.prepare._generated import GeneratedDataset
from lbopt.data.prepare._idx import CHECKSUMS, IdxFiles
from lbopt.errors import EnvironmentProblem, require


class Prepared(NamedTuple):
    """A data set that can be read.

    Attributes:
      name: Name of the data set, with its configuration if it has some.
      folder: The opened data set.
      made: Whether this call made the data set.
    """

    name: str
    folder: TfdsFolder
    made: bool


def prepare_named(
    name: str,
    data_dir: str | None,
    manual_dir: str | None,
    say: Callable[[str], None] = lambda text: None,
    idx_dir: str | None = None,
) -> Prepared:
    """Download and convert one of TFDS's own data sets, unless it exists.

    Args:
      name: Name of the data set, "name[/config][:version]".
      data_dir: Folder of data sets, see `default_data_dir`.
      manual_dir: Folder of the files that the user downloaded; None for downloads/manual in the
        folder of data sets.
      say: Function that shows the user a line of text, called before the work begins.
      idx_dir: Folder of the IDX files of mnist or fashion_mnist, from which the same is made
        without a download; None for none.

    Raises:
      UserError: If there is no such data set, or if the IDX files are not those of the data set.
      EnvironmentProblem: If something has to be downloaded or repaired first.
    """
    plain = name.partition(":")[0]
    fix = f"{plain} has no IDX files, only {' and '.join(CHECKSUMS)} have some; leave it out"
    require(idx_dir is None or plain in CHECKSUMS, "idx_dir", idx_dir, fix, code="unused")
    root = default_data_dir(data_dir).absolute()
    manual = root / "downloads" / "manual"
    if manual_dir:
        manual = paths.local(manual_dir, "manual_dir").absolute()
    with contextlib.suppress(EnvironmentProblem), errors.under("", builder="name"):
        return Prepared(name, TfdsFolder(name, data_dir), False)

    builder = _builders.named(name, root)
    how = "is downloaded and prepared"
    check: Callable[[], None] = functools.partial(_requirements.check, builder, root, manual)
    if idx_dir is not None:
        files = IdxFiles(plain, paths.local(idx_dir, "idx_dir"))
        _builders.use_examples(builder, files.splits)
        how = f"is prepared from {idx_dir}"
        check = files.check

    def make() -> None:
        say(f"{_exact(builder)} {how} in {builder.data_path}")
        _builders.generate(builder, manual)

    return _prepared(builder, root, check, make)


def prepare_source(
    source: GeneratedDataset, data_dir: str | None, check: Callable[[], None] = lambda: None
) -> Prepared:
    """Write a generated data set, unless it exists.

    Args:
      source: The data set.
      data_dir: Folder of data sets, see `default_data_dir`.
      check: Function that is called before it is written, and raises what hinders that.

    Raises:
      EnvironmentProblem: If it cannot be written.
    """
    root = default_data_dir(data_dir).absolute()
    builder = _builders.of_source(source, root)

    def make() -> None:
        if source.records_per_shard is None:
            _builders.generate(builder, root)
        else:
            _builders.write_in_order(builder, source)

    return _prepared(builder, root, check, make)


def _prepared(
    builder: Any, root: pathlib.Path, check: Callable[[], None], make: Callable[[], None]
) -> Prepared:
    name = _builders.config_name(builder)
    path = pathlib.Path(os.fspath(builder.data_path))
    exact = _exact(builder)
    if not path.exists():
        check()
        with alone_in(path.parent, f"{_builders.UNFINISHED}*_{builder.version}"):
            make()
        return Prepared(name, TfdsFolder(exact, str(root)), True)
    if not (path / "dataset_info.json").is_file():
        fix = f"{path} exists and is no finished data set; remove it and run this again"
        raise EnvironmentProblem("name", name, fix, code="exists")
    return Prepared(name, TfdsFolder(exact, str(root)), False)


def _exact(builder: Any) -> str:
    return f"{_builders.config_name(builder)}:{builder.version}"
