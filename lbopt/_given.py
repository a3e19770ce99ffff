"""Objects of a running program that configs name, and digests that tell them apart."""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import hashlib
import inspect
import re
import sys
import types
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from lbopt._installed import is_of_user

MODULE = "given"
"""The module in the place of an object that no module has."""
_BLOCK_BYTES = 2**20
_MOST_BLOCKS = 64
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_READS = ("LOAD_GLOBAL", "LOAD_NAME")
_INSIDE = ("__wrapped__", "__func__", "__self__", "fget", "fset", "fdel", "func", "method")
"""Attributes of methods, properties and wrappers with the code and the object inside."""


class _KeptPlace(str):
    """The text of a place, which keeps its object alive as long as a config holds it."""

    given: Any

    def __deepcopy__(self, memo: Any) -> _KeptPlace:
        return self

    def __reduce__(self) -> Any:
        return str, (str(self),)  # an object of this program is of no use in another one


_places: weakref.WeakValueDictionary[str, _KeptPlace] = weakref.WeakValueDictionary()


def keep(given: Any, name: str) -> str:
    """Return the place at which `find` returns an object of this program.

    The object is kept as long as the place, in a config for instance. The place has a digest of the
    object's source and data. So a program that runs again gives the same objects the same places,
    and a changed object another one.

    Args:
      given: The object.
      name: Name for messages, where the object has none.
    """
    own = getattr(given, "__name__", name)
    name = own if own.isidentifier() else name
    found = _Digest(given)
    first = f"{MODULE}:{name}_{found.hexadecimal}"
    text = first
    number = 1
    while (known := _places.get(text)) is not None:
        if known.given is given or not found.is_partial:
            return known
        number += 1
        text = f"{first}_{number}"
    place = _KeptPlace(text)
    place.given = given
    _places[text] = place
    return place


def find(place: str) -> Any:
    """Return the object that `keep` put at a place.

    Raises:
      LookupError: If it was kept in another program, or nothing has its place any more.
    """
    return _places[place].given


def digest(given: Any) -> str:
    """Return 8 hexadecimal digits that depend on an object's source and variables, or on its data.

    Code of the user counts with all that it uses: base classes, variables of its surroundings, and
    global variables with the functions and the data that they mean. Code of packages counts by
    name. Of an array of more than 64 MiB, 64 blocks of 1 MiB count.

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
        # Objects by their id, which stays theirs as long as they are kept here.
        self._seen: dict[int, tuple[int, Any]] = {}
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
        elif id(given) in self._seen:  # a function that calls itself, or one array twice
            self._write(f"again {self._seen[id(given)][0]}")
        else:
            self._seen[id(given)] = (len(self._seen), given)
            self._add_object(given)

    def _add_object(self, given: Any) -> None:
        if inspect.isclass(given):
            self._add_class(given)
        elif isinstance(given, types.FunctionType):
            self._add_function(given)
        elif inspect.ismodule(given) or inspect.isbuiltin(given):
            self._write(given.__name__)
        elif isinstance(given, functools.partial):
            self._add_all((given.func, given.args, given.keywords))
        elif hasattr(given, "to_numpy") and hasattr(given, "columns"):  # a table of pandas
            self._add_all(part for name in given.columns for part in (name, given[name].to_numpy()))
        elif hasattr(given, "dtype") and hasattr(given, "shape"):
            self._add_array(given)
        elif isinstance(given, Mapping | tuple | list | set | frozenset):
            self._add_container(given)
        else:
            self._add_instance(given)

    def _add_all(self, several: Iterable[Any]) -> None:
        for one in several:
            self._add(one)

    def _add_container(self, given: Any) -> None:
        self._write(f"{type(given).__name__} {len(given)}")
        if isinstance(given, Mapping):
            self._add_all(part for item in given.items() for part in item)
        elif isinstance(given, tuple | list):
            self._add_all(given)
        else:  # the order of a set is another one in another program
            self._write(*sorted(digest(one) for one in given))

    def _add_array(self, given: Any) -> None:
        is_key = str(given.dtype).startswith("key<")  # of jax.random
        array = np.asarray(sys.modules["jax"].random.key_data(given[...]) if is_key else given)
        self._write(f"{given.dtype}{array.shape}")
        if array.dtype.hasobject:
            self._add(array.tolist())
        else:
            self.is_partial |= array.nbytes > _MOST_BLOCKS * _BLOCK_BYTES
            self._write(*_blocks_of(array))

    def _add_class(self, given: type) -> None:
        self._write(f"{given.__module__}.{given.__qualname__}")
        if _is_installed(given.__module__):
            return
        self._add_all(given.__bases__)
        for name, value in sorted(vars(given).items()):
            is_code = isinstance(value, types.FunctionType)
            if is_code or not name.startswith("__"):
                self._write(name)
                is_partial = self.is_partial
                self._add(value)
                # What frameworks and dataclasses add to a class may have no telling repr.
                is_written = is_code and inspect.unwrap(value).__code__.co_filename != "<string>"
                if not is_written and _is_installed(type(value).__module__):
                    self.is_partial = is_partial

    def _add_function(self, given: types.FunctionType) -> None:
        self._write(f"{given.__module__}.{given.__qualname__}")
        code = given.__code__
        # A decorator of a package calls itself what it decorates, but its variables are its own.
        if not _is_installed(given.__globals__.get("__name__")):
            self._write(*_parts_of_code(given))
            for name in sorted(_globals_of(code) & given.__globals__.keys()):
                self._write(name)
                self._add(given.__globals__[name])
        for name, cell in zip(code.co_freevars, given.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a variable that has no value yet
                self._add_all((name, cell.cell_contents))
        self._add_all((given.__defaults__, given.__kwdefaults__))

    def _add_instance(self, given: Any) -> None:
        kind = type(given)
        self._add(kind)
        if dataclasses.is_dataclass(given):
            names = [field.name for field in dataclasses.fields(given)]
            self._add([(name, getattr(given, name, None)) for name in names])
        elif names := _variables_of(given):
            self._add([(name, vars(given)[name]) for name in names])
        elif inside := [
            part for name in _INSIDE if (part := getattr(given, name, None)) is not None
        ]:
            self._add_all(inside)
        else:
            text = repr(given)
            self.is_partial |= _ADDRESS.search(text) is not None
            self._write(_ADDRESS.sub("", text))


def _variables_of(given: Any) -> list[str]:
    """Return the names of the variables of an object of the user's, and of a module of NNX."""
    jax = sys.modules.get("jax")
    is_tree = jax is not None and not jax.tree_util.all_leaves([given])
    if _is_installed(type(given).__module__) and not is_tree:
        return []
    names = getattr(given, "__dict__", {})
    return sorted(name for name in names if not name.startswith("_pytree__"))


def _blocks_of(array: np.ndarray) -> list[bytes]:
    if array.nbytes <= _MOST_BLOCKS * _BLOCK_BYTES:
        return [array.tobytes()]
    # A view is not copied as a whole: it may be of a file that is larger than the memory.
    flat = array.reshape(-1) if array.flags.c_contiguous else array
    width = max(1, _BLOCK_BYTES * len(flat) // array.nbytes)
    starts = np.linspace(0, len(flat) - width, _MOST_BLOCKS).astype(int)
    return [flat[start : start + width].tobytes() for start in starts]


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Return whether a module is of Python or of an installed package."""
    found = sys.modules.get(module or "")
    if module == "__main__" or found is None:
        return False
    file = getattr(found, "__file__", None)
    return file is None or not is_of_user(file)


def _globals_of(code: types.CodeType) -> set[str]:
    """Return the names of the global variables that code reads, with the functions inside it."""
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    read = {one.argval for one in dis.get_instructions(code) if one.opname in _READS}
    return read.union(*map(_globals_of, inner))


def _parts_of_code(function: types.FunctionType) -> list[str]:
    """Return a function's source, or what it is compiled to if that has no source of its own."""
    # Others may be in a lambda's line. And since Python 3.13 the text of `python -c` counts as the
    # source of all that is compiled from a string without a name.
    if function.__name__ != "<lambda>" and function.__code__.co_filename != "<string>":
        with contextlib.suppress(OSError, TypeError):
            return [inspect.getsource(function.__code__)]
    return _compiled(function.__code__)


def _compiled(code: types.CodeType) -> list[str]:
    parts = [code.co_code.hex(), repr((code.co_names, code.co_varnames))]
    for part in code.co_consts:
        parts += _compiled(part) if isinstance(part, types.CodeType) else [digest(part)]
    return parts
