"""Objects of a running program that configs name, and digests that tell them apart."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

MODULE = "given"
"""The module in the place of an object that no module has."""
_BLOCK_BYTES = 2**20
_MOST_BLOCKS = 64
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
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
    found = _Digest(given)
    first = f"{MODULE}:{name}_{found.hexadecimal}"
    place = first
    number = 1
    while found.is_partial and _objects.get(place, given) is not given:
        number += 1
        place = f"{first}_{number}"
    _objects[place] = given
    return place


def find(place: str) -> Any:
    """Return the object that `keep` put at a place.

    Raises:
      LookupError: If it was kept in another program.
    """
    return _objects[place]


def digest(given: Any) -> str:
    """Return 8 hexadecimal digits that depend on an object's source and variables, or on its data.

    Of an array of more than 64 MiB, 64 blocks of 1 MiB count.

    >>> digest({"x": np.zeros(3)}) == digest({"x": np.zeros(3)}) != digest({"x": np.ones(3)})
    True
    """
    return _Digest(given).hexadecimal


class _Digest:
    """Digest of an object.

    Attributes:
      is_partial: Whether two objects that differ may have the same digest.
    """

    def __init__(self, given: Any):
        self._hash = hashlib.sha256()
        self._seen: set[int] = set()
        self.is_partial = False
        self._add(given)

    @property
    def hexadecimal(self) -> str:
        return self._hash.hexdigest()[:8]

    def _write(self, *parts: str | bytes) -> None:
        for part in parts:
            self._hash.update(part if isinstance(part, bytes) else part.encode("utf-8", "replace"))
            self._hash.update(b"\0")

    def _add(self, given: Any) -> None:
        if given is None or isinstance(given, str | bytes | int | float | complex):
            self._write(repr(given))
        elif id(given) in self._seen:  # a function that calls itself
            self._write("again")
        else:
            self._seen.add(id(given))
            self._add_object(given)

    def _add_object(self, given: Any) -> None:
        if isinstance(given, Mapping):
            self._add_all(part for item in given.items() for part in item)
        elif isinstance(given, functools.partial):
            self._add_all((given.func, given.args, given.keywords))
        elif isinstance(given, tuple | list):
            self._write(type(given).__name__)
            self._add_all(given)
        elif hasattr(given, "to_numpy") and hasattr(given, "columns"):  # a table of pandas
            self._add_all(part for name in given.columns for part in (name, given[name].to_numpy()))
        elif hasattr(given, "dtype") and hasattr(given, "shape"):
            self._write(*_parts_of_array(np.asarray(given)))
        elif inspect.isclass(given):
            self._write(_source_of(given))
        elif isinstance(given, types.FunctionType):
            self._write(_source_of(given))
            cells = given.__closure__ or ()
            self._add_all(cell.cell_contents for cell in cells if _is_filled(cell))
            self._add_all((given.__defaults__, given.__kwdefaults__))
        elif inspect.ismodule(given) or inspect.isbuiltin(given):
            self._write(given.__name__)
        else:
            text = repr(given)
            self.is_partial |= _ADDRESS.search(text) is not None
            self._write(_source_of(type(given)), _ADDRESS.sub("", text))

    def _add_all(self, several: Any) -> None:
        for one in several:
            self._add(one)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that has no value yet
        return False


def _parts_of_array(array: np.ndarray) -> list[str | bytes]:
    shape = f"{array.dtype}{array.shape}"
    if array.dtype.hasobject:
        return [shape, repr(array.tolist())]
    flat = np.ascontiguousarray(array).reshape(-1)
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
