"""The protocol of aggregators, and the two ways to put one into an Optax chain."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, PartitionSpec

from lbopt import _scalars, tree, types
from lbopt.aggregators._group import Group
from lbopt.aggregators._wire_bytes import WireBytes, ring_bytes
from lbopt.errors import UserError, require
from lbopt.transforms import (
    UNKNOWN_PARAMS,
    SkipState,
    is_placeholder,
    require_state,
    require_transformation,
)

ONE_IN = "one_in_"
"""Scope (`jax.named_scope`) of a `lax.cond` whose condition holds in one of so many steps.

The number follows. It tells a plan how often the branches are taken.
"""


class AggregatorState(NamedTuple):
    """The state of an aggregator between steps, by its placement on the devices.

    Attributes:
      local: Pytree of arrays [replicas, ...], sharded over the replicas.
      mirrored: Pytrees shaped like the parameters, the same for all replicas.
      shared: Small arrays, the same for all replicas.

    >>> import jax.numpy as jnp
    >>> from lbopt.aggregators import ef, topk
    >>> state = ef(topk(0.01)).first_state({"w": jnp.zeros(3)}, num_replicas=2)
    >>> state.local.error["w"].shape, state.mirrored
    ((2, 3), ())
    """

    local: Any = ()
    mirrored: Any = ()
    shared: Any = ()


class Aggregated(NamedTuple):
    """The result of one aggregation of the replicas' gradients.

    Attributes:
      updates: Pytree like the parameters: the mean gradient, or the aggregator's estimate of it.
      state: The new state.
      aux: Keyword arguments for the optimizer's `update`.

    >>> import jax.numpy as jnp
    >>> from lbopt.aggregators import Group
    >>> rows = {"w": jnp.array([[1.0], [3.0]])}
    >>> found = plain_mean().update(rows, AggregatorState(), Group(num_replicas=2), Extra())
    >>> print(found.updates["w"], found.aux)
    [2.] {}
    """

    updates: types.PyTree
    state: AggregatorState
    aux: dict[str, Any]


class Extra(NamedTuple):
    """Optional inputs of an aggregator.

    Attributes:
      second_moment: Adam's running mean of squared gradients, like the parameters; None if not
        given.

    >>> Extra(), Extra(second_moment={"w": 1.0}).second_moment
    (Extra(second_moment=None), {'w': 1.0})
    """

    second_moment: Any = None


@dataclasses.dataclass(frozen=True, repr=False)
class Aggregator:
    """A rule that turns the gradients of replicas into one update.

    `make_train_step` accepts it directly; `as_optax` adapts it for Optax.

    Attributes:
      name: Name for messages.
      init: (params, number of replicas) -> the first state. The arrays of `local` have a leading
        axis of that length.
      update: (rows, state, group, extra) -> `Aggregated`. A leaf of the rows is [r, *shape], the
        gradients of the replicas on this device; leaves of `state.local` have the same first axis.
        All results except `local` are equal on all devices.
      wire_bytes: (params, number of replicas) -> `WireBytes` of one step of one replica.
      needs_second_moment: Whether `extra.second_moment` is required.
      check_chain: (state of the optimizer, or its shapes, params) -> None. Raises `UserError` if
        the aggregator and the optimizer are incompatible.
      check_replicas: (number of replicas) -> None. Raises `UserError`, naming `num_replicas`, if
        the aggregator cannot combine this number.
      takes_parts: Whether the aggregator accepts shards of leaves: each device of a slice then
        sends the shard that it has summed. The state's `local` and `mirrored` are then trees like
        the parameters, or several such trees.
      compresses: Whether the aggregator's purpose is to send fewer bytes.
      takes_complex: Whether parameters may be complex.

    >>> import dataclasses, jax.numpy as jnp, lbopt, optax
    >>> def update(rows, state, group, extra):  # the largest of each number, not the mean
    ...     return Aggregated(group.max(rows), state, {})
    >>> largest = dataclasses.replace(plain_mean(), name="largest()", update=update)
    >>> tx = lbopt.aggregate(largest, optax.sgd(1.0), num_replicas=2)
    >>> updates, _ = tx.update({"w": jnp.array([[1.0], [3.0]])}, tx.init({"w": jnp.zeros(1)}))
    >>> print(largest, updates["w"])
    largest() [-3.]
    """

    name: str
    init: Callable[[types.Params, int], AggregatorState]
    update: Callable[[types.PyTree, AggregatorState, Group, Extra], Aggregated]
    wire_bytes: Callable[[types.Params, int], WireBytes]
    needs_second_moment: bool = False
    check_chain: Callable[[Any, types.Params], None] = lambda opt_state, params: None
    check_replicas: Callable[[int], None] = lambda num_replicas: None
    takes_parts: bool = False
    compresses: bool = True
    takes_complex: bool = False

    def __repr__(self) -> str:
        return self.name

    def first_state(self, params: types.Params, num_replicas: int) -> AggregatorState:
        """Return the first state, from `init`, after checking the dtypes of the parameters.

        Raises:
          UserError: If a parameter is not a floating-point array, or is complex and the aggregator
            accepts real ones only; the error names it.
        """
        tree.check_inexact(params, "params")
        for name, leaf in zip(tree.leaf_names(params), jax.tree.leaves(params), strict=True):
            if not self.takes_complex and jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                fix = (
                    f"its dtype is {leaf.dtype}, and {self.name} takes real parameters; keep its "
                    "real and imaginary parts, or use lbopt.aggregators.plain_mean()"
                )
                raise UserError(f"params/{name}", reason=fix, code="type")
        return self.init(params, num_replicas)


def plain_mean() -> Aggregator:
    """Return the plain mean, summed in fp32 or wider.

    It computes the same as `make_train_step(..., reduction=AllReduce(jnp.float32))`.

    >>> import jax.numpy as jnp
    >>> aggregator = plain_mean()
    >>> aggregator, aggregator.wire_bytes({"w": jnp.zeros(1000)}, 8).sent
    (mean(), 7000.0)
    """

    def update(
        rows: types.PyTree, state: AggregatorState, group: Group, extra: Extra
    ) -> Aggregated:
        del extra
        return Aggregated(cast_like(group.mean(widened(rows)), rows), state, {})

    def sent(params: types.Params, num_replicas: int) -> WireBytes:
        ring = ring_bytes(params, num_replicas)
        return WireBytes(ring, ring)

    return Aggregator(
        "mean()",
        lambda params, num_replicas: AggregatorState(),
        update,
        sent,
        takes_parts=True,
        compresses=False,
        takes_complex=True,
    )


def keep_finite(aggregator: Aggregator) -> Aggregator:
    """Return an aggregator that discards any step in which a replica's gradient is not finite.

    The update of such a step is NaN, for an optimizer that skips bad updates
    (`lbopt.skip_bad_updates`). Otherwise one broken gradient would stay in the memory of error
    feedback for ever, or be left out of a message unnoticed. The check reads the gradients and the
    old and new state once more and reduces one number.

    Args:
      aggregator: Any aggregator.

    Returns:
      An `Aggregator` with the same state, updates and bytes.

    >>> import jax, jax.numpy as jnp, lbopt, optax
    >>> tx = lbopt.skip_bad_updates(optax.sgd(0.1))
    >>> tx = lbopt.aggregate(keep_finite(plain_mean()), tx, num_replicas=2)
    >>> grads = {"w": jnp.array([[1.0], [jnp.nan]])}  # one row for each replica
    >>> updates, state = jax.jit(tx.update)(grads, tx.init({"w": jnp.zeros(1)}))
    >>> print(updates["w"], state[1].skipped_nonfinite)
    [0.] 1
    """

    def update(
        rows: types.PyTree, state: AggregatorState, group: Group, extra: Extra
    ) -> Aggregated:
        found = aggregator.update(rows, state, group, extra)
        leaves = jax.tree.leaves(rows)
        broken = sum(
            jnp.any(~jnp.isfinite(x), tuple(range(1, x.ndim))).astype(jnp.int32) for x in leaves
        )
        sound = group.sum_with_parts(broken) == 0
        kept = jax.tree.map(lambda new, old: jnp.where(sound, new, old), found.state, state)
        updates = jax.tree.map(
            lambda x: jnp.where(sound, x, jnp.nan).astype(x.dtype), found.updates
        )
        return found._replace(updates=updates, state=kept)

    return dataclasses.replace(aggregator, update=update)


def remembered_state(
    new: AggregatorState, old: AggregatorState, opt_state: Any, old_opt_state: Any
) -> AggregatorState:
    """Return the aggregator's state after a step: the old one if its update was skipped.

    Error feedback assumes that every sent update was applied. An update skipped by
    `lbopt.skip_bad_updates` or `optax.apply_if_finite` would otherwise return with the next
    messages. With neither in the optimizer, the result is the new state.

    Args:
      new: The aggregator's state after the aggregation.
      old: The aggregator's state before it.
      opt_state: The optimizer's state after its update.
      old_opt_state: The optimizer's state before it.
    """
    counts = _skips(opt_state)
    old_counts = _skips(old_opt_state)
    if not counts:
        return new
    skipped = jnp.any(jnp.stack(counts) > jnp.stack(old_counts))
    return jax.tree.map(lambda after, before: jnp.where(skipped, before, after), new, old)


def _skips(opt_state: Any) -> list[jax.Array]:
    """Return the skip count of each `lbopt.skip_bad_updates` and `optax.apply_if_finite`."""
    is_guard = lambda state: isinstance(state, (SkipState, optax.ApplyIfFiniteState))  # noqa: E731
    guards = [state for state in jax.tree.leaves(opt_state, is_leaf=is_guard) if is_guard(state)]
    return [
        guard.skipped_nonfinite + guard.skipped_spikes
        if isinstance(guard, SkipState)
        else guard.total_notfinite
        for guard in guards
    ]


def widened(rows: types.PyTree) -> types.PyTree:
    """Return arrays in fp32 or wider."""
    return jax.tree.map(lambda x: x.astype(tree.wide_dtype(x.dtype)), rows)


def cast_like(updates: types.PyTree, rows: types.PyTree) -> types.PyTree:
    """Return updates in the gradients' dtypes."""
    return jax.tree.map(lambda x, row: x.astype(row.dtype), updates, rows)


def zero_rows(params: types.Params, num_replicas: int) -> types.PyTree:
    """Return zeros [replicas, *shape] for every leaf, in fp32 or wider."""
    return jax.tree.map(
        lambda p: jnp.zeros((num_replicas, *jnp.shape(p)), tree.wide_dtype(p.dtype)), params
    )


def zeros(params: types.Params) -> types.PyTree:
    """Return zeros like the parameters, in fp32 or wider."""
    return jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), tree.wide_dtype(p.dtype)), params)


def vectors(shape: tuple[int, ...], layer_axes: int) -> tuple[int, int]:
    """Return the number of layers of a leaf, and the number of elements of each."""
    return math.prod(shape[:layer_axes]), math.prod(shape[layer_axes:])


def as_layers(rows: jax.Array, layer_axes: int) -> jax.Array:
    """Return a leaf's gradients [r, *shape] as [r, layers, *layer shape], in fp32 or wider."""
    layers = math.prod(rows.shape[1 : 1 + layer_axes])
    return rows.astype(tree.wide_dtype(rows.dtype)).reshape(
        len(rows), layers, *rows.shape[1 + layer_axes :]
    )


def rebuilt_state(state: AggregatorState, num_replicas: int) -> AggregatorState:
    """Return a state for another number of replicas; each gets the mean of the old rows.

    This preserves the total unsent error and the invariant that the mirror equals the mean of its
    rows; per-replica differences are lost.

    Args:
      state: A state for any number of replicas.
      num_replicas: The new number of replicas.

    Returns:
      A state whose `local` arrays are [num_replicas, ...], in the same dtypes.

    >>> import jax.numpy as jnp
    >>> state = AggregatorState(local={"w": jnp.array([[1.0], [3.0]])})
    >>> print(rebuilt_state(state, num_replicas=3).local["w"][:, 0])
    [2. 2. 2.]
    """

    def spread(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(
            x.astype(tree.wide_dtype(x.dtype)).mean(0), (num_replicas, *x.shape[1:])
        ).astype(x.dtype)

    return state._replace(local=jax.tree.map(spread, state.local))


def warn_if_it_loses(aggregator: Aggregator, params: types.Params, num_replicas: int) -> None:
    """Warn if an aggregator that compresses sends more bytes than the plain mean would."""
    warn_of_wire_bytes(aggregator, aggregator.wire_bytes(params, num_replicas), num_replicas)


def warn_of_wire_bytes(aggregator: Aggregator, wire: WireBytes, num_replicas: int) -> None:
    """Warn if these bytes are more than the plain mean's."""
    if aggregator.compresses and num_replicas > 1 and wire.sent > wire.ring:
        warnings.warn(
            f"{aggregator.name} sends {_bytes(wire.sent)} a step and device between "
            f"{num_replicas} replicas, a ring all-reduce of fp32 gradients {_bytes(wire.ring)}: "
            f"it loses {wire.sent / wire.ring:.3g} x on the wire. "
            "Use it between fewer replicas (over='slices'), or compress more",
            stacklevel=2,
        )


def _bytes(number: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} bytes"


def require_aggregator(field: str, value: Any) -> None:
    """Raise `UserError` unless a value is an aggregator."""
    fix = "give one of lbopt.aggregators, lbopt.aps() for instance"
    require(isinstance(value, Aggregator), field, value, fix, code="type")


def as_optax(
    aggregator: Aggregator, num_replicas: int, mesh: Mesh | None = None
) -> optax.GradientTransformationExtraArgs:
    """Return the aggregator in the form of `optax.experimental.aggregating`, if Optax has it.

    Args:
      aggregator: Any aggregator.
      num_replicas: Length of the leading axis of the gradients.
      mesh: A one-axis mesh over which that axis is sharded; None for one device.

    Returns:
      A transformation whose state is an `AggregatorState` with plain lists in `local`, since an
      array with a replica axis in the parameters' own containers would inherit their sharding. Its
      `update` takes gradients [replicas, *shape] and returns ((updates, aux), state): pass it to
      `optax.experimental.aggregating.process(..., aggregator_has_aux=True)`, or use `aggregate`.
      Aggregators that need the second moment take the keyword argument `second_moment`.

    Raises:
      UserError: If the devices do not divide the replicas or the mesh is of another kind. Its
        `update` raises it, naming the parameter, for gradients without that axis.

    >>> import jax.numpy as jnp
    >>> first = as_optax(plain_mean(), num_replicas=2)
    >>> grads = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]])}
    >>> (updates, aux), _ = first.update(grads, first.init({"w": jnp.zeros(2)}))
    >>> print(updates["w"], aux)
    [2. 3.] {}
    """
    devices = 1 if mesh is None else mesh.size
    require_aggregator("aggregator", aggregator)
    num_replicas = _scalars.whole("num_replicas", num_replicas)
    if num_replicas % devices:
        fix = f"give a multiple of the {devices} devices of the mesh"
        raise UserError("num_replicas", num_replicas, fix)
    if mesh is not None and (len(mesh.axis_names) != 1 or mesh.axis_types != (AxisType.Auto,)):
        fix = "give one with a single axis of AxisType.Auto, as lbopt.make_mesh makes"
        raise UserError("mesh", mesh, fix)
    axis = None if mesh is None else mesh.axis_names[0]

    def init_fn(params: types.Params) -> AggregatorState:
        if is_placeholder(params):
            mirrored = aggregator.init(params, num_replicas).mirrored
            return AggregatorState(UNKNOWN_PARAMS, mirrored, UNKNOWN_PARAMS)
        if num_replicas == devices:
            warn_if_it_loses(aggregator, params, num_replicas)
        state = aggregator.first_state(params, num_replicas)
        return state._replace(local=_in_lists(state.local))

    def update_fn(
        grads: types.PyTree,
        state: AggregatorState,
        params: types.Params | None = None,
        **extra: Any,
    ) -> Any:
        if aggregator.needs_second_moment and extra.get("second_moment") is None:
            fix = f"{aggregator.name} needs that of Adam; call update(..., second_moment=nu)"
            raise UserError("second_moment", None, fix, code="missing")
        _check_rows(grads, params, num_replicas)

        shapes = jax.tree.map(lambda row: jax.ShapeDtypeStruct(row.shape[1:], row.dtype), grads)
        require_state(state, AggregatorState)
        first = jax.eval_shape(lambda p: aggregator.first_state(p, num_replicas), shapes)
        if [jnp.shape(x) for x in jax.tree.leaves(state)] != [
            x.shape for x in jax.tree.leaves(first)
        ]:
            fix = (
                f"the state of {aggregator.name} is of other parameters or replicas; call init "
                "again, or lbopt.aggregators.rebuilt_state for another number of replicas"
            )
            raise UserError("opt_state", reason=fix, code="mismatch")

        # The lists of `init_fn` become trees like the parameters again.
        state = state._replace(
            local=jax.tree.unflatten(jax.tree.structure(first.local), jax.tree.leaves(state.local))
        )
        seen = Extra(extra.get("second_moment"))

        def inside(rows, state, seen):
            return tuple(aggregator.update(rows, state, Group(num_replicas, axis), seen))

        if mesh is not None:
            rows = PartitionSpec(axis)
            whole = PartitionSpec()
            states = AggregatorState(rows, whole, whole)
            inside = jax.shard_map(
                inside,
                mesh=mesh,
                in_specs=(rows, states, whole),
                out_specs=(whole, states, whole),
                check_vma=False,
            )

        updates, new_state, aux = inside(grads, state, seen)
        return (updates, aux), new_state._replace(local=_in_lists(new_state.local))

    return _kind()(init_fn, update_fn)


def _in_lists(memory: Any) -> Any:
    """Return the replicas' state with a plain list of leaves for each tree like the parameters."""
    if not hasattr(memory, "_asdict"):
        return memory
    return memory._replace(
        **{name: jax.tree.leaves(kept) for name, kept in memory._asdict().items()}
    )


def _check_rows(grads: types.PyTree, params: types.Params | None, num_replicas: int) -> None:
    """Raise `UserError`, naming the parameter, unless the gradients are rows [replicas, ...].

    If the parameters are known, each row must have its parameter's shape.
    """
    if params is not None:
        tree.check_structure(grads, params, "gradients")
    likes = [None] * len(jax.tree.leaves(grads)) if params is None else jax.tree.leaves(params)
    for name, row, like in zip(tree.leaf_names(grads), jax.tree.leaves(grads), likes, strict=True):
        shape = jnp.shape(row)
        if shape[:1] != (num_replicas,) or (like is not None and shape[1:] != jnp.shape(like)):
            wanted = f"({num_replicas}, ...)" if like is None else (num_replicas, *jnp.shape(like))
            fix = f"its shape is {shape}; give the gradients of all replicas, {wanted}"
            raise UserError(f"gradients/{name}", reason=fix, code="type")


def _kind() -> Any:
    try:
        from optax.experimental import aggregating
    except ImportError:
        return optax.GradientTransformationExtraArgs
    return aggregating.Aggregator


def aggregate(
    aggregator: Aggregator,
    tx: optax.GradientTransformation,
    num_replicas: int,
    mesh: Mesh | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Put an aggregator before an optimizer: one transformation of gradients with a replica axis.

    It is `optax.experimental.aggregating.process` for lbopt's aggregators, without that module.

    Args:
      aggregator: Any aggregator, such as `lbopt.ef(...)` or `lbopt.aps(...)`.
      tx: Any Optax transformation.
      num_replicas: Length of the leading axis of the gradients.
      mesh: A one-axis mesh over which that axis is sharded; None for one device.

    Returns:
      A transformation. Its state is (aggregator's state, tx's state); its `update` takes gradients
      [replicas, *shape] and returns updates like the parameters.

    Raises:
      UserError: If the devices do not divide the replicas, or the aggregator and `tx` are
        incompatible (see `Aggregator.check_chain`).

    >>> import lbopt, jax, jax.numpy as jnp
    >>> tx = aggregate(plain_mean(), optax.sgd(0.5), num_replicas=2)
    >>> params = {"w": jnp.zeros(2)}
    >>> updates, _ = tx.update({"w": jnp.array([[1.0, 2.0], [3.0, 4.0]])}, tx.init(params), params)
    >>> print(updates["w"])
    [-1.  -1.5]
    """
    require_transformation("tx", tx)
    first = as_optax(aggregator, num_replicas, mesh)
    second = optax.with_extra_args_support(tx)

    def init_fn(params: types.Params) -> tuple[AggregatorState, Any]:
        aggregator.check_chain(jax.eval_shape(tx.init, params), params)
        return first.init(params), second.init(params)

    def update_fn(
        grads: types.PyTree,
        state: tuple[Any, Any],
        params: types.Params | None = None,
        **extra: Any,
    ) -> Any:
        if aggregator.needs_second_moment and extra.get("second_moment") is None:
            extra = {**extra, "second_moment": second_moment_of(state[1])}
        (updates, aux), aggregator_state = first.update(grads, state[0], params, **extra)

        # Only the aggregator takes it; an optimizer may refuse arguments that it does not know.
        extra.pop("second_moment", None)
        updates, opt_state = second.update(updates, state[1], params, **extra, **aux)
        return updates, (
            remembered_state(aggregator_state, state[0], opt_state, state[1]),
            opt_state,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def second_moment_of(opt_state: Any) -> types.PyTree:
    """Return the optimizer's `nu`.

    Raises:
      UserError: If there is none, or more than one.
    """
    try:
        found = optax.tree_utils.tree_get(opt_state, "nu")
    except KeyError as error:
        fix = "it has several second moments (nu); pass second_moment to update"
        raise UserError("opt_state", reason=fix, code="conflict") from error
    if found is None:
        fix = (
            "it has no second moment (nu); use adam, adamw, lamb or lans, or an aggregator without "
            "adam_b2"
        )
        raise UserError("opt_state", reason=fix, code="missing")
    return found
