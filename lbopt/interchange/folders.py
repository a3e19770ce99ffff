"""A folder that is there whole or not at all, and never in the place of another one."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from lbopt import paths, unfinished
from lbopt.errors import EnvironmentProblem, UserError


def require_new(path: paths.GivenPath, field: str) -> pathlib.Path:
    """Return the absolute path of a folder that is not there yet, or is empty.

    Raises:
      UserError: if something is there.
    """
    place = pathlib.Path(os.path.abspath(paths.local(path, field)))
    try:
        taken = any(place.iterdir()) if place.is_dir() else os.path.lexists(place)
    except OSError as error:
        raise EnvironmentProblem(
            f"{field} = {str(path)!r}: cannot be read ({error.strerror}); use another"
        ) from error
    if taken:
        raise UserError(
            f"{field} = {str(path)!r}: something is there, and nothing is overwritten; give a new folder"
        )
    return place


@contextlib.contextmanager
def new_folder(path: paths.GivenPath, field: str = "directory") -> Iterator[pathlib.Path]:
    """Yield a hidden folder beside `path`; it is renamed to `path` at the end, and removed if that is not reached.

    What killed processes have left beside `path` is removed.

    Raises:
      UserError: if something is at `path`.
      EnvironmentProblem: if it cannot be written.
    """
    place = require_new(path, field)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.folder(place) as partial:
            yield partial
            for file in partial.iterdir():
                _flush(file)
            os.replace(partial, place)
    except OSError as error:
        raise EnvironmentProblem(
            f"{field} = {str(path)!r}: cannot be written ({error.strerror or error}); free space or use another folder"
        ) from error


def write_json(file: pathlib.Path, data: Any) -> None:
    """Write a JSON file as `transformers` spells it: sorted, two spaces."""
    file.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")


def _flush(file: pathlib.Path) -> None:
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())
