"""Names of variables in lbopt and in PyTorch, as tables of patterns for both directions."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from flax import traverse_util

from lbopt import tree, types
from lbopt.interchange import _layouts
from lbopt.interchange._layouts import Layout


class DerivedInt(int):
    """A length of an axis, or a count, with the fields of `config.json` that determine it.

    Attributes:
      fields: Names of the fields; empty for a length that all networks of the family share.
    """

    fields: tuple[str, ...]

    def __new__(cls, value: int, *fields: str) -> DerivedInt:
        """Return the number with the names of its fields."""
        made = super().__new__(cls, value)
        made.fields = fields
        return made


class Leaf(NamedTuple):
    """One array of a layer.

    Attributes:
      collection: "params" or "batch_stats".
      ours: Name in the Linen module.
      theirs: Name in the PyTorch module.
      layout: Order of its axes in PyTorch.
      is_vector: Whether the array has only the last axis of the layer's shape.
    """

    collection: str
    ours: str
    theirs: str
    layout: Layout
    is_vector: bool = False


_SCALE = Leaf("params", "scale", "weight", _layouts.SAME, is_vector=True)
_BIAS = Leaf("params", "bias", "bias", _layouts.SAME, is_vector=True)

CONV = (Leaf("params", "kernel", "weight", _layouts.CONV),)
DENSE = (Leaf("params", "kernel", "weight", _layouts.DENSE), _BIAS)
TURNED_DENSE = (Leaf("params", "weight", "weight", _layouts.SAME), _BIAS)
DENSE_AS_CONV = (Leaf("params", "kernel", "weight", _layouts.DENSE_AS_CONV), _BIAS)
EMBEDDING = (Leaf("params", "embedding", "weight", _layouts.SAME),)
LAYER_NORM = (_SCALE, _BIAS)
BATCH_NORM = (
    _SCALE,
    _BIAS,
    Leaf("batch_stats", "mean", "running_mean", _layouts.SAME, is_vector=True),
    Leaf("batch_stats", "var", "running_var", _layouts.SAME, is_vector=True),
)


class LayerNames(NamedTuple):
    """The paths of a layer in lbopt and in PyTorch; `{i}` stands for the same number in both.

    Attributes:
      ours: Path of the Linen module, "" for the network itself.
      theirs: Path of the PyTorch module.
      leaves: The layer's arrays.
    """

    ours: str
    theirs: str
    leaves: tuple[Leaf, ...]


class Described(NamedTuple):
    """A layer of a network that `config.json` describes.

    Attributes:
      ours: Path of the Linen module.
      shape: Shape of the layer's kernel, embedding or vector in lbopt. Its lengths are
        `DerivedInt`s, or ints where no field determines them.
      because: Fields that determine the number of layers of this kind.
    """

    ours: str
    shape: tuple[int, ...]
    because: tuple[str, ...] = ()


class Tensor(NamedTuple):
    """An array of a network, in lbopt and in PyTorch.

    Attributes:
      ours: Name in lbopt, for instance "params/dense/kernel".
      theirs: Name in the file.
      layout: Order of its axes in PyTorch.
      shape: Shape in lbopt, with lengths as in `Described`.
      because: Fields that determine the number of layers of this kind.
    """

    ours: str
    theirs: str
    layout: Layout
    shape: tuple[int, ...]
    because: tuple[str, ...]


class Counterpart(NamedTuple):
    """The name and layout in PyTorch of one of lbopt's variables."""

    name: str
    layout: Layout


def counterpart(table: Iterable[LayerNames], name: str) -> Counterpart:
    """Return the counterpart of one of lbopt's variables.

    >>> layer = LayerNames("layer{i}/query", "encoder.{i}.self.query", DENSE)
    >>> counterpart([layer], "params/layer11/query/kernel").name
    'encoder.11.self.query.weight'

    Raises:
      KeyError: If the table does not contain the variable, and so does not match the model.
    """
    collection, _, path = name.partition("/")
    module, _, last = path.rpartition("/")
    theirs, leaves = _layer(table, module)
    for leaf in leaves:
        if (leaf.collection, leaf.ours) == (collection, last):
            return Counterpart(f"{theirs}.{leaf.theirs}", leaf.layout)
    raise KeyError(f"the table has no layer of {name!r}")


def tensors(table: Iterable[LayerNames], layers: Iterable[Described]) -> Iterator[Tensor]:
    """Yield the arrays of layers lazily: any number of layers may be described.

    >>> layer = LayerNames("layer{i}/query", "encoder.{i}.self.query", DENSE)
    >>> described = (Described(f"layer{i}/query", (8, 16)) for i in range(10**9))
    >>> next(tensors([layer], described)).theirs
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


def _layer(table: Iterable[LayerNames], path: str) -> tuple[str, tuple[Leaf, ...]]:
    """Return the path of a layer in PyTorch, and its arrays."""
    for layer in table:
        found = _expression(layer.ours).fullmatch(path)
        if found:
            return layer.theirs.format(**found.groupdict()), layer.leaves
    raise KeyError(f"the table has no layer {path!r}")


@functools.cache
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(pattern)))


def flatten(variables: types.PyTree) -> dict[str, Any]:
    """Return the leaves by their names, such as "params/dense/kernel"."""
    found: dict[str, Any] = {}
    tree.map_with_name(found.__setitem__, variables)
    return found


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dicts from leaves by their names; the inverse of `flatten`."""
    return traverse_util.unflatten_dict(dict(flat), sep="/")
