"""Conditions under which config fields apply; fields that do not apply are refused.

A condition is declared beside its field.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lbopt._user_code import is_place
from lbopt.errors import UserError


class Condition:
    """A condition on a value that no list of values can state."""

    def __init__(self, text: str, holds: Callable[[Any], bool]):
        self.text = text
        self.holds = holds

    def __repr__(self) -> str:
        return self.text


GIVEN = Condition("given", lambda value: value is not None)
NOT_EMPTY = Condition("set", bool)
NOT_GLOBAL = Condition("not 'global'", lambda value: value != "global")
NOT_ZERO = Condition("not 0", bool)
MORE_THAN_ONE = Condition("more than 1", lambda value: value > 1)
PLACE = Condition("module:function or file.py:function", is_place)

When = Mapping[str, tuple[Any, ...] | Condition]
"""Field -> the values of it, or the condition on it, under which another field applies.

The names are those of fields of the same group; "data.name" is looked up from there outwards.
"""


@dataclasses.dataclass(frozen=True)
class Applicability:
    """The conditions under which a field applies.

    Attributes:
      alternatives: Conditions, one of which has to hold in full; empty for a field that always
        applies.
      unless: Name of a field that replaces this one where it is not None; "" for none.
      may_stay: Whether a config may have another value than the default where the field does not
        apply; a flag may not set it.
    """

    alternatives: tuple[When, ...] = ()
    unless: str = ""
    may_stay: bool = False


_ALWAYS = Applicability()
_KEY = "lbopt.applicability"
_BEFORE = "lbopt.before"


def only(
    default: Any,
    *alternatives: When,
    unless: str = "",
    may_stay: bool = False,
    **when: tuple[Any, ...] | Condition,
) -> Any:
    """Declare a field of a config dataclass that applies only under conditions.

    Args:
      default: Default of the field.
      *alternatives: Mappings of conditions, of which one has to hold.
      unless: Name of a field of the same group that replaces this one where it is not None. The
        value of this one may stay beside it, but a flag that sets it is refused.
      may_stay: Whether any value may stay where the conditions do not hold, as it may beside
        `unless`.
      **when: Conditions that have to hold, instead of `alternatives`.

    >>> @dataclasses.dataclass
    ... class Optimizer:
    ...     name: str = "adam"
    ...     momentum: float = only(0.9, name=("lars", "momentum"))
    >>> check(Optimizer("adam", momentum=0.5))
    Traceback (most recent call last):
    lbopt.errors.UserError: momentum = 0.5: has no effect with name = 'adam', only with 'lars' \
or 'momentum'; leave it 0.9
    """
    assert not (alternatives and when), "give alternatives or one set of conditions"
    found = Applicability((*alternatives, *([when] if when else [])), unless, may_stay)
    return dataclasses.field(default=default, metadata={_KEY: found})


def only_default(factory: Callable[[], Any], **when: tuple[Any, ...] | Condition) -> Any:
    """Declare a field as `only` does, whose default is a new object for each config."""
    found = Applicability((when,))
    return dataclasses.field(default_factory=factory, metadata={_KEY: found})


def since(default: Any, before: Any) -> Any:
    """Declare a field that configs of earlier versions lack, whose default changes what runs.

    Args:
      default: Default of the field.
      before: Value with which this version does what earlier ones did.
    """
    return dataclasses.field(default=default, metadata={_BEFORE: before})


def earlier_value(field: dataclasses.Field) -> Any:
    """Return the value of a field in a config of an earlier version, which lacks it."""
    return field.metadata.get(_BEFORE, default_of(field))


def default_of(field: dataclasses.Field) -> Any:
    """Return the default of a field."""
    if field.default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def applicability(field: dataclasses.Field) -> Applicability:
    """Return the conditions under which a field applies."""
    return field.metadata.get(_KEY, _ALWAYS)


def applies(field: dataclasses.Field, *groups: Any) -> bool:
    """Return whether the conditions of a field hold.

    Args:
      field: A field of the first group.
      *groups: The group, and those around it from the inside out; dataclasses or JSON data.
    """
    alternatives = applicability(field).alternatives
    return not alternatives or any(not _unmet(when, groups) for when in alternatives)


def replaced(field: dataclasses.Field, group: Any) -> bool:
    """Return whether another field of the group, which is not None, replaces this one."""
    other = applicability(field).unless
    return bool(other) and getattr(group, other) is not None


def check(group: Any, place: str = "", *around: Any) -> None:
    """Raise `UserError`, code "unused", for a field that does not apply and is not at its default.

    Args:
      group: A config dataclass.
      place: Name of the group in the outermost group around it; "" for the outermost itself.
      *around: The groups around it, from the inside out.
    """
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        if not applies(field, group, *around) and not _may_have(field, value):
            raise _unused(field, value, place, group, *around)


def check_all(config: Any) -> None:
    """Check a config and the groups in it, as `check` does."""
    for place, group, *around in _groups(config):
        check(group, place, *around)


def unused(config: Any) -> dict[str, tuple[Any, dataclasses.Field]]:
    """Return the fields that do not apply and are not at their defaults.

    Returns:
      Dotted name -> (the group that holds the field, the field).
    """
    return {
        joined(place, field.name): (group, field)
        for place, group, *around in _groups(config)
        for field in dataclasses.fields(group)
        if not applies(field, group, *around) and not _may_have(field, getattr(group, field.name))
    }


def _groups(config: Any, place: str = "", *around: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the place of each group in a config, the group, and those around it."""
    yield place, config, *around
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _groups(value, joined(place, field.name), config, *around)


def joined(place: str, name: str) -> str:
    """Return the dotted name of a field of the group at a place, "" for the outermost group."""
    return f"{place}.{name}" if place else name


def check_flag(config: Any, name: str, before: Any) -> None:
    """Raise `UserError`, code "unused", if a flag sets a field that has no effect.

    A flag may reset such a field to its default, where another flag changes the kind.

    Args:
      config: The config with the flag's value. It may have a method `why_unused`, function of the
        name, for fields of groups that it does not read in full.
      name: The dotted name of the field, "optimizer.momentum" for instance.
      before: The field's value without the flag.
    """
    groups = [config]
    place, _, last = name.rpartition(".")
    for step in place.split(".") if place else []:
        groups.insert(0, getattr(groups[0], step))
    field = next(field for field in dataclasses.fields(groups[0]) if field.name == last)
    value = getattr(groups[0], last)
    if why := config.why_unused(name) if hasattr(config, "why_unused") else None:
        raise UserError(name, value, f"has no effect: {why}", code="unused")

    resets = _is_default(field, value) and not _is_default(field, before)
    if not applies(field, *groups) and not resets:
        raise _unused(field, value, place, *groups)
    other = applicability(field).unless
    if replaced(field, groups[0]):
        set_too = f"{{other}} = {_shown(getattr(groups[0], other))}"
        reason = f"has no effect with {set_too}; leave out one of the two"
        also = {"other": joined(place, other)}
        raise UserError(name, value, reason, code="unused", also=also)


def without_unused(kind: type, data: Mapping[str, Any], *around: Any) -> dict[str, Any]:
    """Return JSON data of a config with the defaults of fields that do not apply.

    Earlier versions accepted, and saved, any value of such a field.

    Args:
      kind: The dataclass.
      data: JSON data of an instance. Fields that the dataclass does not have stay as they are.
      *around: The groups around it, from the inside out.
    """
    hints = typing.get_type_hints(kind)
    found = dict(data)
    for field in dataclasses.fields(kind):
        if field.name not in data:
            continue
        if applicability(field).may_stay:
            continue
        if not applies(field, data, *around):
            default = default_of(field)
            found[field.name] = list(default) if isinstance(default, tuple) else default
        else:
            inner = (data[field.name], hints[field.name], data, *around)
            found[field.name] = _inner_without_unused(*inner)
    return found


def _inner_without_unused(value: Any, hint: Any, *around: Any) -> Any:
    """Return the value of a field, or of each item of a list, with nothing that does not apply."""
    kinds = (kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind))
    kind: Any = next(kinds, None)
    if kind is None:
        return value
    if isinstance(value, list):
        return [_inner_without_unused(item, kind, *around) for item in value]
    return without_unused(kind, value, *around) if isinstance(value, dict) else value


def describe(field: dataclasses.Field, named: Callable[[str], str] = str) -> str:
    """Return the conditions under which a field applies, in words; "" if it always applies.

    Args:
      field: The field.
      named: Function that returns how a field in the conditions is shown, given its name there.

    >>> describe(only(2, {"name": ("aps",)}, {"name": ("ef",), "compressor": ("cast",)}))
    "name = 'aps', or name = 'ef' and compressor = 'cast'"
    """
    found = applicability(field)
    text = ", or ".join(
        " and ".join(f"{named(name)} {_stated(wanted)}" for name, wanted in when.items())
        for when in found.alternatives
    )
    if not found.unless:
        return text
    return f"{text}{', and ' * bool(text)}{named(found.unless)} = None"


def _stated(wanted: tuple[Any, ...] | Condition) -> str:
    return f"is {wanted}" if isinstance(wanted, Condition) else f"= {_listed(wanted)}"


def _unmet(when: When, groups: Sequence[Any]) -> list[str]:
    """Return the names in `when` whose conditions do not hold."""
    return [name for name, wanted in when.items() if not _holds(wanted, _look_up(name, groups))]


_UNKNOWN: Any = object()


def _holds(wanted: tuple[Any, ...] | Condition, value: Any) -> bool:
    if value is _UNKNOWN:  # JSON data without the group that would tell
        return True
    return wanted.holds(value) if isinstance(wanted, Condition) else value in wanted


def _look_up(name: str, groups: Sequence[Any]) -> Any:
    """Return the value of a field of the first group, or of a group beside or around it."""
    first, _, rest = name.partition(".")
    if not rest:
        return _get(groups[0], first)
    for group in groups:
        found = _get(group, first)
        if found is not _UNKNOWN and found is not None:
            return _get(found, rest)
    return _UNKNOWN


def _get(group: Any, name: str) -> Any:
    if isinstance(group, Mapping):
        return group.get(name, _UNKNOWN)
    return getattr(group, name, _UNKNOWN)


def _may_have(field: dataclasses.Field, value: Any) -> bool:
    """Return whether a config may have a value of a field that does not apply."""
    return applicability(field).may_stay or _is_default(field, value)


def _is_default(field: dataclasses.Field, value: Any) -> bool:
    return (tuple(value) if isinstance(value, list) else value) == default_of(field)


def _unused(field: dataclasses.Field, value: Any, place: str, *groups: Any) -> UserError:
    """Return the refusal, which names the condition that comes nearest to being met."""
    alternatives = applicability(field).alternatives
    fewest = min(len(_unmet(when, groups)) for when in alternatives)
    nearest = [when for when in alternatives if len(_unmet(when, groups)) == fewest]
    name = _unmet(nearest[0], groups)[0]
    wanted = [when[name] for when in nearest if name in _unmet(when, groups)]
    now = _shown(_look_up(name, groups))
    default = _shown(default_of(field))
    reason = f"has no effect with {{other}} = {now}, only {_choices(wanted)}; leave it {default}"
    also = {"other": name if "." in name else joined(place, name)}
    return UserError(joined(place, field.name), value, reason, code="unused", also=also)


def _choices(wanted: Sequence[tuple[Any, ...] | Condition]) -> str:
    if isinstance(wanted[0], Condition):
        return f"where that is {wanted[0]}"
    # Alternatives may share values; each is shown once.
    values = {value: None for each in wanted if isinstance(each, tuple) for value in each}
    return f"with {_listed(list(values))}"


def _listed(values: Sequence[Any]) -> str:
    """Return "a, b or c"."""
    *others, last = map(_shown, values)
    return f"{', '.join(others)} or {last}" if others else last


def _shown(value: Any) -> str:
    """Return the value as the reason of an error shows it."""
    return repr(value)
