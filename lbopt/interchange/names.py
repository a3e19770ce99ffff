"""Names of variables, ours and theirs, as a table of patterns that is read in both directions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flax import traverse_util

from lbopt import tree, types
from lbopt.interchange import layouts
from lbopt.interchange.layouts import Layout


class Leaf(NamedTuple):
    """One array of a layer.

    Attributes:
      collection: "params" or "batch_stats".
      ours: its name in the Linen module.
      theirs: its name in the PyTorch module.
      layout: how it is turned.
    """

    collection: str
    ours: str
    theirs: str
    layout: Layout


_SCALE = Leaf("params", "scale", "weight", layouts.SAME)
_BIAS = Leaf("params", "bias", "bias", layouts.SAME)

CONV = (Leaf("params", "kernel", "weight", layouts.CONV),)
DENSE = (Leaf("params", "kernel", "weight", layouts.DENSE), _BIAS)
TURNED_DENSE = (Leaf("params", "weight", "weight", layouts.SAME), _BIAS)
DENSE_AS_CONV = (Leaf("params", "kernel", "weight", layouts.DENSE_AS_CONV), _BIAS)
EMBEDDING = (Leaf("params", "embedding", "weight", layouts.SAME),)
LAYER_NORM = (_SCALE, _BIAS)
BATCH_NORM = (
    _SCALE,
    _BIAS,
    Leaf("batch_stats", "mean", "running_mean", layouts.SAME),
    Leaf("batch_stats", "var", "running_var", layouts.SAME),
)


class Layer(NamedTuple):
    """A row of a table: a layer's path here and there; `{i}` stands for the same number on both sides.

    Attributes:
      ours: path of the Linen module, "" for the network itself.
      theirs: path of the PyTorch module.
      leaves: its arrays.
    """

    ours: str
    theirs: str
    leaves: tuple[Leaf, ...]


class Counterpart(NamedTuple):
    """What one of our variables is there."""

    name: str
    layout: Layout


def counterpart(table: Iterable[Layer], name: str) -> Counterpart:
    """Look our variable up.

    >>> row = Layer("layer{i}/query", "encoder.{i}.self.query", DENSE)
    >>> counterpart([row], "params/layer11/query/kernel").name
    'encoder.11.self.query.weight'

    Raises:
      KeyError: if the table has no row for it: the table is behind the model.
    """
    collection, _, path = name.partition("/")
    module, _, last = path.rpartition("/")
    for row in table:
        numbers = _match(row.ours, module)
        for leaf in row.leaves if numbers is not None else ():
            if (leaf.collection, leaf.ours) == (collection, last):
                return Counterpart(f"{row.theirs}.{leaf.theirs}".format(**numbers or {}), leaf.layout)
    raise KeyError(f"no row of the table names {name!r}")


def _match(pattern: str, path: str) -> Mapping[str, str] | None:
    expression = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(pattern))
    found = re.fullmatch(expression, path)
    return found.groupdict() if found else None


def flatten(variables: types.PyTree) -> dict[str, Any]:
    """Return {"params/dense/kernel": leaf, ...}."""
    found: dict[str, Any] = {}
    tree.map_with_name(found.__setitem__, variables)
    return found


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested dicts that `flatten` was given."""
    return traverse_util.unflatten_dict(dict(flat), sep="/")
