"""Names of variables, ours and theirs, as a table of patterns that is read in both directions."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from flax import traverse_util

from lbopt import tree, types
from lbopt.interchange import layouts
from lbopt.interchange.layouts import Layout


class Size(int):
    """A length or a number, and the fields of `config.json` from which it follows.

    Attributes:
      fields: their names there; none for what every network of the family has.
    """

    fields: tuple[str, ...]

    def __new__(cls, value: int, *fields: str) -> Size:
        """Make the number."""
        made = super().__new__(cls, value)
        made.fields = fields
        return made


class Leaf(NamedTuple):
    """One array of a layer.

    Attributes:
      collection: "params" or "batch_stats".
      ours: its name in the Linen module.
      theirs: its name in the PyTorch module.
      layout: how it is turned.
      is_vector: it has the last axis of the layer's shape only.
    """

    collection: str
    ours: str
    theirs: str
    layout: Layout
    is_vector: bool = False


_SCALE = Leaf("params", "scale", "weight", layouts.SAME, is_vector=True)
_BIAS = Leaf("params", "bias", "bias", layouts.SAME, is_vector=True)

CONV = (Leaf("params", "kernel", "weight", layouts.CONV),)
DENSE = (Leaf("params", "kernel", "weight", layouts.DENSE), _BIAS)
TURNED_DENSE = (Leaf("params", "weight", "weight", layouts.SAME), _BIAS)
DENSE_AS_CONV = (Leaf("params", "kernel", "weight", layouts.DENSE_AS_CONV), _BIAS)
EMBEDDING = (Leaf("params", "embedding", "weight", layouts.SAME),)
LAYER_NORM = (_SCALE, _BIAS)
BATCH_NORM = (
    _SCALE,
    _BIAS,
    Leaf("batch_stats", "mean", "running_mean", layouts.SAME, is_vector=True),
    Leaf("batch_stats", "var", "running_var", layouts.SAME, is_vector=True),
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


class Described(NamedTuple):
    """A layer of a network that `config.json` describes.

    Attributes:
      ours: path of the Linen module.
      shape: of its kernel, embedding or vector, ours; lengths are `Size`s, or ints where no field says them.
      because: fields that say how many layers there are of this kind.
    """

    ours: str
    shape: tuple[int, ...]
    because: tuple[str, ...] = ()


class Tensor(NamedTuple):
    """An array of a network, here and there.

    Attributes:
      ours: its name, for instance "params/dense/kernel".
      theirs: its name in the file.
      layout: how it is turned.
      shape: ours; see `Described`.
      because: see `Described`.
    """

    ours: str
    theirs: str
    layout: Layout
    shape: tuple[int, ...]
    because: tuple[str, ...]


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
    theirs, leaves = _layer(table, module)
    for leaf in leaves:
        if (leaf.collection, leaf.ours) == (collection, last):
            return Counterpart(f"{theirs}.{leaf.theirs}", leaf.layout)
    raise KeyError(f"no row of the table names {name!r}")


def tensors(table: Iterable[Layer], layers: Iterable[Described]) -> Iterator[Tensor]:
    """Yield the arrays of layers one after another, however many are described.

    >>> row = Layer("layer{i}/query", "encoder.{i}.self.query", DENSE)
    >>> described = (Described(f"layer{i}/query", (8, 16)) for i in range(10**9))
    >>> next(tensors([row], described)).theirs
    'encoder.0.self.query.weight'
    """
    for path, shape, because in layers:
        theirs, leaves = _layer(table, path)
        for leaf in leaves:
            ours = "/".join(filter(None, (leaf.collection, path, leaf.ours)))
            yield Tensor(
                ours,
                f"{theirs}.{leaf.theirs}",
                leaf.layout,
                shape[-1:] if leaf.is_vector else shape,
                because,
            )


def _layer(table: Iterable[Layer], path: str) -> tuple[str, tuple[Leaf, ...]]:
    """Return the path of a layer there, and its arrays."""
    for row in table:
        found = _expression(row.ours).fullmatch(path)
        if found:
            return row.theirs.format(**found.groupdict()), row.leaves
    raise KeyError(f"no row of the table names {path!r}")


@functools.cache
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(pattern)))


def flatten(variables: types.PyTree) -> dict[str, Any]:
    """Return {"params/dense/kernel": leaf, ...}."""
    found: dict[str, Any] = {}
    tree.map_with_name(found.__setitem__, variables)
    return found


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested dicts that `flatten` was given."""
    return traverse_util.unflatten_dict(dict(flat), sep="/")
