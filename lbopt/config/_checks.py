"""Checks that every config shares: types of the fields, and the ways to and from JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import operator
import os
import re
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from lbopt import _user_code, errors
from lbopt.config import _fields
from lbopt.errors import require, require_choice

LARGEST_INTEGER = 2**31  # JAX counts in int32
MOST_STEPS = 2**30
"""Steps of a phase: those of two phases, and one more, still fit an int32."""
DTYPES = ("float32", "bfloat16")
"""Dtypes that a config can ask for."""
_WIDEST = 80
"""Characters of a value that a message shows."""


def check_types(config: Any) -> None:
    """Raise `UserError` for the first field whose value does not have its declared type.

    An int is a float here; a bool is not an int.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        fix = f"give a value of type {_spell(hints[field.name])}"
        require(_matches(value, hints[field.name]), field.name, value, fix, code="type")
        for name, group in _groups(field.name, value):
            with errors.under(name):
                check_types(group)


def check_numbers(config: Any) -> None:
    """Raise `UserError` for the first field with a number that is not finite or not below 2^31.

    JAX counts in int32 and computes in fp32: no field has use for a larger number.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        fits = all(abs(number) < LARGEST_INTEGER for number in _numbers(value))
        require(fits, field.name, value, "give finite numbers below 2^31")
        for name, group in _groups(field.name, value):
            with errors.under(name):
                check_numbers(group)


def _numbers(value: Any) -> Iterator[float]:
    """Yield the numbers of a field's value."""
    if isinstance(value, (int, float)):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _numbers(item)


def _groups(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the config dataclasses that a field holds, and their names."""
    items = [(name, value)]
    if isinstance(value, tuple):
        items = [(f"{name}[{index}]", item) for index, item in enumerate(value)]
    return [(name, item) for name, item in items if dataclasses.is_dataclass(item)]


def check_fields(config: Any) -> None:
    """Raise `UserError` for a field that a config file's own class adds to lbopt's.

    Such a field would be saved, and could not be read again. Objects of other classes are not
    checked here.
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
        require(field.name in known, field.name, value, fix, code="choice")
        for name, group in _groups(field.name, value):
            with errors.under(name):
                check_fields(group)


def _matches(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, option) for option in arguments)
    if origin is tuple:
        if not isinstance(value, (tuple, list)):
            return False
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        return len(kinds) == len(value) and all(
            _matches(item, kind) for item, kind in zip(value, kinds, strict=True)
        )
    if origin is dict:
        return _is_plain_mapping(value)
    if hint in (int, float):
        allowed = (int,) if hint is int else (int, float)
        return isinstance(value, allowed) and not isinstance(value, bool)
    return isinstance(value, hint)


def _is_plain_mapping(value: Any) -> bool:
    """Return whether a value is a dict of names and plain values, as JSON keeps them."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        return False
    try:
        return json.loads(json.dumps(value, allow_nan=False)) == _with_lists(value)
    except (TypeError, ValueError):
        return False


def _with_lists(value: Any) -> Any:
    """Return a value with lists for tuples."""
    if isinstance(value, dict):
        return {name: _with_lists(item) for name, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _spell(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def config_to_json(config: Any) -> dict[str, Any]:
    """Return a config dataclass as plain JSON data (tuples become lists).

    Args:
      config: A config, or one of its groups.

    >>> from lbopt.config import CheckpointConfig
    >>> config_to_json(CheckpointConfig(every_steps=50))
    {'every_steps': 50, 'keep': 3, 'best_metric': 'eval/accuracy'}
    """
    return json.loads(json.dumps(dataclasses.asdict(config)))


def config_from_json(kind: type, data: Any, written_by: str = "?") -> Any:
    """Return the config dataclass that `config_to_json` was given.

    Args:
      kind: The dataclass.
      data: Plain JSON data. Fields that are left out have their defaults.
      written_by: Version of lbopt that wrote it, for the message.

    Raises:
      UserError: For a field that this version does not have.

    >>> point = dataclasses.make_dataclass("Point", [("at", "tuple[int, ...]")])
    >>> config_from_json(point, {"at": [1, 2]})
    Point(at=(1, 2))
    """
    return _revive(kind, data, "config", written_by)


def _revive(hint: Any, value: Any, place: str, written_by: str) -> Any:
    """Turn lists into tuples and groups of fields into dataclasses, as the declared type says."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for option in typing.get_args(hint) if union else (hint,):
        if dataclasses.is_dataclass(option) and isinstance(option, type) and value is not None:
            return _revive_group(option, value, place, written_by)
        if typing.get_origin(option) is dict and isinstance(value, dict):
            return json.loads(json.dumps(value))  # of plain types, whatever read it
        if typing.get_origin(option) is tuple and isinstance(value, list):
            kinds = typing.get_args(option)
            if kinds[-1] is Ellipsis:
                kinds = kinds[:1] * len(value)
            kinds += (Any,) * (len(value) - len(kinds))
            return tuple(
                _revive(kind, item, f"{place}[{index}]", written_by)
                for index, (kind, item) in enumerate(zip(kinds, value, strict=False))
            )
    return value


def _revive_group(kind: type, data: Any, place: str, written_by: str) -> Any:
    fix = f"not a group of fields; use the file that lbopt {written_by} wrote"
    require(isinstance(data, dict), place, data, fix, code="type")
    hints = typing.get_type_hints(kind)
    fix = f"this lbopt has no such field; use lbopt {written_by}, which wrote it"
    found = {}
    with errors.under(place):
        for name, value in data.items():
            require(name in hints, name, value, fix, code="choice")
            found[name] = _revive(hints[name], value, name, written_by)
    return kind(**found)


def completed_json(kind: type, data: Any) -> Any:
    """Return JSON data that an earlier version wrote, as this one would write it.

    Fields that it did not have are added with their defaults, or with the values by which this
    version does what that one did. Fields that do not apply, whose values it accepted, are set to
    their defaults.

    Args:
      kind: The dataclass.
      data: The JSON data. Fields that this version does not have stay.

    >>> from lbopt.config import ParallelConfig
    >>> found = completed_json(ParallelConfig, {"backend": "pmap", "reduce_scatter": True})
    >>> found["num_microsteps"], found["reduce_scatter"]
    (1, False)
    """
    found = _with_defaults(kind, data)
    return _fields.without_unused(kind, found) if isinstance(found, dict) else found


def _with_defaults(kind: type, data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    hints = typing.get_type_hints(kind)
    found = dict(data)
    for field in dataclasses.fields(kind):
        if field.name in data:
            found[field.name] = _value_with_defaults(hints[field.name], data[field.name])
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
            is_group = dataclasses.is_dataclass(default)
            found[field.name] = config_to_json(default) if is_group else _with_lists(default)
        elif field.default is not dataclasses.MISSING:
            found[field.name] = json.loads(json.dumps(_fields.earlier_value(field)))
    return found


def _value_with_defaults(hint: Any, value: Any) -> Any:
    for option in (hint, *typing.get_args(hint)):
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            if isinstance(value, list):
                return [_with_defaults(option, item) for item in value]
            return _with_defaults(option, value)
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
            difference
            for index, pair in pairs
            for difference in json_differences(*pair, f"{prefix}[{index}]")
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
    """Check that a number is at least `low`."""
    require(low <= value, field, value, f"give a number >= {low:g}")


def in_range(field: str, value: float, low: float, high: float) -> None:
    """Check that a number is in [low, high)."""
    require(low <= value < high, field, value, f"give a number in [{low:g}, {high:g})")


def require_among(
    config: Any, allowed: Mapping[str, Sequence[Any]], fix: str, also: Mapping[str, str]
) -> None:
    """Raise `UserError`, code "conflict", for the first field whose value is not allowed.

    Args:
      config: A config.
      allowed: Dotted name of a field -> the values that it may have.
      fix: The reason of the error.
      also: Other fields that the reason mentions, as in `UserError`.
    """
    for field, values in allowed.items():
        value = operator.attrgetter(field)(config)
        shown = errors.NO_VALUE if dataclasses.is_dataclass(value) else value  # a group's is long
        require(value in values, field, shown, fix, code="conflict", also=also)


def naming(place: str, kind: type, **places: str) -> contextlib.AbstractContextManager[None]:
    """Put the place of a config before the fields of errors that are raised inside.

    Args:
      place: Place of the config, "config" or "config.train" for instance.
      kind: Class of the config. Other fields than its own keep their names.
      **places: Fields, or dotted beginnings of their names, that stand elsewhere.
    """
    return errors.under(place, {field.name for field in dataclasses.fields(kind)}, **places)


def require_place_or_choice(field: str, value: str, choices: Iterable[str], group: str) -> None:
    """Raise `UserError` unless a value is one of ours or names a function of the user.

    Args:
      field: The field.
      value: Its value.
      choices: The names of ours.
      group: The group of the field as flags name it, for the message.
    """
    if _user_code.is_place(value):
        return
    is_folder = group == "config.data" and value not in choices and os.path.isdir(value)
    if is_folder or re.search(r"[./:]", value):
        fix = f"unknown; for your own code give --{group}=module:name or --{group}=file.py:name"
        if group == "config.data":
            fix += f", and for a file or a folder --{group}=PATH"
            fix += f" (--{group}={value}/)" if is_folder else ""
        require(False, field, value, fix, code="choice")
    require_choice(field, value, choices)


def require_name(field: str, name: str) -> None:
    """Check that a name can be shown."""
    require(name.strip(), field, name, "give a name", code="missing")


def require_seed(field: str, seed: int) -> None:
    """Check that a seed is a number that a JAX key tells apart from all others."""
    require(0 <= seed < LARGEST_INTEGER, field, seed, "give a number in [0, 2147483648)")


def require_seeds(field: str, values: tuple[int, ...]) -> None:
    """Check that there are seeds, all different."""
    different = len(values) > 0 and len(set(values)) == len(values)
    require(different, field, values, "give at least one seed, none twice")
    for seed in values:
        require_seed(field, seed)
