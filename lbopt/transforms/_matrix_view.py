"""Leaves as stacks of matrices, and functions that are mapped over all matrices of one shape."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from lbopt import masks, stacks, tree, types
from lbopt.errors import UserError
from lbopt.transforms import _per_path

DimensionNumbers = Any
"""A pytree of `optax.contrib.MuonDimensionNumbers`, with None for leaves that are no matrices, or a
function params -> such a pytree; None for those that `lbopt.masks.matrix_dimension_numbers` finds.
"""


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """A leaf as matrices [batch, in, out].

    Attributes:
      shape: Shape of the leaf.
      reduction: Axes that are reduced where the matrix is applied to a vector, its inputs.
      output: Axes of its outputs.
    """

    shape: tuple[int, ...]
    reduction: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def batch(self) -> tuple[int, ...]:
        """The other axes: layers of a stack, heads, experts."""
        own = {*self.reduction, *self.output}
        return tuple(axis for axis in range(len(self.shape)) if axis not in own)

    def _size(self, axes: tuple[int, ...]) -> int:
        return math.prod(self.shape[axis] for axis in axes)

    @property
    def count(self) -> int:
        """The number of matrices."""
        return self._size(self.batch)

    @property
    def fan_in(self) -> int:
        return self._size(self.reduction)

    @property
    def fan_out(self) -> int:
        return self._size(self.output)

    @property
    def sides(self) -> tuple[int, int]:
        """The axes whose parts are contiguous rows, and contiguous columns, of the matrices."""
        rows, columns = (
            next((axis for axis in axes if self.shape[axis] > 1), axes[0])
            for axes in (self.reduction, self.output)
        )
        return rows, columns

    def split(self, leaf: jax.Array) -> jax.Array:
        """Return a leaf as [count, fan_in, fan_out]."""
        order = (*self.batch, *self.reduction, *self.output)
        spec = _per_path.typed_spec(leaf)
        sides = [spec[axis] for axis in self.sides] if any(spec) else []
        sizes = (self.count, self.fan_in, self.fan_out)
        return _reshaped(leaf.transpose(order), sizes, [None, *sides])

    def join(self, matrices: jax.Array) -> jax.Array:
        """Return [count, fan_in, fan_out] as a leaf."""
        order = (*self.batch, *self.reduction, *self.output)
        back = sorted(range(len(order)), key=order.__getitem__)
        spec = _per_path.typed_spec(matrices)
        split = dict(zip(self.sides, spec[1:], strict=True)) if any(spec) else {}
        sizes = [self.shape[axis] for axis in order]
        return _reshaped(matrices, sizes, map(split.get, order)).transpose(back)


def _reshaped(x: jax.Array, sizes: Sequence[int], spec: Iterable[Any]) -> jax.Array:
    """Return an array with other sizes; on explicit axes, split as told, if it was split."""
    where = PartitionSpec(*spec) if any(_per_path.typed_spec(x)) else None
    return jax.lax.reshape(x, tuple(sizes), out_sharding=where)


@dataclasses.dataclass(frozen=True)
class Given:
    """Dimension numbers as a leaf of a pytree; they are a pytree themselves."""

    numbers: optax.contrib.MuonDimensionNumbers | None


@dataclasses.dataclass(frozen=True)
class Matrices:
    """The arguments by which a transform chooses matrices.

    Attributes:
      dimension_numbers: The axes of each matrix, or None for hidden weights by role.
      stacked: Leaves that are stacks of layers; None if the dimension numbers tell.
    """

    dimension_numbers: DimensionNumbers = None
    stacked: types.Stacked = None

    def views(self, params: types.Params) -> types.PyTree:
        """Return a pytree like `params` of `MatrixView`s, with None for other leaves.

        Raises:
          UserError: If the dimension numbers do not fit the parameters, or no leaf is a matrix.
        """
        views = tree.map_with_name(_view, params, self.numbers(params))
        if self.stacked is not None and self.dimension_numbers is not None:
            layers = stacks.resolve_stacked(self.stacked, params)
            tree.map_with_name(_check_layers, params, views, layers)
        names = tree.leaf_names(params)
        if names and not jax.tree.leaves(views):
            fix = (
                f"none of the {len(names)} parameters ({tree.some(names)}) is a matrix; give the "
                "axes of those that are: optax.contrib.MuonDimensionNumbers"
            )
            raise UserError("dimension_numbers", reason=fix)
        return views

    def numbers(self, params: types.Params) -> types.PyTree:
        """Return a pytree like `params` of the axes of each leaf, `Given`."""
        given = self.dimension_numbers
        if given is None:
            numbers = masks.matrix_dimension_numbers(params, self.stacked)
        else:
            if tree.is_function(given):
                tree.check_takes(given, 1, "dimension_numbers", "the parameters")
                given = given(params)
            numbers = given

        # By name, as masks: containers may be of other types, and leaves may be taken out.
        boxed = jax.tree.map(
            lambda one: one if isinstance(one, Given) else Given(one), numbers, is_leaf=_is_numbers
        )
        return tree.spread(boxed, params, "dimension_numbers")

    def record(self, params: types.Params) -> None:
        """Record the choices for `lbopt.summarize_masks`; call it in `init`."""
        if self.stacked is not None:
            masks.record_choice("stacked", stacks.resolve_stacked(self.stacked, params))

    def collect(
        self, params: types.Params, make: Callable[[MatrixView, Any], jax.Array]
    ) -> dict[str, jax.Array]:
        """Return {path: make(view, dtype)} of all matrices; the dtype is fp32 or wider."""

        def one(p: jax.Array, view: MatrixView | None) -> jax.Array | None:
            return None if view is None else make(view, tree.wide_dtype(p.dtype))

        return _per_path.collect(params, jax.tree.map(one, params, self.views(params)))


def _is_numbers(node: Any) -> bool:
    # Plain tuples and lists of axes are refused by `_view`.
    is_plain = isinstance(node, (tuple, list)) and _is_axes(node)
    return node is None or isinstance(node, optax.contrib.MuonDimensionNumbers) or is_plain


def _is_axes(node: Any) -> bool:
    """Return whether a node is an axis, or a plain sequence of axes."""
    inside = type(node) in (tuple, list) and len(node) > 0
    return type(node) is int or (inside and all(map(_is_axes, node)))


def _view(name: str, leaf: Any, given: Given) -> MatrixView | None:
    numbers = given.numbers
    if numbers is None:
        return None
    shape = jnp.shape(leaf)
    fits = isinstance(numbers, optax.contrib.MuonDimensionNumbers)
    reduction, output = map(_axes, numbers) if fits else ((), ())
    axes = [axis for axis in (*reduction, *output) if -len(shape) <= axis < len(shape)]
    own = {axis % len(shape) for axis in axes}
    if not reduction or not output or len(own) != len(reduction) + len(output):
        fix = (
            f"the leaf has shape {shape}; give optax.contrib.MuonDimensionNumbers of two sets of "
            "its axes that have none in common, or None if it is no matrix"
        )
        raise UserError(f"dimension_numbers/{name}", numbers, fix)
    return MatrixView(
        shape,
        tuple(axis % len(shape) for axis in reduction),
        tuple(axis % len(shape) for axis in output),
    )


def _check_layers(name: str, leaf: Any, view: MatrixView | None, layers: stacks.LayerAxes) -> None:
    """Raise `UserError` if a matrix runs across layers that are told apart."""
    if view is not None and not {*layers.axes} <= {*view.batch}:
        fix = (
            f"stacked says that axes {layers.axes} of shape {jnp.shape(leaf)} count layers; leave "
            "them out of both sets"
        )
        raise UserError(f"dimension_numbers/{name}", reason=fix, code="conflict")


def _axes(given: Any) -> tuple[int, ...]:
    axes = given if isinstance(given, (tuple, list)) else (given,)
    try:
        return tuple(operator.index(axis) for axis in axes)
    except (TypeError, ValueError):
        return ()


def bounded(x: jax.Array) -> jax.Array:
    """Return numbers with those beyond 2^40 (1e12) as 2^40; NaN stays.

    Squares of their products with an orthonormal matrix stay finite in fp32.
    """
    return jnp.clip(x, -(2.0**40), 2.0**40)


class MatrixGroup(NamedTuple):
    """Matrices that go in one call.

    Attributes:
      sides: (rows, columns) of each.
      number: Their number.
    """

    sides: tuple[int, int]
    number: int


MatrixFn = Callable[..., tuple[jax.Array, ...]]
"""Stacks [K, ...] of matrices and of what is kept for each -> the same of results. Every matrix is
treated by itself."""
MatrixSpec = tuple[Any, ...]
"""Mesh axes over which each dimension of an array is split; shorter for dimensions that are not."""
MatrixRunner = Callable[..., tuple[jax.Array, ...]]
"""(fn, specs, *stacked) -> fn(*stacked), with the `MatrixSpec` of a slice of each stack."""


def _onto(
    shape: tuple[int, ...], spec: MatrixSpec, axes: Sequence[int], sizes: Mapping[str, int]
) -> MatrixSpec:
    """Return a `MatrixSpec` with the mesh axes of other dimensions moved onto some.

    Args:
      shape: Shape of the array.
      spec: How it is split.
      axes: The dimensions that may be split.
      sizes: Size of each mesh axis.

    Returns:
      The spec, as long as the shape, an entry for each dimension; () if it does not divide.
    """
    parts = [mesh_axes(part) for part in spec] + [()] * (len(shape) - len(spec))
    others = [name for axis, part in enumerate(parts) if axis not in axes for name in part]
    moved: list[Any] = [parts[axis] if axis in axes else () for axis in range(len(shape))]
    for name in others:
        for axis in axes:
            count = math.prod(sizes[one] for one in (*moved[axis], name))
            if shape[axis] % count == 0:
                moved[axis] = (*moved[axis], name)
                break
        else:
            return ()
    return tuple(part or None for part in moved)


def mesh_axes(part: Any) -> tuple[str, ...]:
    """Return the mesh axes of one entry of a `PartitionSpec`."""
    return (part,) if isinstance(part, str) else tuple(part or ())


class MatrixLayout(Protocol):
    """A way to run functions of stacks of matrices on a mesh."""

    def spec(self, name: str, leaf: jax.Array) -> MatrixSpec:
        """Return how a leaf of the updates is split."""
        ...

    def kept_spec(self, array: jax.Array) -> MatrixSpec:
        """Return how an array [matrices, ...], kept for the matrices of a leaf, is split."""
        ...

    def sizes(self, spec: MatrixSpec) -> Mapping[str, int]:
        """Return the size of each mesh axis of a spec."""
        ...

    def placed(self, array: jax.Array, spec: MatrixSpec) -> jax.Array:
        """Return an array that is split so."""
        ...

    def runners(self, groups: Sequence[MatrixGroup]) -> Sequence[MatrixRunner]:
        """Return a function for each group."""
        ...


# JAX keys its caches by this value, so a jitted part of an optimizer is traced anew for a layout.
_LAYOUT = jax.make_user_context(default_value=None)


def with_matrix_layout(layout: MatrixLayout) -> contextlib.AbstractContextManager[None]:
    """Return a context in which matrix functions run by a layout while they are traced."""
    return _LAYOUT(layout)


class _ArraySplit(NamedTuple):
    """How an array is split, and how while its matrices are moved: () if it is gathered."""

    given: MatrixSpec = ()
    moved: MatrixSpec = ()

    @classmethod
    def of(
        cls, shape: tuple[int, ...], given: MatrixSpec, axes: Sequence[int], layout: MatrixLayout
    ) -> _ArraySplit:
        """Return the split of an array whose other dimensions than `axes` count matrices."""
        if not any(given):
            return cls()
        return cls(given, _onto(shape, given, axes, layout.sizes(given)))

    def before(self, array: jax.Array, layout: MatrixLayout | None) -> jax.Array:
        """Return an array whose split dimensions are moved."""
        if layout is None or not self._moves():
            return array
        return layout.placed(array, self.moved)

    def after(self, array: jax.Array, layout: MatrixLayout | None) -> jax.Array:
        """Return an array whose split dimensions are moved back."""
        if layout is None or not self._moves():
            return array
        return layout.placed(layout.placed(array, self.moved), self.given)

    def _moves(self) -> bool:
        given = [mesh_axes(part) for part in self.given]
        moved = [mesh_axes(part) for part in self.moved]
        return any(moved) and given + [()] * (len(moved) - len(given)) != moved


class _Member(NamedTuple):
    """A leaf of a group.

    Attributes:
      place: Its place among the leaves.
      view: Its matrices.
      transposed: Whether they are transposed.
      split: How the leaf is split.
    """

    place: int
    view: MatrixView
    transposed: bool
    split: _ArraySplit


def map_matrices(
    fn: MatrixFn,
    matrices: Matrices,
    updates: optax.Updates,
    *kept: Mapping[str, jax.Array],
    like: Sequence[types.PyTree] = (),
    any_orientation: bool = False,
    deal: bool = True,
) -> tuple[optax.Updates, tuple[Any, ...]]:
    """Apply a function to all matrices among the updates and to what is kept for each.

    Matrices of one shape and dtype go in one call.

    Args:
      fn: (x [K, in, out], *like [K, in, out], *kept [K, ...]) -> the same of results.
      matrices: The choice of matrices.
      updates: The updates; leaves that are no matrices pass unchanged.
      *kept: Path of each matrix -> its array [matrices, ...].
      like: Trees like the updates, whose matrices the function gets too.
      any_orientation: Whether fn(x^T) = fn(x)^T. On a mesh, matrices of a shape and its transpose
        then go in one call.
      deal: Whether a layout may deal the matrices over a mesh; False where that costs more than
        the function.

    Returns:
      The updates, and the new `like` and `kept`.
    """
    structure: Any = jax.tree.structure(updates)
    views = structure.flatten_up_to(matrices.views(updates))
    names = _per_path.keys(updates)
    has_view = structure.unflatten([view is not None for view in views])
    trees = [structure.flatten_up_to(one) for one in (updates, *like)]
    arrays = [structure.flatten_up_to(_per_path.spread(updates, one, has_view)) for one in kept]

    layout = _LAYOUT.value if deal else None
    groups = _grouped(dict(zip(names, views, strict=True)), trees[0], layout, any_orientation)
    runners: Sequence[MatrixRunner] = [_directly] * len(groups)
    if layout is not None:
        counts = [sum(one.view.count for one in members) for members in groups.values()]
        dealt = [MatrixGroup(key[0], number) for key, number in zip(groups, counts, strict=True)]
        runners = layout.runners(dealt)

    new_trees, new_arrays = ([list(leaves) for leaves in parts] for parts in (trees, arrays))
    for ((_, spec, _), members), run in zip(groups.items(), runners, strict=True):
        stacks_of = [
            _joined([_matrices(one, leaves[one.place], layout) for one in members])
            for leaves in trees
        ]
        specs: list[MatrixSpec] = [spec] * len(trees)
        splits = [[_kept_split(part[one.place], layout) for one in members] for part in arrays]
        for part, of_part in zip(arrays, splits, strict=True):
            pairs = zip(members, of_part, strict=True)
            stacks_of.append(_joined([s.before(part[one.place], layout) for one, s in pairs]))
            specs.append(_common([split.moved for split in of_part]))
        results = run(fn, specs, *stacks_of)

        start = 0
        for index, one in enumerate(members):
            own = [result[start : start + one.view.count] for result in results]
            start += one.view.count
            for before, after, new in zip(trees, new_trees, own, strict=False):
                new = new.mT if one.transposed else new
                leaf = one.split.after(one.view.join(new), layout)
                after[one.place] = _placed_as(before[one.place], leaf)
            for after, new, of_part in zip(new_arrays, own[len(trees) :], splits, strict=True):
                after[one.place] = of_part[index].after(new, layout)

    directions, *others = map(structure.unflatten, new_trees)
    collected = (_per_path.collect(updates, structure.unflatten(part)) for part in new_arrays)
    return directions, (*others, *collected)


def _directly(
    fn: MatrixFn, specs: Sequence[MatrixSpec], *stacked: jax.Array
) -> tuple[jax.Array, ...]:
    del specs
    return fn(*stacked)


def _common(specs: Sequence[MatrixSpec]) -> MatrixSpec:
    """Return how slices of arrays are split; () if they are not alike, or split between slices."""
    first, *rest = specs[0] or (None,)
    alike = all(spec == specs[0] for spec in specs)
    return tuple(rest) if alike and first is None else ()


def _grouped(
    views: Mapping[str, MatrixView | None],
    leaves: Sequence[jax.Array],
    layout: MatrixLayout | None,
    any_orientation: bool,
) -> dict[tuple[tuple[int, int], tuple[Any, Any], Any], list[_Member]]:
    """Return the members of each group, by (sides, spec, dtype).

    On one device a shape and its transpose stay apart, so that each is treated as it would be
    alone, bit for bit; on a mesh fewer groups mean fewer collectives.
    """
    groups: dict[Any, list[_Member]] = {}
    for place, ((name, view), leaf) in enumerate(zip(views.items(), leaves, strict=True)):
        if view is None:
            continue
        sides = (view.fan_in, view.fan_out)
        split = _ArraySplit()
        if layout is not None:
            split = _ArraySplit.of(view.shape, layout.spec(name, leaf), view.sides, layout)
        spec = tuple(split.moved[axis] for axis in view.sides) if any(split.moved) else (None, None)
        transposed = any_orientation and layout is not None and view.fan_in > view.fan_out
        if transposed:
            sides = sides[::-1]
            spec = spec[::-1]
        member = _Member(place, view, transposed, split)
        groups.setdefault((sides, spec, leaf.dtype), []).append(member)
    return groups


def _kept_split(array: jax.Array, layout: MatrixLayout | None) -> _ArraySplit:
    if layout is None:
        return _ArraySplit()
    return _ArraySplit.of(array.shape, layout.kept_spec(array), range(1, array.ndim), layout)


def _matrices(one: _Member, leaf: jax.Array, layout: MatrixLayout | None) -> jax.Array:
    # Products need whole rows; where a layout knows the split of a leaf it moves it itself.
    is_split = any(one.split.moved)
    leaf = one.split.before(leaf, layout) if is_split else _per_path.replicated(leaf)
    matrices = one.view.split(leaf)
    return matrices.mT if one.transposed else matrices


def _joined(parts: Sequence[Any]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _placed_as(leaf: jax.Array, result: jax.Array) -> jax.Array:
    spec = _per_path.typed_spec(leaf)
    return jax.sharding.reshard(result, PartitionSpec(*spec)) if any(spec) else result
