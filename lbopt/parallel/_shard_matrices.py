"""Matrix optimizers on a mesh: each device treats some of the matrices, and all get the results."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from lbopt import tree, types
from lbopt.errors import UserError, require_choice
from lbopt.transforms import (
    MatrixFn,
    MatrixGroup,
    MatrixRunner,
    MatrixSpec,
    mesh_axes,
    require_transformation,
    with_matrix_layout,
)

By = Literal["stack", "owner", "auto"]
_CLEARLY_BETTER = 0.9
"""Share of the time of "stack" below which "auto" takes "owner", whose branches cost something."""
_FEW_EMPTY = 2
"""Slots for each matrix up to which results are gathered: a sum moves twice the words."""
_COSTLY = 2.0
"""Multiple of the ideal time from which "stack" warns."""


def shard_matrices(
    tx: optax.GradientTransformation,
    mesh: Mesh,
    by: By = "auto",
    *,
    axis_names: str | Sequence[str] | None = None,
    param_shardings: types.PyTree = None,
) -> optax.GradientTransformation:
    r"""Deal the matrices of an optimizer over the devices of a mesh.

    Under plain data parallelism every device orthogonalizes every matrix. Here the matrices of one
    shape (or of its transpose) are stacked and dealt over the devices, each device treats whole
    matrices, so there is no collective in the iterations, and the results are gathered. Numbers,
    states and checkpoints are those of `tx`, whatever the mesh.

        leaves                    before the iterations     after them
        whole on every device     none                      one all-gather a shape (*)
        split along one axis      one all-to-all a shape    one all-to-all a shape
        split along two axes      two all-to-alls a shape   two all-to-alls a shape

    (*) one all-reduce, where devices are more than twice as many as its matrices. Matrices of one
    shape that are split along their longer side, and others along their shorter, count as two
    shapes: with [in, out] split along `in`, the two layers of an MLP do. A leaf whose
    layers are split, or an inner one of the axes that make a row or a column, takes another
    all-to-all before and after; it is gathered if its rows and columns do not divide.

    That is the count of `scale_by_newton_schulz`. SOAP, Shampoo, PSGD-Kron and Dion move what they
    keep for each matrix in the same way, each of these arrays by itself.

    It works under `jit` with automatic and explicit axes, and inside `shard_map` on leaves that are
    whole on every device.

    Args:
      tx: The optimizer, `lbopt.muon` for instance, or a chain with `scale_by_newton_schulz`.
      mesh: The mesh of the program.
      by: "stack" gives each device an equal number of matrices of each shape; the last ones may be
        padding. "owner" packs the matrices of all shapes by their cost, largest first, and devices
        skip padding. "auto" takes the faster by the multiplications of Newton-Schulz.
      axis_names: Mesh axes over which the matrices are dealt; None for all.
      param_shardings: Pytree like the parameters of `NamedSharding` or `PartitionSpec`, or a
        function shape -> one of them: how the leaves are split, if they are, on automatic axes. A
        function also tells how what is kept for matrices is split. On explicit axes the types tell.
        Without it all results are gathered whole.

    Returns:
      A transformation with the state of `tx`.

    Raises:
      UserError: For an unknown `by`, axes that the mesh does not have, no transformation, or, in an
        update, shardings that do not fit the parameters.

    >>> import jax, jax.numpy as jnp, lbopt
    >>> mesh = lbopt.make_mesh(1)
    >>> tx = lbopt.shard_matrices(lbopt.muon(0.02), mesh)
    >>> params = {"dense": {"kernel": jnp.eye(4)}}
    >>> updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    >>> round(float(updates["dense"]["kernel"][0, 0]), 4)
    -0.0137

    References:
      Liu et al., Muon is Scalable for LLM Training, arXiv:2502.16982, section 2.3 (a device for
      each matrix). Graham, Bounds on Multiprocessing Timing Anomalies, 1969 (largest first).
    """
    require_transformation("tx", tx)
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise UserError("mesh", mesh, "give a jax.sharding.Mesh, lbopt.make_mesh()", code="type")
    require_choice("by", by, ("stack", "owner", "auto"))
    names = mesh.axis_names if axis_names is None else axis_names
    names = (names,) if isinstance(names, str) else tuple(names)
    unknown = [name for name in names if name not in mesh.axis_names]
    if unknown or not names:
        fix = f"the mesh has {', '.join(map(str, mesh.axis_names))}; name one or more of these"
        raise UserError("axis_names", axis_names, fix)

    if tree.is_function(param_shardings):
        tree.check_takes(param_shardings, 1, "param_shardings", "the shape of a parameter")

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: types.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        given = _placements(param_shardings, updates, mesh)
        place = param_shardings if tree.is_function(param_shardings) else None
        with with_matrix_layout(_Dealt(mesh, names, by, given, place)):
            return optax.with_extra_args_support(tx).update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init, update_fn)


def _placements(
    given: Any, params: types.Params, mesh: Mesh
) -> tuple[tuple[str, NamedSharding], ...]:
    """Return (path, sharding) of each leaf; nothing if leaves are whole or their types tell.

    Args:
      given: The argument `param_shardings`.
      params: The parameters, or their updates.
      mesh: The mesh of a `PartitionSpec`.
    """
    if given is None:
        return ()
    if tree.is_function(given):
        wheres = [given(jnp.shape(leaf)) for leaf in jax.tree.leaves(params)]
    else:
        # By name, as masks are spread; a `PartitionSpec` is a tuple in some versions of JAX.
        boxed = jax.tree.map(lambda where: [where], given, is_leaf=_is_placement)
        names = {tree.path_name(path[:-1]): where for path, where in _leaves(boxed)}
        wheres = [names.pop(name, None) for name in tree.leaf_names(params)]
        if names:
            fix = f"the parameters have no {tree.some(list(names))}; give a tree like theirs"
            raise UserError("param_shardings", reason=fix, code="mismatch")

    found = []
    for name, where in zip(tree.leaf_names(params), wheres, strict=True):
        field = f"param_shardings/{name}"
        if not _is_placement(where):
            fix = "give a NamedSharding or a PartitionSpec for each parameter"
            raise UserError(field, where, fix, code="type")
        if isinstance(where, PartitionSpec):
            unknown = {axis for part in where for axis in mesh_axes(part)} - set(mesh.axis_names)
            if unknown:
                fix = f"the mesh has {', '.join(map(str, mesh.axis_names))}; name axes of these"
                raise UserError(field, where, fix)
            where = NamedSharding(mesh, where)
        found.append((name, where))
    return tuple(found)


def _leaves(given: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(given, is_leaf=_is_placement)


def _is_placement(node: Any) -> bool:
    return isinstance(node, (NamedSharding, PartitionSpec))


@dataclasses.dataclass(frozen=True)
class _Slots:
    """The matrices of one group that each device treats.

    Attributes:
      order: [devices, slots], the matrix in each slot, or -1.
      axes: The mesh axes of the devices.
      by_stack: Whether the same devices have most to do in all groups.
    """

    order: np.ndarray
    axes: tuple[str, ...]
    by_stack: bool

    @functools.cached_property
    def _number(self) -> int:
        return int(self.order.max()) + 1

    def filled(self, x: jax.Array) -> jax.Array:
        """Return [devices * slots, ...]; what stands in padding does not matter."""
        flat = self.order.reshape(-1)
        if np.array_equal(flat[: len(x)], np.arange(len(x))):
            return jnp.pad(x, [(0, len(flat) - len(x)), *[(0, 0)] * (x.ndim - 1)])
        return x[np.maximum(flat, 0)]

    def emptied(self, x: jax.Array) -> jax.Array:
        """Return the matrices [matrices, ...] of [devices * slots, ...]."""
        flat = self.order.reshape(-1)
        places = np.empty(self._number, int)
        places[flat[flat >= 0]] = np.flatnonzero(flat >= 0)
        in_turn = np.array_equal(places, np.arange(self._number))
        return x[: self._number] if in_turn else x[places]

    def run(
        self, fn: MatrixFn, wholes: Sequence[bool], *stacked: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Run a function on one device, inside `shard_map`.

        Args:
          fn: The function.
          wholes: Whether each stack has all matrices, before and after; else those of the slots.
          *stacked: The stacks.
        """
        own = [self._taken(x) if whole else x for x, whole in zip(stacked, wholes, strict=True)]
        after = self._in_turn(fn, *own)
        return tuple(
            self._gathered(x) if whole else x for x, whole in zip(after, wholes, strict=True)
        )

    def _mine(self) -> jax.Array:
        """Return the matrix in each slot of this device, or -1."""
        return jnp.asarray(self.order)[jax.lax.axis_index(self.axes)]

    def _taken(self, x: jax.Array) -> jax.Array:
        """Return the matrices of this device, of a stack of all."""
        slots = self.order.shape[1]
        if np.array_equal(self.order.reshape(-1), np.arange(len(x))):
            start = jax.lax.axis_index(self.axes) * slots
            return jax.lax.dynamic_slice_in_dim(x, start, slots)
        places = jnp.maximum(self._mine(), 0)
        return jnp.concatenate(
            [jax.lax.dynamic_index_in_dim(x, places[slot]) for slot in range(slots)]
        )

    def _gathered(self, own: jax.Array) -> jax.Array:
        """Return all matrices, in one collective.

        Where most slots are empty, a sum of arrays that are zero but for a device's own matrices
        moves fewer words than a gather.
        """
        if self.order.size <= _FEW_EMPTY * self._number:
            return self.emptied(jax.lax.all_gather(own, self.axes, tiled=True))
        mine = self._mine()
        found = jnp.zeros((self._number, *own.shape[1:]), own.dtype)
        for slot, matrix in enumerate(own):
            place = jnp.maximum(mine[slot], 0)
            before = jax.lax.dynamic_index_in_dim(found, place, keepdims=False)
            matrix = jnp.where(mine[slot] >= 0, matrix, before)
            found = jax.lax.dynamic_update_index_in_dim(found, matrix, place, 0)
        return jax.lax.psum(found, self.axes)

    def _in_turn(self, fn: MatrixFn, *own: jax.Array) -> tuple[jax.Array, ...]:
        """Run a function on the slots of one device; padding is skipped, if devices differ.

        Slots that are full on all devices go in one call.
        """
        used = np.sum(self.order >= 0, axis=1)
        full = int(np.min(used))
        slots = self.order.shape[1]
        if self.by_stack and slots == 1:
            # Padding costs no time, as the other devices work.
            return fn(*own)

        parts = [fn(*(part[:full] for part in own))] if full else []
        mine = jnp.asarray(used)[jax.lax.axis_index(self.axes)]
        for slot in range(full, slots):
            one = tuple(part[slot : slot + 1] for part in own)
            parts.append(jax.lax.cond(slot < mine, lambda *x: tuple(fn(*x)), lambda *x: x, *one))
        return tuple(jnp.concatenate(column) for column in zip(*parts, strict=True))


@dataclasses.dataclass(frozen=True)
class _Dealt:
    """The layout: matrices dealt over axes of a mesh.

    Attributes:
      mesh: The mesh.
      axes: Its axes over which matrices are dealt.
      by: "stack", "owner" or "auto".
      given: (path, sharding) of each leaf; empty if leaves are whole.
      place: Function shape -> sharding of what is kept; None if it is whole on automatic axes.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    by: By
    given: tuple[tuple[str, NamedSharding], ...]
    place: Callable[[tuple[int, ...]], Any] | None

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.shape[name] for name in self.axes)

    def spec(self, name: str, leaf: jax.Array) -> MatrixSpec:
        """Return how a leaf of the updates is split."""
        spec = _spec_of(leaf, dict(self.given).get(name))
        if any(spec) and self._is_manual():
            fix = "inside shard_map every device needs whole leaves; update split ones under jit"
            raise UserError(f"param_shardings/{name}", PartitionSpec(*spec), fix, code="conflict")
        return spec

    def kept_spec(self, array: jax.Array) -> MatrixSpec:
        """Return how an array that is kept for matrices is split."""
        where = None if self.place is None or self._is_manual() else self.place(array.shape)
        spec = _spec_of(array, where)
        return spec if self._mesh_of(spec) is not None else ()

    def sizes(self, spec: MatrixSpec) -> dict[str, int]:
        """Return the size of each axis of the mesh of a spec."""
        return dict(self._mesh_of(spec).shape)

    def placed(self, array: jax.Array, spec: MatrixSpec) -> jax.Array:
        """Return an array that is split so."""
        return self._placed(array, PartitionSpec(*spec))

    def _is_manual(self) -> bool:
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return any(name in manual for name in self.axes)

    def runners(self, groups: Sequence[MatrixGroup]) -> list[MatrixRunner]:
        """Return a function (fn, specs, *stacked) -> fn(*stacked) for each group."""
        orders = deal_matrices(groups, self.devices, self.by)
        by_stack = all(
            np.array_equal(order, _by_stack(group.number, self.devices))
            for order, group in zip(orders, groups, strict=True)
        )
        slots = [_Slots(order, self.axes, by_stack) for order in orders]
        return [functools.partial(self._run, one) for one in slots]

    def _run(
        self, slots: _Slots, fn: MatrixFn, specs: Sequence[MatrixSpec], *stacked: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Run a function with each matrix on one device.

        Args:
          slots: The matrices of each device.
          fn: The function.
          specs: How a slice of each stack is split before and after.
          *stacked: Matrices, and what is kept for each.
        """
        wholes = [not any(spec) for spec in specs]
        local = functools.partial(slots.run, fn, wholes)
        if self._is_manual():
            return local(*stacked)

        # Split stacks come and go by all-to-alls; of whole ones each device takes its matrices.
        places = [PartitionSpec(None, *spec) for spec in specs]
        routes = [self._route(spec) for spec in specs]
        inside = tuple(PartitionSpec() if whole else PartitionSpec(self.axes) for whole in wholes)
        given = [
            self._placed(x, place)
            if whole
            # Padding is placed like the matrices first, or it would be sent around.
            else functools.reduce(self._placed, (place, *route), slots.filled(x))
            for x, whole, route, place in zip(stacked, wholes, routes, places, strict=True)
        ]
        results = jax.shard_map(
            local, mesh=self.mesh, in_specs=inside, out_specs=inside, check_vma=False
        )(*given)
        return tuple(
            result
            if whole
            else slots.emptied(functools.reduce(self._placed, (*route[-2::-1], place), result))
            for result, whole, route, place in zip(results, wholes, routes, places, strict=True)
        )

    def _route(self, spec: MatrixSpec) -> list[PartitionSpec]:
        """Return the shardings of a stack on its way from split slices to dealt ones.

        Each step moves the mesh axes of one dimension, by one all-to-all. The compiler would gather
        an array that is to be split in several dimensions fewer at once.
        """
        mesh = self._mesh_of(spec)
        dealt = PartitionSpec(self.axes)
        if self.devices < mesh.size:
            return [dealt]
        left = [mesh_axes(part) for part in spec]
        split = {axis for axes in left for axis in axes}
        taken = [axis for axis in mesh.axis_names if axis not in split]
        route = [PartitionSpec(tuple(taken), *left)] if taken else []
        # The major axes first: this is the order of the devices if no dimension has both.
        for axes in sorted(filter(None, left), key=lambda axes: mesh.axis_names.index(axes[0])):
            left[left.index(axes)] = ()
            taken += axes
            route.append(PartitionSpec(tuple(taken), *left))
        return route if tuple(taken) == self.axes else [*route, dealt]

    def _placed(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Return an array with another sharding, of the mesh's kind of axes."""
        full = PartitionSpec(*spec, *[None] * (x.ndim - len(spec)))
        if any(kind == AxisType.Explicit for kind in self.mesh.axis_types):
            return jax.sharding.reshard(x, full)
        mesh = self._mesh_of(spec)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, full))

    def _mesh_of(self, spec: MatrixSpec | PartitionSpec) -> Any:
        """Return the mesh that has the axes of a spec, as shardings may name axes of their own."""
        names = {name for part in spec for name in mesh_axes(part)}
        meshes = [self.mesh, *(where.mesh for _, where in self.given)]
        return next((mesh for mesh in meshes if names <= set(mesh.axis_names)), None)


def _spec_of(array: jax.Array, where: Any) -> MatrixSpec:
    """Return how an array is split: by its type, else by a sharding or spec, if there is one."""
    typed = tuple(getattr(jax.typeof(array).sharding, "spec", ()))
    return typed if any(typed) or where is None else tuple(getattr(where, "spec", where))


def deal_matrices(groups: Sequence[MatrixGroup], devices: int, by: By) -> list[np.ndarray]:
    """Return for each group [devices, slots], the matrix in each slot of each device, or -1.

    Args:
      groups: The groups of matrices.
      devices: Number of devices.
      by: "stack", "owner" or "auto".
    """
    stacked = [_by_stack(group.number, devices) for group in groups]
    if by == "stack":
        _warn_of_cost(groups, devices, stacked)
        return stacked
    owned = _by_owner(groups, devices)
    if by == "owner":
        return owned
    faster = makespan(groups, owned) < _CLEARLY_BETTER * makespan(groups, stacked)
    return owned if faster else stacked


def cost(group: MatrixGroup) -> int:
    """Return the multiplications of one step of Newton-Schulz for one matrix."""
    short, long = sorted(group.sides)
    return short * short * (2 * long + short)


def makespan(groups: Sequence[MatrixGroup], orders: Sequence[np.ndarray]) -> int:
    """Return the cost of the device that has most to do."""
    of_each = [
        cost(group) * np.sum(order >= 0, axis=1)
        for group, order in zip(groups, orders, strict=True)
    ]
    return int(np.max(np.sum(of_each, axis=0))) if of_each else 0


def _by_stack(count: int, devices: int) -> np.ndarray:
    slots = -(-count // devices)
    order = np.full(devices * slots, -1)
    order[:count] = np.arange(count)
    return order.reshape(devices, slots)


def _by_owner(groups: Sequence[MatrixGroup], devices: int) -> list[np.ndarray]:
    """Give each matrix, the costliest first, to the device with least to do."""
    load = np.zeros(devices, np.int64)
    owned: list[list[list[int]]] = [[[] for _ in range(devices)] for _ in groups]
    for place in sorted(range(len(groups)), key=lambda place: -cost(groups[place])):
        for matrix in range(groups[place].number):
            device = int(np.argmin(load))
            load[device] += cost(groups[place])
            owned[place][device].append(matrix)

    orders = []
    for of_devices in owned:
        slots = max(len(own) for own in of_devices)
        orders.append(np.array([own + [-1] * (slots - len(own)) for own in of_devices]))
    return orders


def _warn_of_cost(
    groups: Sequence[MatrixGroup], devices: int, orders: Sequence[np.ndarray]
) -> None:
    ideal = max(
        sum(cost(group) * group.number for group in groups) / devices,
        max((cost(group) for group in groups), default=0),
    )
    times = makespan(groups, orders) / ideal if ideal else 1
    other = makespan(groups, _by_owner(groups, devices)) / ideal if ideal else 1
    if times >= _COSTLY and times > other:
        shapes = len(groups)
        warnings.warn(
            f'shard_matrices(by="stack"): {sum(group.number for group in groups)} matrices of '
            f"{shapes} shapes on {devices} devices take {times:.1f} times the ideal; "
            f'by="owner" takes {other:.1f} times.',
            stacklevel=2,
        )
