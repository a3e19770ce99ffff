"""lbopt's own format: one safetensors file whose keys are the names used in masks and messages."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from lbopt import _typed_json, _unfinished, paths, types
from lbopt.errors import require
from lbopt.interchange import _files, _folders, _names

FORMAT = "lbopt"


def save_safetensors(
    file: paths.GivenPath,
    variables: Mapping[str, types.PyTree],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write variables under their names, `params/...` and `batch_stats/...`, in their own dtypes.

    Args:
      file: The file to write, or gs://BUCKET/FILE. An existing one is replaced once the new one is
        complete.
      variables: The variables, {"params": ..., "batch_stats": ...}.
      metadata: Strings to store in the file's header. The key `format` is reserved.

    Raises:
      EnvironmentProblem: If the file cannot be written.

    >>> import numpy as np, tempfile
    >>> file = f"{tempfile.mkdtemp()}/model.safetensors"
    >>> save_safetensors(file, {"params": {"w": np.ones(2)}}, metadata={"run": "7"})
    >>> load_safetensors(file)[1]["run"]
    '7'
    """
    place = paths.local_or_bucket(file, "file")
    arrays = {name: np.asarray(leaf) for name, leaf in _names.flatten(variables).items()}
    if paths.is_address(place):
        with paths.written(place, "file") as made:
            _files.write(made, arrays, {**(metadata or {}), "format": FORMAT})
        return

    path = paths.local(file, "file")
    with _folders.writing("file", str(file)), _unfinished.folder(path) as temporary:
        _files.write(temporary / path.name, arrays, {**(metadata or {}), "format": FORMAT})
        os.replace(temporary / path.name, path)


def load_safetensors(file: paths.GivenPath) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a file of `save_safetensors`; the arrays are bit for bit the ones that were written.

    Args:
      file: The file to read, or gs://BUCKET/FILE.

    Returns:
      The variables and the metadata.

    Raises:
      UserError: If the file does not exist, is damaged, or was not written by `save_safetensors`.
      EnvironmentProblem: If the file cannot be read.

    >>> import numpy as np, tempfile
    >>> file = f"{tempfile.mkdtemp()}/model.safetensors"
    >>> save_safetensors(file, {"params": {"w": np.ones(2, np.float32)}})
    >>> variables, metadata = load_safetensors(file)
    >>> print(variables["params"]["w"])
    [1. 1.]
    """
    path = paths.readable(file, "file")
    with _opened(path) as (handle, metadata):
        keys = list(handle.keys())
        _check_names(keys, path)
        flat = {name: jnp.asarray(_files.tensor(handle, path, name)) for name in keys}
    return _names.unflatten(flat), metadata


def read_safetensors_metadata(file: paths.GivenPath) -> dict[str, str]:
    """Return the metadata of a file of `save_safetensors`, without reading its arrays.

    Args:
      file: The file to read, or gs://BUCKET/FILE.

    >>> import numpy as np, tempfile
    >>> file = f"{tempfile.mkdtemp()}/model.safetensors"
    >>> save_safetensors(file, {"params": {"w": np.ones(2)}}, metadata={"step": "100"})
    >>> read_safetensors_metadata(file)["step"]
    '100'
    """
    with _opened(paths.readable(file, "file")) as (_, metadata):
        return metadata


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[tuple[Any, dict[str, str]]]:
    fix = "no such file; give a model.safetensors of lbopt export --format=safetensors"
    require(_files.path_exists(path), "file", str(path), fix, code="missing")
    with _files.opened(path) as handle:
        metadata = handle.metadata() or {}
        require(
            metadata.get("format") == FORMAT,
            f"{path}: format",
            metadata.get("format"),
            f"its metadata must say {FORMAT!r}; give a file of lbopt export --format=safetensors, "
            "or the folder to lbopt.load_huggingface",
            code="type",
        )
        yield handle, metadata


def _check_names(keys: list[str], path: pathlib.Path) -> None:
    """Raise `UserError` if an array's name lies below another array's, or too deep."""
    known = set(keys)
    for name in keys:
        parts = name.split("/")
        above = {"/".join(parts[:end]) for end in range(1, min(len(parts), _typed_json.DEEPEST))}
        require(
            len(parts) <= _typed_json.DEEPEST and not above & known,
            f"{path}: name of an array",
            name,
            "it lies below another array, or too deep; export it again",
            code="damaged",
        )
