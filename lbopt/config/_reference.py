"""Every field of a config: type, default, meaning, unit, and the condition under which it applies.

The meanings are those of the docstrings of the dataclasses.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

from lbopt.config import _fields
from lbopt.config._sweep import SweepConfig
from lbopt.errors import NO_VALUE

_UNITS = {
    "steps": "steps",
    "step": "steps",
    "epochs": "epochs",
    "batch_size": "examples",
    "batch_sizes": "examples",
    "microstep_size": "examples",
    "part_size": "examples",
    "bits": "bits",
    "s": "seconds",
    "bytes": "bytes",
    "padding": "pixels",
    "image_size": "pixels",
    "length": "tokens",
    "predictions": "tokens",
    "stride": "tokens",
    "vocab_size": "tokens",
    "points": "percentage points",
}
"""Last words of a field's name -> the unit of its value."""


@dataclasses.dataclass(frozen=True)
class FieldEntry:
    """A field of a config, or a group of fields.

    Attributes:
      name: Dotted name, "optimizer.b1" for instance; "arms[0].name" of the first arm of a study,
        and "arms[N].name" of any.
      type: Type of the value, as Python writes it; for a group the name of its dataclass.
      default: Default; `NO_VALUE` for a group that is always there.
      meaning: Meaning of the field.
      unit: Unit of a number; "" for none.
      condition: Condition under which the field applies, in words; "" if it always does.
      value: Value in the config; `NO_VALUE` without a config, for groups that are there, and in a
        group that is not.
      applies: Whether the field has an effect in the config; None without a config.
      why_unused: Reason why nothing reads the field, which no other field can change; "" for none.
      holds: Name of the dataclass of a group, or of the groups of a sequence; "" for other fields.
      group: Dotted name of the group that has the field; "" for the config itself.
      kind: Name of the dataclass of that group.
      root: Name of the dataclass of the config.

    >>> from lbopt.config import TrainConfig
    >>> entries = config_fields(TrainConfig(data="digits", model="cnn", num_epochs=5))
    >>> [one.name for one in entries if one.changed]
    ['num_epochs']
    """

    name: str
    type: str
    default: Any
    meaning: str
    unit: str
    condition: str
    value: Any
    applies: bool | None
    why_unused: str
    holds: str
    group: str
    kind: str
    root: str

    @property
    def changed(self) -> bool:
        """Whether the config has another value than the default."""
        return self.value is not NO_VALUE and _plain(self.value) != _plain(self.default)


@dataclasses.dataclass(frozen=True)
class _Level:
    """A group on the way to a field.

    Attributes:
      kind: Its dataclass.
      place: Its dotted name; "" for the config itself.
      group: The group; None without a config, or where the config has none.
      seen_as: The object whose fields decide what applies in groups further in.
      missing: Condition under which the group is there; "" if it always is.
    """

    kind: type
    place: str
    group: Any
    seen_as: Any
    missing: str = ""


def config_fields(config: Any) -> list[FieldEntry]:
    """Return every field of a config, each group followed by its fields.

    Args:
      config: A `TrainConfig`, a `SweepConfig` or another config dataclass, which need not be valid;
        or such a class, for its fields without values.

    Returns:
      The fields in the order of the dataclasses. Groups that nothing reads have no fields here.

    >>> from lbopt.config import TrainConfig
    >>> entry = next(one for one in config_fields(TrainConfig) if one.name == "optimizer.b1")
    >>> entry.type, entry.default
    ('float', 0.9)
    """
    given = not isinstance(config, type)
    root = config if given else config()
    top = _Level(type(root), "", config if given else None, config if given else None)
    return list(_entries([top], root, given))


def _entries(levels: list[_Level], root: Any, given: bool) -> Iterator[FieldEntry]:
    """Yield the fields of the innermost group.

    Args:
      levels: The group, and those around it from the inside out.
      root: The config, or one of its class.
      given: Whether `root` is the user's.
    """
    level = levels[0]
    hints = typing.get_type_hints(level.kind)
    why_unused = getattr(root, "why_unused", lambda name: None)
    for field in dataclasses.fields(level.kind):
        name = _fields.joined(level.place, field.name)
        entry = _entry(field, hints[field.name], why_unused(name) or "", levels, given)
        yield entry
        if not entry.holds or entry.why_unused:
            continue
        for inner in _inner_levels(entry, hints[field.name], level, root):
            yield from _entries([inner, *levels], root, given)


def _inner_levels(entry: FieldEntry, hint: Any, level: _Level, root: Any) -> Iterator[_Level]:
    """Yield the groups that a field holds; one without values where the config has none."""
    kind = _group_kind(hint)
    assert kind is not None
    name = entry.name
    value = None if level.group is None else getattr(level.group, name.rpartition(".")[2])
    if isinstance(value, tuple | list) and value:
        for index, item in enumerate(value):
            # The fields of an arm apply as in its trials, which have also what all arms share.
            seen_as = root.arm_train(index) if isinstance(root, SweepConfig) else item
            yield _Level(type(item), f"{name}[{index}]", item, seen_as)
    elif dataclasses.is_dataclass(value):
        yield _Level(type(value), name, value, value)
    elif typing.get_origin(hint) is tuple:
        yield _Level(kind, f"{name}[N]", None, None, level.missing)
    else:
        optional = type(None) in typing.get_args(hint)
        yield _Level(kind, name, None, None, f"{name} is given" if optional else level.missing)


def _entry(
    field: dataclasses.Field, hint: Any, why_unused: str, levels: list[_Level], given: bool
) -> FieldEntry:
    level = levels[0]
    inner = _group_kind(hint)
    always = inner is not None and inner is hint
    meaning = _meanings(level.kind).get(field.name, "")
    described = _fields.describe(field, functools.partial(_full_name, levels))

    value = NO_VALUE if level.group is None else getattr(level.group, field.name)
    there = dataclasses.is_dataclass(value) or (inner is not None and bool(value))

    return FieldEntry(
        name=_fields.joined(level.place, field.name),
        type=_type_text(hint),
        default=NO_VALUE if always else _fields.default_of(field),
        meaning=meaning or (_summary(inner) if inner else ""),
        unit="" if always else _unit(field.name),
        condition="; and ".join(text for text in (level.missing, described) if text),
        value=NO_VALUE if there else value,
        applies=(_applies(field, levels) and not why_unused) if given else None,
        why_unused=why_unused,
        holds=inner.__name__ if inner else "",
        group=level.place,
        kind=_ours(level.kind).__name__,
        root=_ours(levels[-1].kind).__name__,
    )


def _applies(field: dataclasses.Field, levels: list[_Level]) -> bool:
    """Return whether a field has an effect in a config."""
    group = levels[0].group
    if group is None:
        return False
    around = [level.seen_as for level in levels[1:]]
    return _fields.applies(field, group, *around) and not _fields.replaced(field, group)


def _full_name(levels: list[_Level], name: str) -> str:
    """Return the dotted name, from the config on, of a field that a condition names."""
    first, dot, _ = name.partition(".")
    if not dot:
        return _fields.joined(levels[0].place, name)
    for level in levels:
        held = {field.name for field in dataclasses.fields(level.kind)}
        # A group that is None leaves the decision to a group further out, as in `applies`.
        if first in held and (level.group is None or getattr(level.group, first) is not None):
            return _fields.joined(level.place, name)
    return _fields.joined("train", name)  # of an arm that has none of its own


def _group_kind(hint: Any) -> type | None:
    """Return the dataclass of a field that is a group, or may be, or is a tuple of groups."""
    kinds = (kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind))
    return next((kind for kind in kinds if isinstance(kind, type)), None)


def _type_text(hint: Any) -> str:
    """Return a type as it is written in Python, without the names of modules.

    >>> _type_text(tuple[str, ...]), _type_text(float | None), _type_text(dict[str, Any])
    ('tuple[str, ...]', 'float | None', 'dict[str, Any]')
    """
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)


def _unit(name: str) -> str:
    """Return the unit that a field's name tells.

    >>> _unit("warmup_steps"), _unit("global_batch_size"), _unit("momentum")
    ('steps', 'examples', '')
    """
    found = (unit for words, unit in _UNITS.items() if f"_{name}".endswith(f"_{words}"))
    return next(found, "")


def _ours(kind: type) -> type:
    """Return the class of lbopt's that a class of a config file extends."""
    return next((one for one in kind.__mro__ if one.__module__.startswith("lbopt.")), kind)


@functools.cache
def _meanings(kind: type) -> dict[str, str]:
    """Return the texts of the section "Attributes" of a class's docstring, by name."""
    section = (inspect.getdoc(_ours(kind)) or "").partition("\nAttributes:\n")[2]
    found: dict[str, list[str]] = {}
    for line in section.split("\n"):
        start = re.match(r"  (\w+): (.+)", line)
        if start:
            found[start[1]] = [start[2]]
        elif found and line.startswith("    "):
            found[next(reversed(found))].append(line.strip())
        else:
            break
    return {name: " ".join(lines) for name, lines in found.items()}


def _summary(kind: type) -> str:
    """Return the first line of a class's docstring."""
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
