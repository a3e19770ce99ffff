"""New folders that appear only when they are complete, and never replace another folder."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from lbopt import _unfinished, paths
from lbopt.errors import NO_VALUE, EnvironmentProblem, require


def require_new_folder(path: paths.GivenPath, field: str) -> paths.GivenPath:
    """Return the absolute path of a folder, which must not exist yet or be empty; or its address.

    Args:
      path: The path, or gs://BUCKET/FOLDER, that the user gave.
      field: The flag or argument that gave it, for messages.

    Raises:
      UserError: If a file or a folder that is not empty exists there.
      EnvironmentProblem: If the folder cannot be read.
    """
    fix = "something is there, and nothing is overwritten; give a new folder"
    address = paths.local_or_bucket(path, field)
    if paths.is_address(address):
        taken = paths.exists_in_bucket(address, field)
        require(not taken, field, address, fix, code="exists")
        return address

    folder = pathlib.Path(os.path.abspath(paths.local(path, field)))
    try:
        taken = any(folder.iterdir()) if folder.is_dir() else os.path.lexists(folder)
    except OSError as error:
        raise EnvironmentProblem(
            field, str(path), f"cannot be read ({error.strerror}); use another", code="resource"
        ) from error
    require(not taken, field, str(path), fix, code="exists")
    return folder


@contextlib.contextmanager
def new_folder(path: paths.GivenPath, field: str = "directory") -> Iterator[pathlib.Path]:
    """Yield a hidden folder beside `path`, which is renamed to `path` at the end.

    After an error it is removed instead. Hidden folders of killed processes are removed too. For an
    address it is a temporary folder, whose files are written to the bucket at the end.

    Args:
      path: The path of the new folder, or gs://BUCKET/FOLDER.
      field: The flag or argument that gave it, for messages.

    Raises:
      UserError: If a file or a folder that is not empty exists at `path`.
      EnvironmentProblem: If the folder cannot be written.
    """
    folder = require_new_folder(path, field)
    if not isinstance(folder, pathlib.Path):
        with paths.written(folder, field) as made, writing(field, str(path)):
            made.mkdir()
            yield made
        return

    with writing(field, str(path)):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _unfinished.folder(folder) as partial:
            yield partial
            for file in partial.iterdir():
                _flush(file)
            os.replace(partial, folder)


@contextlib.contextmanager
def writing(
    field: str, value: str = NO_VALUE, errors: tuple[type[Exception], ...] = (OSError,)
) -> Iterator[None]:
    """Turn errors of writing into an `EnvironmentProblem`.

    Args:
      field: The flag, argument or path that names the file or folder.
      value: Value of the field.
      errors: Classes of the errors.
    """
    try:
        yield
    except errors as error:
        reason = getattr(error, "strerror", None) or error
        fix = f"cannot be written ({reason}); free space or use another folder"
        raise EnvironmentProblem(field, value, fix, code="resource") from error


def write_json(file: pathlib.Path, data: Any) -> None:
    """Write a JSON file in the style of `transformers`: sorted keys, two spaces of indentation."""
    file.write_text(json_text(data))


def json_text(data: Any) -> str:
    """Return the text of a JSON file in the style of `transformers`."""
    return json.dumps(data, indent=2, sort_keys=True) + "\n"


def _flush(file: pathlib.Path) -> None:
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())
