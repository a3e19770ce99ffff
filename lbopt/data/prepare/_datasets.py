"""Data sets in the format of TensorFlow Datasets: opened if they are there, made if not."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lbopt import paths
from lbopt.data._records import TfdsFolder, default_data_dir
from lbopt.data.prepare import _builders, _requirements
from lbopt.data.prepare._alone import alone_in
from lbopt.data.prepare._source import GeneratedDataset
from lbopt.errors import EnvironmentProblem, UserError


class Prepared(NamedTuple):
    """A data set that can be read.

    Attributes:
      name: for `config.data.builder`.
      folder: it, opened.
      made: whether it was made now.
    """

    name: str
    folder: TfdsFolder
    made: bool


def prepare_named(
    name: str,
    data_dir: str | None,
    manual_dir: str | None,
    say: Callable[[str], None] = lambda text: None,
) -> Prepared:
    """Download and convert one of TFDS's own data sets, unless it is there.

    Args:
      name: "name[/config][:version]".
      data_dir: see `default_data_dir`.
      manual_dir: where files got by hand are; None for downloads/manual in the folder of data sets.
      say: called with what begins now.

    Raises:
      UserError: if there is no such data set.
      EnvironmentProblem: if something has to be fetched or mended first.
    """
    root = default_data_dir(data_dir).absolute()
    by_hand = (
        paths.local(manual_dir, "--manual_dir").absolute()
        if manual_dir
        else root / "downloads" / "manual"
    )
    with contextlib.suppress(EnvironmentProblem), renamed("DATASET"):
        return Prepared(name, TfdsFolder(name, data_dir), False)
    builder = _builders.named(name, root)

    def check() -> None:
        _requirements.check(builder, root, by_hand)

    return _prepared(builder, root, by_hand, check, say)


def prepare_source(source: GeneratedDataset, data_dir: str | None) -> Prepared:
    """Write a source, unless it is there.

    Raises:
      EnvironmentProblem: if it cannot be written.
    """
    root = default_data_dir(data_dir).absolute()
    return _prepared(_builders.of_source(source, root), root, root, lambda: None, lambda text: None)


def _prepared(
    builder: Any,
    root: pathlib.Path,
    manual_dir: pathlib.Path,
    check: Callable[[], None],
    say: Callable[[str], None],
) -> Prepared:
    name, path = _builders.config_name(builder), pathlib.Path(os.fspath(builder.data_path))
    exact = f"{name}:{builder.version}"
    if not path.exists():
        check()
        with alone_in(path.parent, f"incomplete.*_{builder.version}"):
            say(f"{exact} is downloaded and prepared in {path}")
            _builders.generate(builder, manual_dir)
        return Prepared(name, TfdsFolder(exact, str(root)), True)
    if not (path / "dataset_info.json").is_file():
        raise EnvironmentProblem(
            f"{path} is there and is no finished data set; remove it and run this again"
        )
    return Prepared(name, TfdsFolder(exact, str(root)), False)


@contextlib.contextmanager
def renamed(field: str) -> Iterator[None]:
    """Let errors about `config.data.builder` name what a command calls it."""
    try:
        yield
    except (UserError, EnvironmentProblem) as error:
        text = (
            str(error)
            .replace("config.data.builder", field)
            .replace("config.data.data_dir", "--data_dir")
        )
        raise type(error)(text) from error
