"""The one rule for every path that a user gives: it is of this machine, or, where a bucket is taken too, gs://BUCKET/FOLDER.

`pathlib` takes an address for a relative path: it would make a folder called `gs:`.
"""

from __future__ import annotations

import errno
import os
import pathlib
import re
from collections.abc import Mapping

from lbopt.errors import UserError, require

GivenPath = str | os.PathLike[str]

_SCHEMES = "abfss?|az|file|ftps?|gcs|gs|hdfs|hf|https?|s3[an]?|sftp|ssh|wasbs?"
_ADDRESS = re.compile(
    rf".*://.*|\w[\w+.-]+:/.*|({_SCHEMES}):.*|(.*/)?({_SCHEMES}):(/.*)?", re.IGNORECASE | re.DOTALL
)
_LONGEST_NAME, _LONGEST = 255, 4095
"""Bytes of a file's name, and of a path, on Linux (limits.h)."""
_DEEPEST = 500
"""Folders in folders: `pathlib` makes them by recursion."""
_BUCKET = re.compile(r"gs://[^/]+(/(?!\.{1,2}(/|$))[^/]+)+/*", re.DOTALL)
"""A folder of a bucket: no part of the path is empty, "." or ".."."""


def is_address(path: GivenPath) -> bool:
    """Return whether a path is an address, or one that lost a slash, and no path of this machine.

    >>> [is_address(path) for path in ("s3://b/run", pathlib.Path("gs://b/run"), "S3:", "/home/me/gs:/b", "file:/tmp")]
    [True, True, True, True, True]
    >>> [is_address(path) for path in ("runs/batch:1024", "recipe.py:smoke", "/runs/12:30/a", "a:b/c", "gs/b")]
    [False, False, False, False, False]
    """
    return _ADDRESS.fullmatch(os.fspath(path)) is not None


def local(path: GivenPath, field: str) -> pathlib.Path:
    """Return a path of this machine, with a `~` at its beginning expanded.

    Args:
      path: What the user gave.
      field: The flag, field or argument, for the message.

    Raises:
      UserError: If it is an address, has a null character, is too long, is too deep, or begins with the home of nobody.
    """
    text = os.fspath(path)
    fix = "give a path of this machine (a mounted bucket has one), not an address"
    require(not is_address(text), field, text, fix)
    require("\0" not in text, field, text, "a path has no null character; leave it out")
    parts = [len(part.encode(errors="replace")) for part in text.split("/")]
    fix = f"names have {_LONGEST_NAME} bytes at most, and paths {_LONGEST}; use a shorter one"
    require(
        max(parts) <= _LONGEST_NAME and sum(parts) + len(parts) - 1 <= _LONGEST, field, text, fix
    )
    require(
        len(parts) <= _DEEPEST,
        field,
        text,
        f"it has more than {_DEEPEST} folders in folders; use fewer",
    )
    path = pathlib.Path(text)
    if (
        not text.startswith("~") and path.parts[:1] and path.parts[0].startswith("~")
    ):  # ./~ is no home
        return pathlib.Path.cwd() / path
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise UserError(field, text, f"{error}; write the path out") from error


def local_or_bucket(path: GivenPath, field: str) -> str:
    """Return a path of this machine as it was given, or gs://BUCKET/FOLDER without slashes at its end.

    Args:
      path: What the user gave.
      field: The flag, field or argument, for the message.

    Raises:
      UserError: If it is another address, or none of `local`.

    >>> local_or_bucket("gs://bucket/runs/one/", "--workdir"), local_or_bucket("runs/one", "--workdir")
    ('gs://bucket/runs/one', 'runs/one')
    """
    text = os.fspath(path)
    if not is_address(text):
        local(text, field)
        return text
    require(_BUCKET.fullmatch(text), field, text, "give a folder, or gs://BUCKET/FOLDER")
    fix = (
        "clients of buckets take a name with * ? [ ] or a backslash for a pattern; use another name"
    )
    require(not re.search(r"[*?\[\]\\]", text), field, text, fix)
    return text.rstrip("/")


def of_user(environ: Mapping[str, str], variable: str, below_home: str) -> pathlib.Path:
    """Return the user's folder of one kind; a variable with a relative path is ignored (XDG Base Directory Specification 0.8).

    Args:
      environ: `os.environ`.
      variable: Its name, `XDG_CACHE_HOME` for instance.
      below_home: The folder in the home folder where the variable is not set.

    Raises:
      FileNotFoundError: If there is no home folder.

    >>> of_user({"XDG_CACHE_HOME": "/cache"}, "XDG_CACHE_HOME", ".cache").as_posix()
    '/cache'
    """
    given = pathlib.Path(environ.get(variable, ""))
    if given.is_absolute():
        return given
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder", home)
    return pathlib.Path(home) / below_home


def writable(path: GivenPath, field: str) -> pathlib.Path:
    """Return the path of a file, looked at before the work whose result it gets.

    Args:
      path: What the user gave.
      field: The flag, for the message.

    Raises:
      UserError: If it is none of `local`, or cannot be written.
    """
    file = local(path, field)
    real = os.path.realpath(file)  # what a link leads to may not be there yet
    there = os.path.exists(real)
    try:
        open(real, "a").close()
        if not there:
            os.unlink(real)
    except OSError as error:
        fix = "give a file in a folder that exists and is yours"
        raise UserError(
            field,
            os.fspath(path),
            f"it cannot be written ({error.strerror}); {fix}",
            code="resource",
        ) from error
    return file
