"""Read JSON files of ours: types are checked, nesting and size are bounded, and what is wrong is said by field."""

from __future__ import annotations

import json
import os
import pathlib
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from lbopt._regular import open_regular
from lbopt.errors import EnvironmentProblem

MOST_BYTES = 1 << 26
"""Of a file that is one document: ours have some kilobytes."""
MOST_LINES_BYTES = 1 << 32
"""Of a file of lines, in all."""
DEEPEST = 64
"""Nesting of ours is below ten."""
_BOM = b"\xef\xbb\xbf"
_PLACE = re.compile(r" - at `(?:key in )?\$\.?(?P<place>.*)`$", re.DOTALL)
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""An integer that a program can take further."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Finite = Annotated[float, msgspec.Meta(ge=-1e100, le=1e100)]
"""A number with which a program can compute: its square is finite too."""
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e308)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Exponent = Annotated[float, msgspec.Meta(ge=-100, le=100)]
_Kind = TypeVar("_Kind")


def decode(data: bytes, kind: Any = Any) -> Any:
    """Return JSON data whose types are those of `kind`.

    Args:
      data: UTF-8. NaN and Infinity are numbers, as Python writes them.
      kind: What the data must be: a `TypedDict` or another type that msgspec knows. Fields that it does not name are not checked.

    Returns:
      Dicts, lists, text and numbers as they are in `data`, those that `kind` does not name too.

    Raises:
      ValueError: In one line naming the field, if it is no such JSON, or nested deeper than `DEEPEST`.

    >>> decode(b'{"step": [1]}', dict[str, int])
    Traceback (most recent call last):
    ValueError: step: expected int, got list
    """
    found = _parse(data)
    if kind is not Any:
        convert(found, kind)
    return found


def convert(data: Any, kind: type[_Kind]) -> _Kind:
    """Return JSON data as `kind`: a dataclass of it, for instance.

    Raises:
      ValueError: In one line naming the field, if its types are others.
    """
    try:
        return msgspec.convert(data, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        said = _in_our_words(str(error))
    if said.startswith("[...]") and isinstance(data, dict):  # msgspec does not say which of them
        for name, value in data.items():
            try:
                msgspec.convert(value, typing.get_args(kind)[1])
            except (msgspec.ValidationError, OverflowError):
                said = said.replace("[...]", name, 1)
                break
    raise ValueError(said)


def read_file(file: Any, kind: Any = Any, most_bytes: int = MOST_BYTES) -> Any:
    """Return what the JSON file holds; see `decode`.

    Args:
      file: A `pathlib.Path`, or a path of a bucket.
      kind: See `decode`.
      most_bytes: That the file may have.

    Raises:
      OSError: If it cannot be read, or is no regular file.
      ValueError: If it is larger, or see `decode`.
    """
    return decode(read_bytes(file, most_bytes), kind)


def read_bytes(file: Any, most_bytes: int) -> bytes:
    """Return a file's bytes without a mark of UTF-8 before them.

    Args:
      file: A `pathlib.Path`, or a path of a bucket.
      most_bytes: That it may have.

    Raises:
      OSError: If it cannot be read, or is no regular file.
      ValueError: If it is larger.
    """
    if not isinstance(file, pathlib.Path):
        return file.read_bytes().removeprefix(_BOM)
    with open_regular(file) as stream:
        if os.fstat(stream.fileno()).st_size > most_bytes:
            raise ValueError(f"it has more than {most_bytes} bytes")
        return stream.read().removeprefix(_BOM)


class Record(dict[str, Any]):
    """A group of fields of a file, which says where it is from if one is asked for that it does not have.

    Args:
      fields: Name -> value.
      place: The file and where in it, for the message.
      fix: The end of the message.

    Raises:
      EnvironmentProblem: By `record["name"]`, if there is none.
    """

    __slots__ = ("fix", "place")

    def __init__(self, fields: Mapping[str, Any], place: str, fix: str):
        super().__init__(fields)
        self.place, self.fix = place, fix

    def __missing__(self, name: str) -> Any:
        raise EnvironmentProblem(f"{self.place} has no {name!r}; {self.fix}")


def records(data: Any, place: str, fix: str) -> Any:
    """Return JSON data with a `Record` in the place of every dict; see there."""
    if isinstance(data, dict):
        named = {name: records(value, f"{place}: {name}", fix) for name, value in data.items()}
        return Record(named, place, fix)
    if isinstance(data, list):
        return [records(value, f"{place}[{index}]", fix) for index, value in enumerate(data)]
    return data


def _parse(data: bytes) -> Any:
    try:
        found = _parsed(data)
    except RecursionError as error:
        raise ValueError(f"nested deeper than {DEEPEST}") from error
    brackets = data.count(b"[") + data.count(
        b"{"
    )  # most of ours have fewer than are allowed in one another
    if brackets > DEEPEST and _is_deeper_than(found, DEEPEST):
        raise ValueError(f"nested deeper than {DEEPEST}")
    return found


def _parsed(data: bytes) -> Any:
    """Parse by msgspec, which is fast, and what it takes for no JSON as Python does: `NaN` and half a surrogate pair."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:
            return json.loads(data.decode())
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from error


def _is_deeper_than(data: Any, most: int) -> bool:
    level = [data]
    for _ in range(most + 1):
        level = [
            child for group in level for child in _children(group) if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _children(group: Any) -> Iterator[Any]:
    if isinstance(group, dict):
        yield from group.values()
    elif isinstance(group, list):
        yield from group


def _in_our_words(said: str) -> str:
    """Put the field first: "Expected `int`, got `str` - at `$.a[0]`" -> "a[0]: expected int, got str"."""
    found = _PLACE.search(said)
    what = (said[: found.start()] if found else said).replace("`", "").replace("array", "list")
    what = what[:1].lower() + what[1:]
    return f"{found['place']}: {what}" if found else what
