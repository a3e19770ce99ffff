"""JSON files of lbopt, read with checks of types, nesting and size.

Errors are one line that begins with the field.
"""

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
"""Maximum size of a file that is one document; those of lbopt have some kilobytes."""
MOST_LINES_BYTES = 1 << 32
"""Maximum size of a file of lines."""
DEEPEST = 64
"""Maximum nesting; that of lbopt's files is below ten."""
_BOM = b"\xef\xbb\xbf"
_PLACE = re.compile(r" - at `(?:key in )?\$\.?(?P<place>.*)`$", re.DOTALL)
_TYPE = re.compile(r"(?:Expected|got) `[^`]*`")
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""An integer of 64 bits."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Finite = Annotated[float, msgspec.Meta(ge=-1e100, le=1e100)]
"""A number whose square is finite too."""
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e308)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Exponent = Annotated[float, msgspec.Meta(ge=-100, le=100)]
_Kind = TypeVar("_Kind")


def decode(data: bytes, kind: Any = Any) -> Any:
    """Return JSON data whose types are those of `kind`.

    Args:
      data: JSON in UTF-8. NaN and Infinity are numbers, as Python writes them.
      kind: Type of the data: a `TypedDict` or another type that msgspec knows. Fields that it does
        not name are not checked.

    Returns:
      Dicts, lists, text and numbers as they are in `data`, with the fields that `kind` does not
      name.

    Raises:
      ValueError: If the data are not JSON of this type, or nested deeper than `DEEPEST`. The
        message is one line that begins with the field.

    >>> decode(b'{"step": [1]}', dict[str, int])
    Traceback (most recent call last):
    ValueError: step: expected int, got list
    """
    found = _parse(data)
    if kind is not Any:
        convert(found, kind)
    return found


def convert(data: Any, kind: type[_Kind]) -> _Kind:
    """Return JSON data as an instance of `kind`, a dataclass for instance.

    Raises:
      ValueError: If a type differs. The message is one line that begins with the field.
    """
    try:
        return msgspec.convert(data, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        line = _field_first(str(error))
    # For a value of a dict msgspec does not say which one.
    if line.startswith("[...]") and isinstance(data, dict):
        for name, value in data.items():
            try:
                msgspec.convert(value, typing.get_args(kind)[1])
            except (msgspec.ValidationError, OverflowError):
                line = line.replace("[...]", name, 1)
                break
    raise ValueError(line)


def read_file(file: Any, kind: Any = Any, most_bytes: int = MOST_BYTES) -> Any:
    """Return the content of a JSON file; see `decode`.

    Args:
      file: `pathlib.Path`, or a path in a bucket.
      kind: Type of the data, as for `decode`.
      most_bytes: Maximum size of the file.

    Raises:
      OSError: If it cannot be read, or is no regular file.
      ValueError: If it is larger, or its content is not JSON of this type.
    """
    return decode(read_bytes(file, most_bytes), kind)


def read_bytes(file: Any, most_bytes: int) -> bytes:
    """Return the bytes of a file, without the byte order mark of UTF-8.

    Args:
      file: `pathlib.Path`, or a path in a bucket.
      most_bytes: Maximum size of a file of this machine.

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
    """A dict of fields of a file, whose error for a missing field names the file.

    Args:
      fields: name -> value.
      place: The file and the place in it, the field of the error.
      fix: End of the error's message, what to do.

    Raises:
      EnvironmentProblem: By `record["name"]`, if it has no such field.
    """

    __slots__ = ("fix", "place")

    def __init__(self, fields: Mapping[str, Any], place: str, fix: str):
        super().__init__(fields)
        self.place = place
        self.fix = fix

    def __missing__(self, name: str) -> Any:
        reason = f"it has no {name!r}; {self.fix}"
        raise EnvironmentProblem(self.place, reason=reason, code="damaged")


def records(data: Any, place: str, fix: str) -> Any:
    """Return JSON data with a `Record`, whose arguments these are, in the place of every dict."""
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
    # Most files have fewer brackets in all than may be nested, and need no walk.
    brackets = data.count(b"[") + data.count(b"{")
    if brackets > DEEPEST and _is_deeper_than(found, DEEPEST):
        raise ValueError(f"nested deeper than {DEEPEST}")
    return found


def _parsed(data: bytes) -> Any:
    """Parse by msgspec, which is fast, else by `json`, which also takes NaN and lone surrogates."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:
            return json.loads(data.decode())
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from error


def _is_deeper_than(data: Any, most: int) -> bool:
    groups = [data]
    for _ in range(most + 1):
        children = (child for group in groups for child in _children(group))
        groups = [child for child in children if isinstance(child, dict | list)]
        if not groups:
            return False
    return True


def _children(group: Any) -> Iterator[Any]:
    if isinstance(group, dict):
        yield from group.values()
    elif isinstance(group, list):
        yield from group


def _field_first(message: str) -> str:
    """Put the field before a message of msgspec.

    >>> _field_first("Expected `int`, got `str` - at `$.a[0]`")
    'a[0]: expected int, got str'
    """
    found = _PLACE.search(message)
    reason = message[: found.start()] if found else message
    reason = _TYPE.sub(lambda type_: type_[0].replace("array", "list"), reason).replace("`", "")
    reason = reason[:1].lower() + reason[1:]
    return f"{found['place']}: {reason}" if found else reason
