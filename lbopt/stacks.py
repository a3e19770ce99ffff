"""Leaves that are stacks of layers, as `nn.scan` makes them.

A predicate or the model's metadata names them; they are never guessed from sizes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lbopt import tree, types
from lbopt.errors import UserError


class LayerAxes(int):
    """The axes of a leaf that count layers; as an int, their number.

    Attributes:
      axes: The axes, ascending; 0, 1, ... if only their number is given. Negative axes count from
        the end; `resolve_stacked` makes them positive.

    >>> axes = LayerAxes((1,))
    >>> axes.layers((4, 12, 8)), axes.one((4, 12, 8))
    ((12,), (4, 8))
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
        """Whether they are the leading axes."""
        return self.axes == tuple(range(self))

    def layers(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of these axes in a leaf of this shape."""
        return tuple(shape[axis] for axis in self.axes)

    def one(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one layer."""
        return tuple(size for axis, size in enumerate(shape) if axis not in self.axes)


@dataclasses.dataclass(frozen=True)
class StackedPaths:
    """A predicate on paths that says which leaves are stacks.

    `stacked_paths` makes one from patterns, `stacked_from_metadata` one from a model's boxes.

    Attributes:
      found: path -> its axes of layers, from metadata; None for one from patterns.
      patterns: Regular expressions, searched in the path.
      axes: Axes of layers of the leaves whose path matches a pattern.
    """

    found: Mapping[str, LayerAxes] | None
    patterns: tuple[str, ...] = ()
    axes: LayerAxes = LayerAxes(1)  # noqa: RUF009 - it does not change

    def __call__(self, name: str, leaf: Any = None) -> LayerAxes:
        """Return the axes that count layers in the leaf of this name."""
        del leaf
        if not isinstance(name, str):
            fix = (
                "it is called with the name of a parameter; inside optax.inject_hyperparams, name "
                "stacked in static_args, or it is taken for a schedule"
            )
            raise UserError("stacked", self, fix, code="type")
        if self.found is not None:
            return self.found.get(name, LayerAxes(0))
        matches = any(re.search(pattern, name) for pattern in self.patterns)
        return self.axes if matches else LayerAxes(0)

    def check(self, params: types.Params) -> None:
        """Raise `UserError` if the patterns do not fit the parameters.

        Each pattern must match a parameter. The leaves of one stack, whose paths are equal up to
        the end of the match, must have the same number of layers.
        """
        names = tree.leaf_names(params)
        idle = [
            pattern
            for pattern in self.patterns
            if not any(re.search(pattern, name) for name in names)
        ]
        # If all are idle, `resolve_stacked` reports that nothing is stacked.
        if idle and len(idle) < len(self.patterns):
            fix = (
                f"{idle[0]!r} matches none of the {len(names)} parameters ({tree.some(names)}); "
                "correct the pattern, or leave it out"
            )
            raise UserError("stacked", self, fix)

        first_of_stack: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, leaf in tree.by_name(params).items():
            matches = filter(None, (re.search(pattern, name) for pattern in self.patterns))
            match = next(matches, None)
            if match is None or not _has_axes(leaf, self.axes):
                continue
            layers = self.axes.layers(jnp.shape(leaf))
            stack = name[: match.end()]
            other, wanted = first_of_stack.setdefault(stack, (name, layers))
            if layers != wanted:
                axis = self.axes.axes[0]
                fix = (
                    f"axis {axis} has size {wanted[0]} at {other!r} and {layers[0]} at {name!r}, "
                    "but the leaves of a stack have the same number of layers; give the axis that "
                    f"counts them, stacked_paths(..., axis={int(axis == 0)})"
                )
                raise UserError("stacked", self, fix, code="mismatch")

    def __repr__(self) -> str:
        if self.found is not None:
            return f"<metadata of {len(self.found)} stacked leaves>"
        axis = "" if self.axes.leads else f", axis={self.axes.axes[0]}"
        return f"stacked_paths({', '.join(repr(pattern) for pattern in self.patterns)}{axis})"


def stacked_paths(*patterns: str, axis: int = 0) -> StackedPaths:
    r"""Return a predicate: leaves whose path matches a regular expression are stacks of layers.

    Args:
      *patterns: Regular expressions, searched (`re.search`) in the full path.
      axis: Axis that counts layers. It is 1 for `nn.scan(..., variable_axes={"params": 1})`, the
        default of MaxText; -1 is the last axis of each leaf.

    Returns:
      A value for `stacked`. It is checked against the parameters: the leaves of a stack must have
      the same number of layers.

    Raises:
      UserError: Without a pattern, for a pattern that is no regular expression, or for an axis that
        is no whole number.

    >>> stacked_paths(r"encoder/layers/")("encoder/layers/Dense_0/kernel", None)
    1
    """
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
        fix = "give the number of the axis that counts layers"
        raise UserError("axis", axis, fix, code="type")
    return StackedPaths(None, tree.check_patterns(patterns), LayerAxes((int(axis),)))


def stacked_from_metadata(boxed: types.PyTree, axis_name: str = "layers") -> StackedPaths:
    """Read from a model's own metadata which leaves are stacks of layers, and along which axis.

    Args:
      boxed: Parameters as the model initialises them, with partitioning metadata. Leaves with the
        axis `axis_name` are stacks, whether they are boxes with `names` (`flax.linen.Partitioned`,
        made by `nn.scan(..., metadata_params={nn.PARTITION_NAME: "layers"})`) or variables of Flax
        NNX with `out_sharding` (`nnx.vmap(..., transform_metadata={nnx.PARTITION_NAME:
        "layers"})`). Other leaves are no stacks.
      axis_name: Name of the axis that counts layers.

    Raises:
      UserError: If no leaf has such an axis, or if Flax wrote its name in the wrong place.

    >>> import flax.linen as nn, lbopt, numpy as np
    >>> kernel = nn.Partitioned(np.ones((12, 4, 4)), names=("layers", None, None))
    >>> stacked = stacked_from_metadata({"kernel": kernel, "bias": np.ones(4)})
    >>> stacked("kernel"), stacked("bias")
    (1, 0)
    >>> tx = lbopt.lamb(0.01, stacked=stacked)  # twelve layers, each with a ratio of its own
    """
    found: dict[str, LayerAxes] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    boxes = jax.tree_util.tree_leaves_with_path(
        boxed, is_leaf=lambda node: _axis_names(node) is not None
    )
    for path, box in boxes:
        names = _axis_names(box) or ()
        axes = tuple(axis for axis, name in enumerate(names) if name == axis_name)
        if axes:
            found[tree.path_name(path)] = LayerAxes(axes)
            shapes[tree.path_name(path)] = jnp.shape(jax.tree.leaves(box)[0])

    if not found:
        fix = "no leaf's metadata names that axis; pass the boxed parameters"
        raise UserError("axis_name", axis_name, fix, code="missing")
    _check_places(found, shapes, axis_name)
    return StackedPaths(found)


def _check_places(
    found: Mapping[str, LayerAxes], shapes: Mapping[str, tuple[int, ...]], axis_name: str
) -> None:
    """Raise `UserError` for layers along axis -1, whose name Flax writes before the last axis."""
    if not all(axes.axes == (len(shapes[name]) - 2,) for name, axes in found.items()):
        return
    places = {axes.axes for axes in found.values()}
    named_sizes = {shape[-2] for shape in shapes.values()}
    last_sizes = {shape[-1] for shape in shapes.values()}

    # The named axis may be right. It is wrong if only the last axis has one size in all leaves.
    last_counts_layers = places != {(0,)} and len(named_sizes) > 1 and len(last_sizes) == 1
    if len(places) > 1 or last_counts_layers:
        fix = (
            "the metadata names the axis before the last of every leaf, where Flax by mistake puts "
            "the name of axis -1; give Flax that axis as a number >= 0, or use "
            "lbopt.stacked_paths(..., axis=-1)"
        )
        raise UserError("axis_name", axis_name, fix)


def _axis_names(node: Any) -> tuple[Any, ...] | None:
    """Return the names of a box's axes; None if the node is no box."""
    if hasattr(node, "get_metadata"):
        metadata = node.get_metadata()
        keys = ("out_sharding", "sharding_names", "sharding")
        return tuple(next(filter(None, map(metadata.get, keys)), ()))
    return tuple(node.names) if hasattr(node, "names") and hasattr(node, "unbox") else None


def resolve_stacked(stacked: types.Stacked, params: types.Params) -> types.PyTree:
    """Turn `stacked` in any accepted form into a pytree of `LayerAxes`, shaped like `params`.

    Args:
      stacked: Predicate (path, leaf) -> bool, number of leading layer axes or `LayerAxes`; a pytree
        of such values; or None for no stacks.
      params: The parameters.

    Raises:
      UserError: If a leaf lacks the axis, if nothing is stacked, or if a value is of another type.
    """
    if stacked is None:
        return jax.tree.map(lambda _: LayerAxes(0), params)
    # One value for all leaves would make stacks of biases and of unstacked layers too.
    if isinstance(stacked, (str, bool, int)):
        fix = (
            "give a predicate (path, leaf) -> bool, for instance lbopt.stacked_paths('^layers/'), "
            "or None"
        )
        raise UserError("stacked", stacked, fix, code="type")

    if tree.is_function(stacked):
        if isinstance(stacked, StackedPaths):
            stacked.check(params)
        does = "the path and the leaf and returns a bool or the number of leading layer axes"
        tree.check_takes(stacked, 2, "stacked", does)
        found = tree.map_with_name(
            lambda name, leaf: _layer_axes(name, stacked(name, leaf), leaf), params
        )
    else:
        found = tree.map_with_name(_layer_axes, tree.spread(stacked, params, "stacked"), params)

    if jax.tree.leaves(params) and not any(jax.tree.leaves(found)):
        names = tree.some(tree.leaf_names(params))
        fix = f"it marks none of the parameters ({names}); pass None if there are no stacks"
        raise UserError("stacked", stacked, fix)
    return found


def _layer_axes(name: str, count: Any, leaf: Any) -> LayerAxes:
    """Return the layer axes of one leaf, none of them negative."""
    if not isinstance(count, (bool, int, np.bool_, np.integer)) or count < 0:
        fix = "give a bool or the number of leading layer axes"
        raise UserError(f"stacked/{name}", count, fix, code="type")
    axes = count if isinstance(count, LayerAxes) else LayerAxes(int(count))
    if not _has_axes(leaf, axes):
        leading = "leading " if axes.leads else ""
        fix = (
            f"the leaf has shape {jnp.shape(leaf)} and no such {leading}axis of layers; give an "
            "axis that it has, or leave it out"
        )
        raise UserError(f"stacked/{name}", axes, fix)
    return axes if axes.leads else LayerAxes(tuple(axis % jnp.ndim(leaf) for axis in axes.axes))


def _has_axes(leaf: Any, axes: LayerAxes) -> bool:
    return all(-jnp.ndim(leaf) <= axis < jnp.ndim(leaf) for axis in axes.axes)


def leading(stacked: types.Stacked, params: types.Params, needs: str) -> list[int]:
    """Return the number of leading layer axes of each leaf, in leaf order.

    Args:
      stacked: Leaves that are stacks of layers, in any form that `resolve_stacked` takes.
      params: The parameters.
      needs: Name of the algorithm that takes layers along leading axes only, for the error.

    Raises:
      UserError: As `resolve_stacked`, or if another axis stands before those of a leaf's layers.
    """
    found = tree.by_name(resolve_stacked(stacked, params))
    for name, axes in found.items():
        if not axes.leads:
            fix = (
                f"{needs} needs layers along the first axis; move it there with jnp.moveaxis, or "
                "leave the leaf out of stacked to take it as one matrix"
            )
            raise UserError(f"stacked/{name}", axes, fix)
    return [int(axes) for axes in found.values()]


def one_layer(params: types.Params, stacked: types.PyTree) -> types.Params:
    """Return the shapes of one layer of each stack; `params` itself if nothing is stacked."""
    if stacked is None or not any(jax.tree.leaves(stacked)):
        return params

    def one(leaf: Any, axes: LayerAxes) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(axes.one(jnp.shape(leaf)), leaf.dtype)

    return jax.tree.map(one, params, stacked)
