"""Folders of data sets that are not in the format of TensorFlow Datasets."""

from __future__ import annotations

import pathlib
import re

from lbopt import paths
from lbopt.data._records import data_dir_or_bucket, default_data_dir
from lbopt.errors import require

_NAME = re.compile(r"\w[\w.-]{0,59}")
_PTB = "ptb"


def store_folder(name: str, data_dir: str | None = None) -> pathlib.Path:
    """Return the folder of the token store that `lbopt prepare text --name=NAME` makes.

    Args:
      name: Name of the store: at most 60 letters, digits, "_", "-" and ".".
      data_dir: Folder of data sets, see `default_data_dir`.

    Raises:
      UserError: If the name has other characters or is too long.

    >>> store_folder("books", "/data").as_posix()
    '/data/lbopt_text/books'
    """
    return default_data_dir(data_dir) / _store(name)


def ptb_folder(data_dir: str | None = None) -> pathlib.Path:
    """Return the folder of the Penn Treebank's files, see `lbopt.data.text.load_ptb`."""
    return default_data_dir(data_dir) / _PTB


def readable_store(name: str, data_dir: str | None = None) -> pathlib.Path:
    """Return `store_folder`, or its copy if the folder of data sets is in a bucket."""
    return _readable(_store(name), data_dir)


def readable_ptb(data_dir: str | None = None) -> pathlib.Path:
    """Return `ptb_folder`, or its copy if the folder of data sets is in a bucket."""
    return _readable(_PTB, data_dir)


def _store(name: str) -> str:
    fix = "give a plain name: at most 60 letters, digits, '_', '-' and '.'"
    require(_NAME.fullmatch(name), "name", name, fix)
    return f"lbopt_text/{name}"


def _readable(below: str, data_dir: str | None) -> pathlib.Path:
    root, field = data_dir_or_bucket(data_dir)
    return paths.readable(f"{root}/{below}", field)
