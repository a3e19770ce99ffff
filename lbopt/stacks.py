"""Which leaves are stacks of layers (`nn.scan`): stated by a predicate or by the model's metadata, never guessed from sizes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lbopt import tree, types


@dataclasses.dataclass(frozen=True)
class StackedPaths:
    """Which leaves are stacks, by path; see `stacked_paths` and `stacked_from_metadata`."""

    counts: Mapping[str, int] | None
    patterns: tuple[str, ...] = ()

    def __call__(self, name: str, leaf: Any) -> int:
        """Return the number of leading axes that count layers."""
        del leaf
        if self.counts is not None:
            return self.counts.get(name, 0)
        return int(any(re.search(pattern, name) for pattern in self.patterns))

    def __repr__(self) -> str:
        if self.counts is not None:
            return f"<metadata of {len(self.counts)} stacked leaves>"
        return f"stacked_paths({', '.join(repr(pattern) for pattern in self.patterns)})"


def stacked_paths(*patterns: str) -> StackedPaths:
    r"""Say that the leaves whose path matches one of the regular expressions are stacks of layers (leading axis).

    >>> stacked_paths(r"encoder/layers/")("encoder/layers/Dense_0/kernel", None)
    1
    """
    return StackedPaths(None, tree.check_patterns(patterns))


def stacked_from_metadata(boxed: types.PyTree, axis_name: str = "layers") -> StackedPaths:
    """Read from a model's own metadata which leaves are stacks of layers.

    Args:
      boxed: parameters as the model was initialised, their partitioning metadata still around them: every leaf that is
        a box with `names` (`flax.linen.Partitioned`, as `nn.scan(..., metadata_params={nn.PARTITION_NAME: "layers"})`
        makes it) is read, others are not stacks.
      axis_name: the name of the layer axis.

    Raises:
      ValueError: if no leaf has such an axis, or if it is not the leading one.
    """
    counts = {}
    for path, box in jax.tree_util.tree_leaves_with_path(boxed, is_leaf=_is_box):
        names = tuple(getattr(box, "names", ()))
        count = names.count(axis_name)
        if names[:count] != (axis_name,) * count:
            raise ValueError(f"{tree.path_name(path)}: axes {names!r}: the axis {axis_name!r} must lead")
        if count:
            counts[tree.path_name(path)] = count
    if not counts:
        raise ValueError(f"axis_name = {axis_name!r}: no leaf's metadata names that axis; pass the boxed parameters")
    return StackedPaths(counts)


def _is_box(node: Any) -> bool:
    return hasattr(node, "names") and hasattr(node, "unbox")


def resolve_stacked(stacked: types.Stacked, params: types.Params) -> types.PyTree:
    """Turn `stacked` in any accepted form into a pytree of ints: how many leading axes of each leaf count layers.

    Args:
      stacked: None (no stacks), a predicate (path, leaf) -> bool or number of leading layer axes, or a pytree of such.
      params: the parameters.

    Raises:
      ValueError: if a leaf lacks that axis, if nothing is stacked, or if a value is not a bool or a count.
    """
    if stacked is None:
        return jax.tree.map(lambda _: 0, params)
    if isinstance(stacked, (str, bool, int)):
        raise ValueError(
            f"stacked = {stacked!r}: give a predicate (path, leaf) -> bool, for instance lbopt.stacked_paths('^layers/'), or None"
        )
    if tree.is_function(stacked):
        counts = tree.map_with_name(stacked, params)
    else:
        counts = tree.spread(stacked, params, "stacked")
    counts = tree.map_with_name(_layer_axes, counts, params)
    if jax.tree.leaves(params) and not any(jax.tree.leaves(counts)):
        raise ValueError(
            f"stacked = {stacked!r} marks none of the parameters ({tree.some(tree.leaf_names(params))}): pass stacked=None if there are no stacks"
        )
    return counts


def _layer_axes(name: str, count: Any, leaf: Any) -> int:
    if not isinstance(count, (bool, int, np.bool_, np.integer)) or count < 0:
        raise ValueError(f"stacked at {name!r} is {count!r}: give a bool or the number of leading layer axes")
    if count > jnp.ndim(leaf):
        raise ValueError(
            f"stacked at {name!r} is {int(count)}, but the leaf has shape {jnp.shape(leaf)}: it has no such leading axis of layers"
        )
    return int(count)


def one_layer(params: types.Params, stacked: types.PyTree) -> types.Params:
    """Return the shapes of one layer of each stack; `params` itself if nothing is stacked."""
    if stacked is None or not any(jax.tree.leaves(stacked)):
        return params
    return jax.tree.map(lambda leaf, count: jax.ShapeDtypeStruct(jnp.shape(leaf)[count:], leaf.dtype), params, stacked)
