"""Our own layout: one safetensors file whose keys are the path names that masks and messages use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from lbopt import paths, typed_json, types, unfinished
from lbopt.errors import EnvironmentProblem, UserError, brief
from lbopt.interchange import files, names

FORMAT = "lbopt"


def save_safetensors(
    file: paths.GivenPath,
    variables: Mapping[str, types.PyTree],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write variables under their names, `params/...` and `batch_stats/...`, in the precision they have.

    Args:
      file: to write; one that is there is replaced when the new one is whole.
      variables: {"params": ..., "batch_stats": ...}.
      metadata: strings to keep beside them; `format` is ours.

    Raises:
      EnvironmentProblem: if it cannot be written.
    """
    place = paths.local(file, "file")
    arrays = {name: np.asarray(leaf) for name, leaf in names.flatten(variables).items()}
    try:
        with unfinished.folder(place) as room:
            files.write(room / place.name, arrays, {**(metadata or {}), "format": FORMAT})
            os.replace(room / place.name, place)
    except OSError as error:
        raise EnvironmentProblem(
            f"file = {str(file)!r}: cannot be written ({error.strerror}); free space or use another folder"
        ) from error


def load_safetensors(file: paths.GivenPath) -> tuple[dict[str, Any], dict[str, str]]:
    """Read what `save_safetensors` wrote, bit for bit.

    Returns:
      The variables and the metadata.

    Raises:
      UserError: if it is another file.
    """
    with _opened(file) as (handle, metadata):
        keys = list(handle.keys())
        _check_names(keys, str(file))
        flat = {
            name: jnp.asarray(files.tensor(handle, paths.local(file, "file"), name))
            for name in keys
        }
    return names.unflatten(flat), metadata


def read_metadata(file: paths.GivenPath) -> dict[str, str]:
    """Return the metadata alone; see `load_safetensors`."""
    with _opened(file) as (_, metadata):
        return metadata


@contextlib.contextmanager
def _opened(file: paths.GivenPath) -> Iterator[tuple[Any, dict[str, str]]]:
    place = paths.local(file, "file")
    if not files.is_there(place):
        raise UserError(
            f"{brief(str(place))}: no such file; give a model.safetensors of lbopt export --format=safetensors"
        )
    with files.opened(place) as handle:
        metadata = handle.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise UserError(
                f"{place}: format = {brief(metadata.get('format'))} in its metadata, not {FORMAT!r}; "
                "give a file of lbopt export --format=safetensors, or the folder to lbopt.load_huggingface"
            )
        yield handle, metadata


def _check_names(keys: list[str], place: str) -> None:
    """Raise `UserError` if an array would lie inside of another, or too deep."""
    known = set(keys)
    for name in keys:
        parts = name.split("/")
        above = {"/".join(parts[:end]) for end in range(1, min(len(parts), typed_json.DEEPEST))}
        if len(parts) > typed_json.DEEPEST or above & known:
            raise UserError(
                f"{place}: {brief(name)} cannot be the name of an array beside the others; export it again"
            )
