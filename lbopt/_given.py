"""Objects of a running program that configs name, and digests that tell them apart."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

MODULE = "given"
"""The module in the place of an object that no module has."""
_BLOCK_BYTES = 2**20
_MOST_BLOCKS = 64
_objects: dict[str, Any] = {}


def keep(given: Any, name: str) -> str:
    """Keep an object of this program, and return the place at which `find` returns it.

    The place has a digest of the object's source and data. So a program that runs again gives the
    same objects the same places, and a changed object another one.

    Args:
      given: The object.
      name: Name for messages, where the object has none.
    """
    own = getattr(given, "__name__", name)
    name = own if own.isidentifier() else name
    first = f"{MODULE}:{name}_{digest(given)}"
    place = first
    number = 1
    while place in _objects and not _same(_objects[place], given):
        number += 1
        place = f"{first}_{number}"
    _objects[place] = given
    return place


def _same(known: Any, given: Any) -> bool:
    # Of two equal dicts of arrays either will do; of two functions, their variables may differ.
    return known is given or (isinstance(given, Mapping) and isinstance(known, Mapping))


def find(place: str) -> Any:
    """Return the object that `keep` put at a place.

    Raises:
      LookupError: If it was kept in another program.
    """
    return _objects[place]


def digest(given: Any) -> str:
    """Return 8 hexadecimal digits that depend on an object's source, or on its data.

    Of an array of more than 64 MiB, 64 blocks of 1 MiB count.

    >>> digest({"x": np.zeros(3)}) == digest({"x": np.zeros(3)}) != digest({"x": np.ones(3)})
    True
    """
    found = hashlib.sha256()
    for part in _parts(given):
        found.update(part if isinstance(part, bytes) else part.encode("utf-8", "replace"))
        found.update(b"\0")
    return found.hexdigest()[:8]


def _parts(given: Any) -> list[str | bytes]:
    """Return what the digest of an object is made of."""
    if isinstance(given, Mapping):
        return [part for name, value in given.items() for part in (str(name), *_parts(value))]
    if isinstance(given, functools.partial):
        return [part for one in (given.func, given.args, given.keywords) for part in _parts(one)]
    if isinstance(given, tuple | list):
        return [type(given).__name__, *(part for one in given for part in _parts(one))]
    if hasattr(given, "to_numpy") and hasattr(given, "columns"):  # a table of pandas
        return _parts({name: given[name].to_numpy() for name in given.columns})
    if hasattr(given, "dtype") and hasattr(given, "shape"):
        return _parts_of_array(np.asarray(given))
    is_code = inspect.isclass(given) or inspect.isroutine(given)
    if is_code:
        return [_source_of(given)]
    return [_source_of(type(given)), re.sub(r" at 0x[0-9a-f]+", "", repr(given))]


def _parts_of_array(array: np.ndarray) -> list[str | bytes]:
    shape = f"{array.dtype}{array.shape}"
    if array.dtype.hasobject:
        return [shape, repr(array.tolist())]
    flat = (
        array.reshape(-1) if array.flags.c_contiguous else np.ascontiguousarray(array).reshape(-1)
    )
    width = max(1, _BLOCK_BYTES // max(1, array.itemsize))
    if flat.nbytes <= _MOST_BLOCKS * _BLOCK_BYTES:
        return [shape, flat.tobytes()]
    starts = np.linspace(0, len(flat) - width, _MOST_BLOCKS).astype(int)
    return [shape, *(flat[start : start + width].tobytes() for start in starts)]


def _source_of(code: Any) -> str:
    name = f"{getattr(code, '__module__', '')}.{getattr(code, '__qualname__', '')}"
    try:
        return f"{name}\n{inspect.getsource(code)}"
    except (OSError, TypeError):  # typed into an interpreter that keeps no source
        return name
