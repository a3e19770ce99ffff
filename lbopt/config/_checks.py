"""Checks that every config shares: types of the fields, and the ways to and from JSON."""

from __future__ import annotations

import dataclasses
import json
import types as python_types
import typing
from collections.abc import Collection
from typing import Any

from lbopt.errors import UserError, require

LARGEST_INTEGER = 2**31
MOST_STEPS = 2**30
"""Steps of a phase: those of two phases, and one more, still fit an int32."""
_WIDEST = 80
"""Characters of a value that a message shows."""


def check_types(config: Any, prefix: str = "config") -> None:
    """Raise `UserError` for the first field whose value does not have its declared type.

    An int is a float here; a bool is not an int.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name, value = f"{prefix}.{field.name}", getattr(config, field.name)
        if not _matches(value, hints[field.name]):
            raise UserError(f"{name} = {value!r}: give a value of type {_spell(hints[field.name])}")
        if dataclasses.is_dataclass(value):
            check_types(value, name)
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if dataclasses.is_dataclass(item):
                    check_types(item, f"{name}[{index}]")


def check_fields(config: Any, prefix: str = "config") -> None:
    """Raise `UserError` for a field that a config file's own class adds to lbopt's: it would be saved, and could not be read.

    Args:
      config: What a config file gives; what is none of lbopt's is left to others.
      prefix: What the message calls it.
    """
    ours = next(
        (kind for kind in type(config).__mro__ if kind.__module__.startswith("lbopt.")), None
    )
    if ours is None or not dataclasses.is_dataclass(ours):
        return
    known = {field.name for field in dataclasses.fields(ours)}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        fix = f"{ours.__name__} has no such field, and no command could read it back; take it out"
        require(field.name in known, f"{prefix}.{field.name}", value, fix)
        for item in value if isinstance(value, tuple) else (value,):
            check_fields(item, f"{prefix}.{field.name}")


def _matches(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, python_types.UnionType):
        return any(_matches(value, option) for option in arguments)
    if origin is tuple:
        if not isinstance(value, (tuple, list)):
            return False
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        return len(kinds) == len(value) and all(
            _matches(item, kind) for item, kind in zip(value, kinds, strict=True)
        )
    if hint in (int, float):
        allowed = (int,) if hint is int else (int, float)
        return isinstance(value, allowed) and not isinstance(value, bool)
    return isinstance(value, hint)


def _spell(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def config_to_json(config: Any) -> dict[str, Any]:
    """Return a config dataclass as plain JSON data (tuples become lists)."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def config_from_json(kind: type, data: Any, written_by: str = "?", prefix: str = "config") -> Any:
    """Return the config dataclass that `config_to_json` was given; fields that are left out have their defaults.

    Args:
      kind: the dataclass.
      data: plain JSON data.
      written_by: the version of lbopt that wrote it, for the message.
      prefix: what the message calls the config.

    Raises:
      UserError: for a field that this version does not have.

    >>> point = dataclasses.make_dataclass("Point", [("at", "tuple[int, ...]")])
    >>> config_from_json(point, {"at": [1, 2]})
    Point(at=(1, 2))
    """
    hints = typing.get_type_hints(kind)
    if not isinstance(data, dict):
        raise UserError(
            f"{prefix} = {data!r}: not a group of fields; use the file that lbopt {written_by} wrote"
        )
    for name in data:
        if name not in hints:
            raise UserError(
                f"{prefix}.{name} = {data[name]!r}: this lbopt has no such field; use lbopt {written_by}, which wrote it"
            )
    return kind(
        **{
            name: _revive(hints[name], value, written_by, f"{prefix}.{name}")
            for name, value in data.items()
        }
    )


def _revive(hint: Any, value: Any, written_by: str, prefix: str) -> Any:
    """Turn lists into tuples and groups of fields into dataclasses, as the declared type says."""
    for option in (
        typing.get_args(hint)
        if typing.get_origin(hint) in (typing.Union, python_types.UnionType)
        else (hint,)
    ):
        if dataclasses.is_dataclass(option) and isinstance(option, type) and value is not None:
            return config_from_json(option, value, written_by, prefix)
        if typing.get_origin(option) is tuple and isinstance(value, list):
            kinds = typing.get_args(option)
            kinds = (
                kinds[:1] * len(value)
                if kinds[-1] is Ellipsis
                else kinds + (Any,) * (len(value) - len(kinds))
            )
            return tuple(
                _revive(*pair, written_by, prefix) for pair in zip(kinds, value, strict=False)
            )
    return value


def completed_json(kind: type, data: Any) -> Any:
    """Return JSON data of a config with the defaults of fields that an earlier version did not have.

    Args:
      kind: the dataclass.
      data: what `config_to_json` gave there. Fields that this version does not have stay.

    >>> from lbopt.config import ParallelConfig
    >>> completed_json(ParallelConfig, {"backend": "pmap", "order": "given"})["num_microsteps"]
    1
    """
    if not isinstance(data, dict):
        return data
    hints, found = typing.get_type_hints(kind), dict(data)
    for field in dataclasses.fields(kind):
        if field.name not in data and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
            found[field.name] = (
                config_to_json(default) if dataclasses.is_dataclass(default) else list(default)
            )
        elif field.name not in data and field.default is not dataclasses.MISSING:
            found[field.name] = json.loads(json.dumps(field.default))
        elif field.name in data:
            found[field.name] = _completed_value(hints[field.name], data[field.name])
    return found


def _completed_value(hint: Any, value: Any) -> Any:
    for option in (hint, *typing.get_args(hint)):
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            return (
                [completed_json(option, one) for one in value]
                if isinstance(value, list)
                else completed_json(option, value)
            )
    return value


def json_without(data: Any, names: Collection[str]) -> Any:
    """Return JSON data of a config without some fields.

    >>> json_without({"a": {"b": 1, "c": 2}, "d": 3}, ["a.b", "d"])
    {'a': {'c': 2}}
    """
    if not isinstance(data, dict):
        return data
    inner = {
        key: [name.removeprefix(f"{key}.") for name in names if name.startswith(f"{key}.")]
        for key in data
    }
    return {key: json_without(value, inner[key]) for key, value in data.items() if key not in names}


def json_differences(ours: Any, theirs: Any, prefix: str = "") -> list[str]:
    """List the dotted fields in which two JSON configs differ, as `field: theirs there, ours here`.

    >>> json_differences({"a": {"b": 1}}, {"a": {"b": 2}})
    ['a.b is 2 there and 1 here']
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = []
        for key in sorted(set(ours) | set(theirs)):
            found += json_differences(
                ours.get(key), theirs.get(key), f"{prefix}.{key}" if prefix else key
            )
        return found
    if _are_groups(ours) and _are_groups(theirs) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [
            said for index, pair in pairs for said in json_differences(*pair, f"{prefix}[{index}]")
        ]
    return [] if ours == theirs else [f"{prefix} is {_shown(theirs)} there and {_shown(ours)} here"]


def _are_groups(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) > 0 and all(isinstance(item, dict) for item in value)
    )


def _shown(value: Any) -> str:
    if _are_groups(value):
        return f"[{len(value)} x {{...}}]"
    text = "{...}" if isinstance(value, dict) else repr(value)
    return text if len(text) <= _WIDEST else f"{text[:_WIDEST]}..."


def at_least(field: str, value: Any, low: float) -> None:
    """Check that a number is at least `low`, and finite."""
    require(
        low <= value < LARGEST_INTEGER, field, value, f"give a number >= {low:g} (and below 2^31)"
    )


def in_range(field: str, value: float, low: float, high: float) -> None:
    """Check that a number is in [low, high)."""
    require(low <= value < high, field, value, f"give a number in [{low:g}, {high:g})")
