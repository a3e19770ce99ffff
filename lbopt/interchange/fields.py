"""Fields of `config.json` as tables: their name, our attribute, what it is when it is left out, what it may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn

from lbopt.errors import require
from lbopt.interchange.names import Size


class Kind(NamedTuple):
    """What values a field takes.

    Attributes:
      allows: value -> bool.
      fix: what to say of others.
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
    """A row of a table.

    Attributes:
      theirs: name in config.json.
      ours: attribute of the module.
      default: what `transformers` takes where it is left out.
      kind: what it may be.
    """

    theirs: str
    ours: str
    default: Any
    kind: Kind


def read(table: tuple[Field, ...], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes of the module.

    Raises:
      UserError: naming the field.
    """
    found = {}
    for field in table:
        value = get(config, field.theirs, field.default, field.kind)
        found[field.ours] = tuple(value) if isinstance(value, list) else value
    return found


def get(config: Mapping[str, Any], name: str, default: Any, kind: Kind) -> Any:
    """Return one field, checked."""
    value = config.get(name, default)
    require(kind.allows(value), name, value, kind.fix)
    return value


def sizes(table: tuple[Field, ...], module: nn.Module) -> dict[str, Size]:
    """Return the module's attributes that are counts, with the fields that say them."""
    return {
        field.ours: Size(getattr(module, field.ours), field.theirs)
        for field in table
        if field.kind is COUNT
    }


def write(table: tuple[Field, ...], module: nn.Module) -> dict[str, Any]:
    """Return fields of config.json."""
    values = {field.theirs: getattr(module, field.ours) for field in table}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }


def require_fixed(config: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raise `UserError` unless the fields that are given have the one value that our network has."""
    for name, value in fixed.items():
        given = config.get(name, value)
        require(
            given == value,
            name,
            given,
            f"lbopt's network has {value!r} there; give a model of that kind",
        )


def num_labels(config: Mapping[str, Any]) -> Size:
    """Return how many classes there are: the length of `id2label`; 2 where nothing is said, as in `transformers`."""
    labels = config.get("id2label")
    if labels is None:
        return Size(get(config, "num_labels", 2, COUNT), "num_labels", "id2label")
    require(
        isinstance(labels, dict) and labels,
        "id2label",
        labels,
        "give an object with a name for each class",
    )
    return Size(len(labels), "id2label")


def labels(count: int) -> dict[str, Any]:
    """Return the fields that say how many classes there are."""
    names = [f"LABEL_{number}" for number in range(count)]
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
