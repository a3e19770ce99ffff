"""The rule for paths from users: a path of this machine, for some fields also gs://BUCKET/FOLDER.

`pathlib` takes an address for a relative path and would make a folder called `gs:`.
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
# Bytes of a file's name and of a path on Linux (limits.h).
_LONGEST_NAME = 255
_LONGEST = 4095
_DEEPEST = 500
"""Maximum number of nested folders, as `pathlib` makes them by recursion."""
_BUCKET = re.compile(r"gs://[^/]+(/(?!\.{1,2}(/|$))[^/]+)+/*", re.DOTALL)
"""A folder of a bucket; no part of its path is empty, "." or ".."."""


def is_address(path: GivenPath) -> bool:
    """Return whether a path is an address such as gs://b, even with a slash missing.

    >>> [is_address(path) for path in ("s3://b/run", pathlib.Path("gs://b"), "S3:", "file:/tmp")]
    [True, True, True, True]
    >>> [is_address(path) for path in ("runs/batch:1024", "recipe.py:smoke", "/12:30/a", "gs/b")]
    [False, False, False, False]
    """
    return _ADDRESS.fullmatch(os.fspath(path)) is not None


def local(path: GivenPath, field: str) -> pathlib.Path:
    """Return a path of this machine, with a `~` at its beginning expanded.

    Args:
      path: Path from the user.
      field: Flag, field or argument that holds it, for the error.

    Raises:
      UserError: If it is an address, contains a null character, is too long or too deep, or begins
        with the home folder of an unknown user.
    """
    text = os.fspath(path)
    fix = "give a path of this machine (a mounted bucket has one), not an address"
    require(not is_address(text), field, text, fix)
    require("\0" not in text, field, text, "a path has no null character; leave it out")
    parts = [len(part.encode(errors="replace")) for part in text.split("/")]
    fix = f"names have {_LONGEST_NAME} bytes at most, and paths {_LONGEST}; use a shorter one"
    is_short = max(parts) <= _LONGEST_NAME and sum(parts) + len(parts) - 1 <= _LONGEST
    require(is_short, field, text, fix)
    fix = f"it has more than {_DEEPEST} nested folders; use fewer"
    require(len(parts) <= _DEEPEST, field, text, fix)

    path = pathlib.Path(text)
    # `pathlib` makes ~ of ./~, which is no home folder.
    if not text.startswith("~") and path.parts[:1] and path.parts[0].startswith("~"):
        return pathlib.Path.cwd() / path
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise UserError(field, text, f"{error}; write the path out") from error


def local_or_bucket(path: GivenPath, field: str) -> str:
    """Return a path of this machine unchanged, or gs://BUCKET/FOLDER without slashes at its end.

    Args:
      path: Path or address from the user.
      field: Flag, field or argument that holds it, for the error.

    Raises:
      UserError: If it is another address, or a path that `local` refuses.

    >>> local_or_bucket("gs://bucket/runs/one/", "workdir")
    'gs://bucket/runs/one'
    """
    text = os.fspath(path)
    if not is_address(text):
        local(text, field)
        return text
    require(_BUCKET.fullmatch(text), field, text, "give a folder, or gs://BUCKET/FOLDER")
    fix = "bucket clients read a name with * ? [ ] or a backslash as a pattern; use another name"
    require(not re.search(r"[*?\[\]\\]", text), field, text, fix)
    return text.rstrip("/")


def of_user(environ: Mapping[str, str], variable: str, below_home: str) -> pathlib.Path:
    """Return a folder of the user, as the XDG Base Directory Specification 0.8 defines it.

    Args:
      environ: Environment variables, `os.environ`.
      variable: Name of the variable, `XDG_CACHE_HOME` for instance. It is ignored if its path is
        relative.
      below_home: Path below the home folder, used if the variable is not set.

    Raises:
      FileNotFoundError: If the user has no home folder.

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
    """Return the path of a file that can be written; call it before the work that fills the file.

    Args:
      path: Path from the user.
      field: Flag that holds it, for the error.

    Raises:
      UserError: If `local` refuses the path, or the file cannot be written.
    """
    file = local(path, field)
    real = os.path.realpath(file)  # the target of a link may not exist yet
    existed = os.path.exists(real)
    try:
        open(real, "a").close()
        if not existed:
            os.unlink(real)
    except OSError as error:
        fix = (
            f"it cannot be written ({error.strerror}); give a file in a folder that exists and is "
            "yours"
        )
        raise UserError(field, os.fspath(path), fix, code="resource") from error
    return file
