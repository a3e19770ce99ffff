"""Reductions of the replicas' gradients to the gradient that updates the parameters."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lbopt import _scalars, tree, types
from lbopt.aggregators import Aggregator, require_aggregator
from lbopt.errors import require
from lbopt.parallel import _shards
from lbopt.parallel._aggregation import Aggregation
from lbopt.parallel._mesh import DATA_AXIS
from lbopt.parallel._state import TrainState


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """The mean over devices, by one all-reduce per step (per microstep with clip stage "mean").

    Each device's gradient, summed over its microsteps, is cast once; the sum is cast back and
    divided. The "jit" backend maps replicas for it.

    Attributes:
      dtype: Dtype of the sum, `jnp.float32` or `jnp.bfloat16`; None for the gradients' own.

    >>> import jax.numpy as jnp, lbopt, optax
    >>> def loss_fn(params, model_state, batch, rng):
    ...     return (batch["x"] @ params["w"]).mean(), (model_state, {})
    >>> in_bf16 = AllReduce(jnp.bfloat16)
    >>> step = lbopt.make_train_step(loss_fn, optax.sgd(0.1), lbopt.make_mesh(1), reduction=in_bf16)
    """

    dtype: Any = None

    def __post_init__(self) -> None:
        require_floating("reduction.dtype", self.dtype)


@dataclasses.dataclass(frozen=True)
class ReduceScatter:
    """The mean over devices, of which each device gets the shard that it updates.

    It implies a sharded update ("jit" only). Sums and the gathers of updated parameters run along
    one axis of the torus at a time.

    Attributes:
      dtype: Dtype of the sum; None for the gradients' own.

    >>> import jax.numpy as jnp, lbopt, optax
    >>> def loss_fn(params, model_state, batch, rng):
    ...     return (batch["x"] @ params["w"]).mean(), (model_state, {})
    >>> shares = ReduceScatter(jnp.float32)
    >>> step = lbopt.make_train_step(loss_fn, optax.sgd(0.1), lbopt.make_mesh(1), reduction=shares)
    """

    dtype: Any = None

    def __post_init__(self) -> None:
        require_floating("reduction.dtype", self.dtype)


@dataclasses.dataclass(frozen=True)
class Aggregate:
    """An aggregator in place of the mean over replicas.

    It gets the gradient of each replica, over all its microsteps and after a clip of stage
    "replica". Begin with `state = step.place(state)`, which adds the aggregator's state.

    Attributes:
      aggregator: `lbopt.agvm`, `aps`, `ef`, `ef21`, `econtrol`, `powersgd`.
      replicas_per_device: Number of replicas that each device runs sequentially, so that studies of
        many replicas run on few devices. Replica i has the i-th equal slice of the global batch and
        its own key: random samples of its loss are the same on any number of devices.
      over: "replicas"; "slices" (sums inside each slice first, then the aggregator between slices,
        each device for a shard of the gradient); or the number of neighbouring devices summed
        first.

    >>> import lbopt
    >>> from lbopt.aggregators import topk
    >>> reduction = Aggregate(lbopt.ef(topk(0.01)), replicas_per_device=4)
    >>> reduction.aggregator, reduction.over
    (ef(topk(0.01)), 'replicas')
    """

    aggregator: Aggregator
    replicas_per_device: int = 1
    over: str | int = "replicas"

    def __post_init__(self) -> None:
        require_aggregator("reduction.aggregator", self.aggregator)
        number = _scalars.known(self.replicas_per_device)
        counts = isinstance(number, numbers.Integral) and not isinstance(number, bool)
        field = "reduction.replicas_per_device"
        require(counts and number >= 1, field, number, "give a number >= 1")
        object.__setattr__(self, "replicas_per_device", number)


Reduction = AllReduce | ReduceScatter | Aggregate


def require_floating(field: str, dtype: Any) -> None:
    """Raise `UserError` unless it is None or a floating-point dtype."""
    try:
        good = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except (TypeError, ValueError):
        good = False
    fix = "give a floating-point dtype, jnp.bfloat16 for instance, or None"
    require(good, field, dtype, fix, code="type")


class Reduced(NamedTuple):
    """The outcome of a reduction.

    Attributes:
      grads: Gradient that updates the parameters, a pytree like them.
      aggregator_state: New state of the aggregator; () without one.
      extra: Keyword arguments for the optimizer's `update`.
    """

    grads: types.Params
    aggregator_state: Any = ()
    extra: Mapping[str, Any] = MappingProxyType({})


class Strategy(NamedTuple):
    """A reduction on the devices of a step, in two halves.

    Attributes:
      on_replica: Gradients of one replica -> that replica's output; within a mapped function, if
        replicas are mapped.
      combine: (outputs of the replicas, state before the step) -> `Reduced`.
      stays: Whether the outputs are rows [devices, ...] that stay on their devices.
      aggregation: The aggregator on the devices, if there is one.
    """

    on_replica: Callable[[types.Params], types.PyTree]
    combine: Callable[[types.PyTree, TrainState], Reduced]
    stays: bool = False
    aggregation: Aggregation | None = None


def choose(reduction: Reduction | None, mesh: Mesh, mapped: bool, pmapped: bool) -> Strategy:
    """Return the strategy of a step.

    Args:
      reduction: The step's option; None for an all-reduce if replicas are mapped, and otherwise for
        the compiler's reduction.
      mesh: Devices of the step.
      mapped: Whether replicas are mapped.
      pmapped: Whether "pmap" maps the whole step.
    """
    match reduction:
        case Aggregate(aggregator, replicas_per_device, over):
            return aggregated(
                Aggregation(aggregator, mesh, replicas_per_device, over, pmapped), pmapped
            )
        case ReduceScatter(dtype):

            def scattered(rows: types.PyTree, state: TrainState) -> Reduced:
                del state
                return Reduced(_shards.scatter_mean(mesh, rows, dtype))

            return Strategy(_as_rows, scattered, stays=True)
        case AllReduce(dtype):
            return Strategy(lambda grads: mean(DATA_AXIS, dtype, grads), _as_it_is)
        case None if mapped:
            return choose(AllReduce(), mesh, mapped, pmapped)
    return BY_COMPILER


def on_one_device(reduction: Reduction | None) -> Strategy:
    """Return the strategy of one device with the whole batch: only an aggregator has any effect."""
    if not isinstance(reduction, Aggregate):
        return BY_COMPILER
    number = reduction.replicas_per_device
    over = reduction.over
    return aggregated(Aggregation(reduction.aggregator, None, number, over))


def aggregated(aggregation: Aggregation, pmapped: bool = False) -> Strategy:
    """Return the strategy of an aggregator, which gets every replica's gradient."""

    def combine(rows: types.PyTree, state: TrainState) -> Reduced:
        return Reduced(*(aggregation.mapped if pmapped else aggregation)(rows, state))

    return Strategy(_all_of_it, combine, stays=True, aggregation=aggregation)


def mean(axis_name: str, dtype: Any, grads: types.Params) -> types.Params:
    """In a mapped function, sum over replicas and divide in fp32 or wider.

    Args:
      axis_name: Axis over which replicas are mapped.
      dtype: Dtype of the sum; complex numbers are summed as real and imaginary parts. None for the
        gradients' own.
      grads: Gradients of one replica.
    """
    if dtype is None:
        return jax.lax.pmean(grads, axis_name)
    count = jax.lax.axis_size(axis_name)

    def one(x: jax.Array) -> jax.Array:
        total = jax.lax.psum(x.astype(dtype), axis_name)
        return (total.astype(tree.wide_dtype(x.dtype)) / count).astype(x.dtype)

    return jax.tree.map(lambda x: tree.map_parts(one, x), grads)


def _as_rows(grads: types.Params) -> types.PyTree:
    return jax.tree.map(lambda x: x[None], grads)


def _as_it_is(grads: types.Params, state: TrainState) -> Reduced:
    del state
    return Reduced(grads)


def _all_of_it(grads: types.Params) -> types.Params:
    return grads


BY_COMPILER = Strategy(_all_of_it, _as_it_is)
"""The gradient of the global batch, which the compiler sums over the devices."""
