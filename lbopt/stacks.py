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


class LayerAxes(int):
    """How many axes of a leaf count layers, and which.

    Attributes:
      axes: the axes, ascending; the first ones if only their number was said. Below 0 they count from the end, until `resolve_stacked` knows the leaf.
    """

    axes: tuple[int, ...]

    def __new__(cls, axes: int | tuple[int, ...] = ()) -> LayerAxes:
        chosen = (
            tuple(range(axes))
            if isinstance(axes, (int, np.integer, np.bool_))
            else tuple(sorted(set(axes)))
        )
        self = super().__new__(cls, len(chosen))
        self.axes = chosen
        return self

    def __repr__(self) -> str:
        return repr(int(self)) if self.leads else f"LayerAxes({self.axes!r})"

    @property
    def leads(self) -> bool:
        """Whether no other axis stands before them."""
        return self.axes == tuple(range(self))

    def layers(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the numbers of layers of a leaf of this shape."""
        return tuple(shape[axis] for axis in self.axes)

    def one(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one layer."""
        return tuple(size for axis, size in enumerate(shape) if axis not in self.axes)


@dataclasses.dataclass(frozen=True)
class StackedPaths:
    """Which leaves are stacks, by path; see `stacked_paths` and `stacked_from_metadata`."""

    found: Mapping[str, LayerAxes] | None
    patterns: tuple[str, ...] = ()
    axes: LayerAxes = LayerAxes(1)  # noqa: RUF009 - it does not change

    def __call__(self, name: str, leaf: Any = None) -> LayerAxes:
        """Return the axes that count layers."""
        del leaf
        if not isinstance(name, str):
            raise ValueError(
                f"{self!r} needs the name of a parameter; inside optax.inject_hyperparams, name stacked in static_args, or it is taken for a schedule"
            )
        if self.found is not None:
            return self.found.get(name, LayerAxes(0))
        return (
            self.axes
            if any(re.search(pattern, name) for pattern in self.patterns)
            else LayerAxes(0)
        )

    def check(self, params: types.Params) -> None:
        """Raise ValueError if a pattern matches nothing, or if leaves of one stack, whose paths begin alike up to the end of the match, differ in the number of layers."""
        names = tree.leaf_names(params)
        idle = [
            pattern
            for pattern in self.patterns
            if not any(re.search(pattern, name) for name in names)
        ]
        if idle and len(idle) < len(self.patterns):
            raise ValueError(
                f"stacked = {self!r}: {idle[0]!r} matches none of the {len(names)} parameters ({tree.some(names)}): mend it, or leave it out"
            )
        seen: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, leaf in tree.by_name(params).items():
            match = next(
                filter(None, (re.search(pattern, name) for pattern in self.patterns)), None
            )
            if match is None or not _has_axes(leaf, self.axes):
                continue
            layers = self.axes.layers(jnp.shape(leaf))
            other, wanted = seen.setdefault(name[: match.end()], (name, layers))
            if layers != wanted:
                raise ValueError(
                    f"stacked = {self!r}: axis {self.axes.axes[0]} has size {wanted[0]} at {other!r} and {layers[0]} at {name!r}: the leaves of a stack "
                    f"have as many layers each; say which axis counts them, stacked_paths(..., axis={int(self.axes.axes[0] == 0)})"
                )

    def __repr__(self) -> str:
        if self.found is not None:
            return f"<metadata of {len(self.found)} stacked leaves>"
        axis = "" if self.axes.leads else f", axis={self.axes.axes[0]}"
        return f"stacked_paths({', '.join(repr(pattern) for pattern in self.patterns)}{axis})"


def stacked_paths(*patterns: str, axis: int = 0) -> StackedPaths:
    r"""Say that the leaves whose path matches one of the regular expressions are stacks of layers.

    Args:
      *patterns: searched (`re.search`) in the full path.
      axis: the axis that counts layers: 1 for `nn.scan(..., variable_axes={"params": 1})`, MaxText's default; -1 for the last axis of each leaf.

    Returns:
      A value for `stacked`. Applied to parameters it raises ValueError if the leaves of a stack differ in the number of layers.

    Raises:
      ValueError: for no pattern, one that is no regular expression, or an axis that is no number.

    >>> stacked_paths(r"encoder/layers/")("encoder/layers/Dense_0/kernel", None)
    1
    """
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
        raise ValueError(
            f"axis = {tree.said(axis)}: give the number of the axis that counts layers"
        )
    return StackedPaths(None, tree.check_patterns(patterns), LayerAxes((int(axis),)))


def stacked_from_metadata(boxed: types.PyTree, axis_name: str = "layers") -> StackedPaths:
    """Read from a model's own metadata which leaves are stacks of layers, and along which axis.

    Args:
      boxed: parameters as the model was initialised, their partitioning metadata still around them: every leaf that is
        a box with `names` (`flax.linen.Partitioned`, as `nn.scan(..., metadata_params={nn.PARTITION_NAME: "layers"})`
        makes it) or a variable of Flax NNX with `out_sharding` (`nnx.vmap(..., transform_metadata={nnx.PARTITION_NAME: "layers"})`) is read,
        others are not stacks.
      axis_name: the name of the layer axis.

    Raises:
      ValueError: if no leaf has such an axis, or if Flax wrote it in another place than it is in.
    """
    found, shapes = {}, {}
    for path, box in jax.tree_util.tree_leaves_with_path(
        boxed, is_leaf=lambda node: _axis_names(node) is not None
    ):
        axes = tuple(axis for axis, name in enumerate(_axis_names(box) or ()) if name == axis_name)
        if axes:
            found[tree.path_name(path)] = LayerAxes(axes)
            shapes[tree.path_name(path)] = jnp.shape(jax.tree.leaves(box)[0])
    if not found:
        raise ValueError(
            f"axis_name = {tree.said(axis_name)}: no leaf's metadata names that axis; pass the boxed parameters"
        )
    _check_places(found, shapes, axis_name)
    return StackedPaths(found)


def _check_places(
    found: Mapping[str, LayerAxes], shapes: Mapping[str, tuple[int, ...]], axis_name: str
) -> None:
    """Raise ValueError for the names of layers along axis -1: Flax writes them before the last axis, not behind it."""
    if not all(axes.axes == (len(shapes[name]) - 2,) for name, axes in found.items()):
        return
    places = {axes.axes for axes in found.values()}
    sizes, last = ({shape[axis] for shape in shapes.values()} for axis in (-2, -1))
    if len(places) > 1 or (places != {(0,)} and len(sizes) > 1 and len(last) == 1):
        raise ValueError(
            f"axis_name = {axis_name!r}: the metadata name the axis before the last of every leaf, where Flax puts the names of axis -1 by mistake; "
            "give Flax that axis as a number >= 0, or say here lbopt.stacked_paths(..., axis=-1)"
        )


def _axis_names(node: Any) -> tuple[Any, ...] | None:
    """Return the names of a box's axes; None for what is no box."""
    if hasattr(node, "get_metadata"):
        metadata = node.get_metadata()
        return tuple(
            metadata.get("out_sharding")
            or metadata.get("sharding_names")
            or metadata.get("sharding")
            or ()
        )
    return tuple(node.names) if hasattr(node, "names") and hasattr(node, "unbox") else None


def resolve_stacked(stacked: types.Stacked, params: types.Params) -> types.PyTree:
    """Turn `stacked` in any accepted form into a pytree of `LayerAxes`: which axes of each leaf count layers.

    Args:
      stacked: None (no stacks), a predicate (path, leaf) -> bool, number of leading layer axes or `LayerAxes`, or a pytree of such.
      params: the parameters.

    Raises:
      ValueError: if a leaf lacks that axis, if nothing is stacked, or if a value is not a bool or a count.
    """
    if stacked is None:
        return jax.tree.map(lambda _: LayerAxes(0), params)
    if isinstance(stacked, (str, bool, int)):
        raise ValueError(
            f"stacked = {tree.said(stacked)}: give a predicate (path, leaf) -> bool, for instance lbopt.stacked_paths('^layers/'), or None"
        )
    if tree.is_function(stacked):
        if isinstance(stacked, StackedPaths):
            stacked.check(params)
        tree.check_takes(
            stacked,
            2,
            "stacked",
            "the path and the leaf and returns a bool or the number of leading layer axes",
        )
        counts = tree.map_with_name(
            lambda name, leaf: _layer_axes(name, stacked(name, leaf), leaf), params
        )
    else:
        counts = tree.map_with_name(_layer_axes, tree.spread(stacked, params, "stacked"), params)
    if jax.tree.leaves(params) and not any(jax.tree.leaves(counts)):
        raise ValueError(
            f"stacked = {tree.said(stacked)} marks none of the parameters ({tree.some(tree.leaf_names(params))}): pass stacked=None if there are no stacks"
        )
    return counts


def _layer_axes(name: str, count: Any, leaf: Any) -> LayerAxes:
    if not isinstance(count, (bool, int, np.bool_, np.integer)) or count < 0:
        raise ValueError(
            f"stacked at {name!r} is {tree.said(count)}: give a bool or the number of leading layer axes"
        )
    axes = count if isinstance(count, LayerAxes) else LayerAxes(int(count))
    if not _has_axes(leaf, axes):
        which = (
            f"{int(axes)}"
            if axes.leads
            else f"along axis {axes.axes[0] if axes.axes[0] < 0 else axes.axes[-1]}"
        )
        raise ValueError(
            f"stacked at {name!r} is {which}, but the leaf has shape {jnp.shape(leaf)}: it has no such {'leading ' * axes.leads}axis of layers"
        )
    return axes if axes.leads else LayerAxes(tuple(axis % jnp.ndim(leaf) for axis in axes.axes))


def _has_axes(leaf: Any, axes: LayerAxes) -> bool:
    return all(-jnp.ndim(leaf) <= axis < jnp.ndim(leaf) for axis in axes.axes)


def leading(stacked: types.Stacked, params: types.Params, who: str) -> list[int]:
    """Return how many leading axes of each leaf count layers, in leaf order.

    Raises:
      ValueError: as `resolve_stacked`, or, naming the leaf, if another axis stands before them.
    """
    found = tree.by_name(resolve_stacked(stacked, params))
    for name, axes in found.items():
        if not axes.leads:
            raise ValueError(
                f"{who}: stacked at {name!r} says that axis {axes.axes[0]} counts layers, and here it has to be the first: "
                "move it with jnp.moveaxis, or leave that leaf out of stacked to take it as one matrix"
            )
    return [int(axes) for axes in found.values()]


def one_layer(params: types.Params, stacked: types.PyTree) -> types.Params:
    """Return the shapes of one layer of each stack; `params` itself if nothing is stacked."""
    if stacked is None or not any(jax.tree.leaves(stacked)):
        return params
    one = lambda leaf, axes: jax.ShapeDtypeStruct(axes.one(jnp.shape(leaf)), leaf.dtype)  # noqa: E731
    return jax.tree.map(one, params, stacked)
