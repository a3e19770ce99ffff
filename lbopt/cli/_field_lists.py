"""The fields of a config as text: a reference, and the flags that set them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from lbopt._shown import shell_line
from lbopt.cli import _columns
from lbopt.config import FieldEntry, config_fields
from lbopt.errors import NO_VALUE

_INDENT = 4
_TITLES = {"TrainConfig": "a run (lbopt train)", "SweepConfig": "a study (lbopt sweep)"}


def reference(entries: Sequence[FieldEntry]) -> Iterator[str]:
    """Yield the lines of a reference.

    The fields of a dataclass are listed once. Where another group is of the same dataclass, only
    the fields that the config changes follow.

    Args:
      entries: Fields from `config_fields`, of one config or of several classes.
    """
    homes: dict[str, tuple[str, str]] = {}
    # Groups that are there are listed rather than those that are not, and arms last.
    for entry in sorted(entries, key=lambda one: (_is_absent(one), "[" in one.group)):
        homes.setdefault(entry.kind, _place(entry))
    shown = [one for one in entries if homes[one.kind] == _place(one) or one.changed]
    titled = len({entry.root for entry in shown}) > 1

    before: FieldEntry | None = None
    for entry in shown:
        if titled and (before is None or before.root != entry.root):
            yield from [""] if before else []
            yield from (_TITLES[entry.root], "")
        elif before and (entry.holds or entry.group not in (before.group, before.name)):
            yield ""
        yield from _described(entry, homes.get(entry.holds))
        before = entry


def _is_absent(entry: FieldEntry) -> bool:
    """Return whether a config has None in place of the field's group."""
    return entry.applies is not None and entry.value is NO_VALUE and not entry.holds


def _place(entry: FieldEntry) -> tuple[str, str]:
    """Return the config and the group of a field."""
    return entry.root, entry.group


def _described(entry: FieldEntry, home: tuple[str, str] | None) -> Iterator[str]:
    """Yield the lines of one field.

    Args:
      entry: The field.
      home: For a group, the config and the group whose fields are listed; None if none is.
    """
    default = "" if entry.default is NO_VALUE else f" = {entry.default!r}"
    unit = f" ({entry.unit})" if entry.unit else ""
    here = f", here {entry.value!r}" if entry.changed else ""
    head = f"{entry.name}: {entry.type}{default}{unit}{here}"
    yield from _columns.wrapped(head, hanging=_INDENT)
    yield from _columns.wrapped(entry.meaning, _INDENT)

    if entry.why_unused:
        yield from _columns.wrapped(f"Has no effect: {entry.why_unused}.", _INDENT)
        return
    if entry.condition:
        verb = "Has no effect here, only" if entry.applies is False else "Applies"
        yield from _columns.wrapped(f"{verb} where {entry.condition}.", _INDENT)
    elsewhere = home is not None and not (home[0] == entry.root and home[1].startswith(entry.name))
    if home and elsewhere:
        text = f"Has the fields of {home[1] or 'a run'}, see there."
        yield from _columns.wrapped(text, _INDENT)


def as_flags(config: Any) -> Iterator[str]:
    """Yield the fields that apply in a config as the flags that set its values.

    Args:
      config: A config from a file.
    """
    settable = [entry for entry in config_fields(config) if is_settable(entry)]
    for entry in settable:
        if entry.applies:
            yield from _columns.wrapped(shell_line([flag_of(entry)]), 2)
            yield from _columns.wrapped(_first_sentence(entry.meaning), 2 + _INDENT)
    idle = sum(not entry.applies for entry in settable)
    yield f"  ({idle} more have no effect in this config; lbopt config lists all)"


def is_settable(entry: FieldEntry) -> bool:
    """Return whether a flag can set a field: none can set a group, or a field of an arm."""
    return entry.value is not NO_VALUE and "[" not in entry.name


def flag_of(entry: FieldEntry) -> str:
    """Return the flag that sets a field to its value."""
    text = entry.value if isinstance(entry.value, str) else repr(entry.value)
    return f"--config.{entry.name}={text}"


def _first_sentence(text: str) -> str:
    """Return the first sentence of a meaning.

    >>> _first_sentence("Decay, 0.9 for instance; see v1.1. None for no decay.")
    'Decay, 0.9 for instance; see v1.1.'
    """
    found = re.match(r".+?\.(?= [A-Z])", text)
    return found[0] if found else text


def as_json(entries: Sequence[FieldEntry]) -> list[dict[str, Any]]:
    """Return fields as JSON data; without a config they have no "value" and no "applies"."""
    return [_json(entry) for entry in entries]


def _json(entry: FieldEntry) -> dict[str, Any]:
    found = {
        "field": entry.name,
        "config": entry.root,
        "type": entry.type,
        "default": None if entry.default is NO_VALUE else entry.default,
        "meaning": entry.meaning,
        "unit": entry.unit,
        "condition": entry.condition,
        "why_unused": entry.why_unused,
    }
    if entry.applies is None:
        return found
    value = None if entry.value is NO_VALUE else entry.value
    return {**found, "value": value, "applies": entry.applies}
