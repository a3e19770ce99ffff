"""Parts of a config as text: their names, and the fields that are not at their defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

OF_THE_MACHINE = ("data_dir", "reader_threads", "reader_processes", "max_damaged_records")
"""Fields of data that say where and how they are read, not what they are."""


def part(config: Any, left_out: Collection[str] = OF_THE_MACHINE) -> str:
    """Return a part of the config by its name and the fields that are not at their defaults."""
    return with_fields(config.name, changed(config, (*left_out, "name")))


def with_fields(name: str, fields: Collection[str]) -> str:
    """Return a name with fields in brackets, if there are any."""
    return f"{name} ({', '.join(fields)})" if fields else name


def changed(config: Any, left_out: Collection[str] = ()) -> list[str]:
    """Return "field=value" for every field that is not at its default."""
    default = type(config)()
    names = [f.name for f in dataclasses.fields(config) if f.name not in left_out]
    values = [(name, getattr(config, name)) for name in names]
    return [f"{name}={value(one)}" for name, one in values if one != getattr(default, name)]


def value(given: Any) -> str:
    """Return a value as it is written in a config file.

    >>> value((16, 32)), value(0.0001), value(20.0), value("sqrt")
    ('(16, 32)', '0.0001', '20', 'sqrt')
    """
    if isinstance(given, tuple):
        return f"({', '.join(map(value, given))}{',' * (len(given) == 1)})"
    return f"{given:.6g}" if isinstance(given, float) else str(given)
