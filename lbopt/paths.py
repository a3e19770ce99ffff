"""The rule for paths from users: a path of this machine, for most fields also gs://BUCKET/PATH.

`pathlib` takes an address for a relative path and would make a folder called `gs:`. So every path
goes through one of these functions: `local` refuses addresses, `readable` copies what is there,
`writable`, `write_text` and `written` write there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

from lbopt import _bucket_files
from lbopt.errors import EnvironmentProblem, UserError, require

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
"""A file or folder of a bucket; no part of its path is empty, "." or ".."."""


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
    """Return a path of this machine unchanged, or gs://BUCKET/PATH without slashes at its end.

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
    require(
        _BUCKET.fullmatch(text), field, text, "give a path of this machine, or gs://BUCKET/PATH"
    )
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


def readable(path: GivenPath, field: str, beside: Sequence[str] = ()) -> pathlib.Path:
    """Return a path of this machine with the content of a path or address from the user.

    What is in a bucket is copied, see `_bucket_files.copied`: into the folder that the environment
    variable LBOPT_BUCKET_CACHE names, or into one that is removed when this process ends.

    Args:
      path: Path of this machine, or gs://BUCKET/PATH of a file or folder.
      field: Flag, field or argument that holds it, for the error.
      beside: Names of files in the same folder that readers look for.

    Raises:
      UserError: If `local_or_bucket` refuses the path, or nothing is at the address.
      EnvironmentProblem: If the bucket cannot be read, or the copy cannot be written.
    """
    text = local_or_bucket(path, field)
    if not is_address(text):
        return local(path, field)
    cache = os.environ.get(_bucket_files.CACHE_VARIABLE)
    kept = local(cache, _bucket_files.CACHE_VARIABLE).absolute() if cache else None
    return _bucket_files.copied(text, field, kept, beside)


def writable(path: GivenPath, field: str) -> GivenPath:
    """Return the path of a file that can be written; call it before the work that fills the file.

    Args:
      path: Path of this machine, or gs://BUCKET/PATH.
      field: Flag that holds it, for the error.

    Raises:
      UserError: If `local_or_bucket` refuses the path, or the file cannot be written.
      EnvironmentProblem: If the bucket cannot be written.
    """
    text = local_or_bucket(path, field)
    if is_address(text):
        _bucket_files.check_writable(text, field)
        return text
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


def write_text(path: GivenPath, text: str, field: str) -> None:
    """Write a file that `writable` returned.

    Raises:
      EnvironmentProblem: If it cannot be written.
    """
    if is_address(path):
        with written(path, field) as file:
            file.write_text(text, "utf-8")
        return
    try:
        pathlib.Path(path).write_text(text, "utf-8")
    except OSError as error:
        fix = f"cannot be written ({error.strerror}); free space, or give another file"
        raise EnvironmentProblem(field, str(path), fix, code="resource") from error


@contextlib.contextmanager
def written(address: GivenPath, field: str) -> Iterator[pathlib.Path]:
    """Yield a path of this machine; what is made there is written to an address at the end.

    Args:
      address: gs://BUCKET/PATH of a file or folder.
      field: Flag, field or argument that holds it, for the error.

    Raises:
      EnvironmentProblem: If the bucket cannot be written.
    """
    with _bucket_files.written(local_or_bucket(address, field), field) as made:
        yield made


def exists_in_bucket(address: GivenPath, field: str) -> bool:
    """Return whether a file or folder is at gs://BUCKET/PATH.

    Raises:
      EnvironmentProblem: If the bucket cannot be read.
    """
    return _bucket_files.exists(local_or_bucket(address, field), field)


def names_below(folder: GivenPath, field: str) -> list[str]:
    """Return the paths of all files below gs://BUCKET/FOLDER, without the folder; [] for none.

    Raises:
      EnvironmentProblem: If the bucket cannot be read.
    """
    return _bucket_files.names_below(local_or_bucket(folder, field), field)
