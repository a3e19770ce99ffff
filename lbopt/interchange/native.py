"""Our own layout: one safetensors file whose keys are the path names that masks and messages use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from lbopt import paths, types
from lbopt.errors import UserError
from lbopt.interchange import files, names

FORMAT = "lbopt"


def save_safetensors(
    file: paths.GivenPath, variables: Mapping[str, types.PyTree], metadata: Mapping[str, str] | None = None
) -> None:
    """Write variables under their names, `params/...` and `batch_stats/...`, in the precision they have.

    Args:
      file: to write; one that is there is replaced when the new one is whole.
      variables: {"params": ..., "batch_stats": ...}.
      metadata: strings to keep beside them; `format` is ours.
    """
    place = paths.local(file, "file")
    partial = place.with_name(f".{place.name}.{os.getpid()}")
    arrays = {name: np.asarray(leaf) for name, leaf in names.flatten(variables).items()}
    try:
        files.write(partial, arrays, {**(metadata or {}), "format": FORMAT})
        os.replace(partial, place)
    finally:
        partial.unlink(missing_ok=True)


def load_safetensors(file: paths.GivenPath) -> tuple[dict[str, Any], dict[str, str]]:
    """Read what `save_safetensors` wrote, bit for bit.

    Returns:
      The variables and the metadata.

    Raises:
      UserError: if it is another file.
    """
    with _opened(file) as (handle, metadata):
        flat = {name: jnp.asarray(handle.get_tensor(name)) for name in handle.keys()}  # noqa: SIM118
    return names.unflatten(flat), metadata


def read_metadata(file: paths.GivenPath) -> dict[str, str]:
    """Return the metadata alone; see `load_safetensors`."""
    with _opened(file) as (_, metadata):
        return metadata


@contextlib.contextmanager
def _opened(file: paths.GivenPath) -> Iterator[tuple[Any, dict[str, str]]]:
    place = paths.local(file, "file")
    if not place.is_file():
        raise UserError(f"{place}: no such file; give a model.safetensors of lbopt export --format=safetensors")
    with files.opened(place) as handle:
        metadata = handle.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise UserError(
                f"{place}: format = {metadata.get('format')!r} in its metadata, not {FORMAT!r}; "
                "give a file of lbopt export --format=safetensors, or the folder to lbopt.load_huggingface"
            )
        yield handle, metadata
