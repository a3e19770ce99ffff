"""Tables of the fields of `config.json`: names, attributes, defaults and allowed values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn

from lbopt.errors import require
from lbopt.interchange._names import DerivedInt


class Kind(NamedTuple):
    """The values that a field may have.

    Attributes:
      allows: Function that tells whether a value is allowed.
      fix: End of the message for other values.
    """

    allows: Callable[[Any], bool]
    fix: str


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31


def _list_of(allows: Callable[[Any], bool], length: int = 0) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, (list, tuple)) and len(value) >= length and all(map(allows, value))
    )


COUNT = Kind(_is_count, "give a whole number >= 1")
COUNTS = Kind(_list_of(_is_count, 1), "give a list of whole numbers >= 1")
ODD_COUNTS = Kind(_list_of(lambda v: _is_count(v) and v % 2 == 1, 1), "give a list of odd numbers")
STRIDES = Kind(_list_of(lambda v: _is_count(v) and v <= 2, 1), "give a list of strides 1 and 2")
INDICES = Kind(_list_of(lambda v: _is_count(v) or v == 0), "give a list of block numbers")
POSITIVE = Kind(
    lambda value: _is_number(value) and 0 < value <= 1000, "give a number > 0, and at most 1000"
)
RATE = Kind(lambda value: _is_number(value) and 0 <= value < 1, "give a number in [0, 1)")


class Field(NamedTuple):
    """A field of `config.json`.

    Attributes:
      theirs: Name in `config.json`.
      ours: Attribute of the module.
      default: Value that `transformers` takes where the field is left out.
      kind: The allowed values.
    """

    theirs: str
    ours: str
    default: Any
    kind: Kind


def read(table: tuple[Field, ...], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of the module that the fields of a table stand for.

    Raises:
      UserError: If a field has a value that is not allowed.
    """
    found = {}
    for field in table:
        value = get(config, field.theirs, field.default, field.kind)
        found[field.ours] = tuple(value) if isinstance(value, list) else value
    return found


def get(config: Mapping[str, Any], name: str, default: Any, kind: Kind) -> Any:
    """Return the value of a field, or `default` if it is left out.

    Raises:
      UserError: If the value is not allowed.
    """
    value = config.get(name, default)
    require(kind.allows(value), name, value, kind.fix)
    return value


def sizes(table: tuple[Field, ...], module: nn.Module) -> dict[str, DerivedInt]:
    """Return the module's attributes that are counts, each with the field that gives it."""
    return {
        field.ours: DerivedInt(getattr(module, field.ours), field.theirs)
        for field in table
        if field.kind is COUNT
    }


def write(table: tuple[Field, ...], module: nn.Module) -> dict[str, Any]:
    """Return the fields of `config.json` that a module's attributes stand for."""
    values = {field.theirs: getattr(module, field.ours) for field in table}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }


def require_fixed(config: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raise `UserError` if a given field differs from the only value that lbopt supports."""
    for name, value in fixed.items():
        given = config.get(name, value)
        require(
            given == value,
            name,
            given,
            f"lbopt's network supports only {value!r}; give a model with that",
            code="choice",
        )


def require_one_for_each(name: str, values: Sequence[Any], other: str, count: int) -> None:
    """Raise `UserError` unless a list has as many values as another field, which has `count`."""
    fix = f"give {count}, one for each of {other}"
    require(len(values) == count, name, list(values), fix, code="conflict")


def require_without_field(module: nn.Module, name: str, value: Any) -> None:
    """Raise `UserError` unless an attribute has its only value in `transformers`."""
    kind = type(module).__name__
    fix = f"transformers' {kind} has {value} and no field for it; use format safetensors"
    given = getattr(module, name)
    require(given == value, name, given, fix, code="choice")


def num_labels(config: Mapping[str, Any]) -> DerivedInt:
    """Return the number of classes: the length of `id2label`, or `num_labels`, or 2 by default."""
    labels = config.get("id2label")
    if labels is None:
        return DerivedInt(get(config, "num_labels", 2, COUNT), "num_labels", "id2label")
    require(
        isinstance(labels, dict) and labels,
        "id2label",
        labels,
        "give an object with a name for each class",
        code="type",
    )
    return DerivedInt(len(labels), "id2label")


def labels(count: int, class_names: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields that give the classes, with made-up names where none are given.

    Raises:
      UserError: If there are not as many names as classes, or two are equal.
    """
    names = list(class_names) or [f"LABEL_{number}" for number in range(count)]
    fix = f"the network has {count} classes; give a name of its own for each"
    fits = len(names) == len(set(names)) == count
    require(fits, "class_names", names, fix, code="mismatch")
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
