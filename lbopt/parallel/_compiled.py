"""A compiled step: it checks a call's arguments, lays them out over the mesh, and runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from lbopt import types
from lbopt.errors import UserError
from lbopt.parallel import _shards
from lbopt.parallel._aggregation import Aggregation
from lbopt.parallel._mesh import (
    batch_sharding,
    check_batch,
    check_divisible,
    place_batch,
    replicated_sharding,
)
from lbopt.parallel._options import StepOptions
from lbopt.parallel._rounds import LocalSteps
from lbopt.parallel._state import TrainState, apart


def _as_it_is(batch: types.Batch) -> types.Batch:
    return batch


class Step:
    """A compiled step: call it, or `lower` it for a look at the program.

    Args:
      compiled: The jitted or pmapped function.
      mesh: Devices that run it.
      options: Options of a training step; None for an evaluation step.
      aggregation: The aggregator, or the workers of `diloco`, on the devices; None for neither.
      arrange: Function from a global batch to the batch that `compiled` takes.

    >>> import jax, jax.numpy as jnp, lbopt
    >>> from lbopt.metrics import summed
    >>> def metric_fn(params, model_state, batch):
    ...     return {"x": summed(params * batch["x"])}
    >>> step = lbopt.make_eval_step(metric_fn, lbopt.make_mesh(1))
    >>> shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    >>> program = step.lower(1.0, {}, {"x": shape})  # no array is needed
    >>> "stablehlo.multiply" in program.as_text()
    True
    """

    def __init__(
        self,
        compiled: Any,
        mesh: Mesh,
        options: StepOptions | None = None,
        aggregation: Aggregation | LocalSteps | None = None,
        arrange: Callable[[types.Batch], types.Batch] = _as_it_is,
    ):
        self.mesh = mesh
        self.aggregation = aggregation
        self._compiled = compiled
        self._options = options or StepOptions()
        self._arrange = arrange
        self._batch_sharding = batch_sharding(mesh)
        self._last_batch: Any = None
        self._fits_aggregator = False
        self._placed_before = False

    def __call__(self, *arguments: Any) -> Any:
        """Run on (..., batch); the batch is the global one."""
        *rest, batch = self._prepare(arguments)
        return self._compiled(*self._on_mesh(rest), batch)

    def lower(self, *arguments: Any) -> Any:
        """Lower for these arguments (arrays or `jax.ShapeDtypeStruct`).

        A later call with arrays of these shapes reuses the trace.
        """
        *rest, batch = self._prepare(arguments)
        return self._compiled.lower(*rest, jax.tree.map(self._as_on_mesh, batch))

    def _as_on_mesh(self, leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._batch_sharding)
        return leaf

    @property
    def exchanges(self) -> tuple[int, int]:
        """Number of fragments of `diloco`, and of the steps in which each is exchanged once.

        (0, 1) without local steps.
        """
        workers = self.aggregation
        if not isinstance(workers, LocalSteps):
            return 0, 1
        return workers.tx.num_fragments, workers.tx.every

    def state_sharding(self, state: TrainState) -> TrainState:
        """Return the sharding of each array of a training state, or of its shapes."""
        return state_sharding(self.mesh, state, self._options.sharded, self.aggregation)

    def with_aggregator_state(self, state: TrainState) -> TrainState:
        """Return the state with the aggregator's first state, if there is an aggregator; pure.

        Raises:
          UserError: If the aggregator does not fit the parameters, the optimizer or the number of
            replicas.
        """
        if self.aggregation is None:
            return state
        state = state.replace(aggregator_state=self.aggregation.first_state(state))
        self.aggregation.check(state)
        self.aggregation.warn(state.params)
        return state

    def place(self, state: TrainState) -> TrainState:
        """Return a fresh state, from `TrainState.create`, as this step takes it.

        It gets the aggregator's state and is laid out over the devices.

        Raises:
          UserError: If the aggregator does not fit the parameters, the optimizer or the number of
            replicas.
        """
        state = apart(self.with_aggregator_state(state))
        return jax.device_put(state, self.state_sharding(state))

    def _prepare(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Check the arguments and arrange the batch; this runs before every step."""
        *rest, batch = arguments
        self._check_state(rest)
        if self.aggregation is not None and not self._fits_aggregator:
            self.aggregation.check(rest[0])
            self._fits_aggregator = True

        # A batch is checked only if its shapes or dtypes are not those of the last one.
        kinds = [
            (getattr(leaf, "shape", None), getattr(leaf, "dtype", None))
            for leaf in jax.tree.leaves(batch)
        ]
        if kinds != self._last_batch:
            size = check_batch(batch)
            options = self._options
            num_replicas = self.mesh.size * options.replicas_per_device
            check_divisible(size, num_replicas, options.num_microsteps)
            self._last_batch = kinds
        return (*rest, self._split_batch(self._arrange(batch)))

    def _check_state(self, rest: list[Any]) -> None:
        # An evaluation step has two arguments before the batch, params and model_state.
        if len(rest) == 1 and not isinstance(rest[0], TrainState):
            reason = f"it is a {type(rest[0]).__name__}; give a lbopt.TrainState, or restore a "
            reason += "checkpoint with one, or its jax.eval_shape, as the target"
            raise UserError("state", reason=reason, code="type")
        for state in rest:
            if isinstance(state, TrainState) and _is_deleted(state.step):
                reason = (
                    "an earlier step took its arrays; give the state that step returned, or use "
                )
                reason += "make_train_step(donate=False)"
                raise UserError("state", reason=reason, code="conflict")

    def _on_mesh(self, arguments: list[Any]) -> list[Any]:
        """Place arrays that are not on the mesh, and copy arrays that a state holds twice.

        An unplaced state would compile the step twice: an array's type names its mesh, and the next
        call brings the arrays that this call returned.
        """
        arrays = jax.tree.leaves(arguments)
        distinct = len({id(array) for array in arrays}) == len(arrays)
        if self._placed_before and distinct and all(map(self._lies_here, arrays)):
            return arguments

        arguments = [apart(a) if isinstance(a, TrainState) else a for a in arguments]
        whole = replicated_sharding(self.mesh)
        places = [self.state_sharding(a) if isinstance(a, TrainState) else whole for a in arguments]
        arguments = jax.tree.map(self._put, arguments, jax.tree.broadcast(places, arguments))
        if not self._placed_before:
            for argument, place in zip(arguments, places, strict=True):
                _shards.check_placed(argument, jax.tree.broadcast(place, argument))
            self._placed_before = True
        return arguments

    def _put(self, leaf: Any, where: NamedSharding) -> Any:
        if isinstance(leaf, bool | int | float | complex | np.generic):
            leaf = np.asarray(leaf, jax.dtypes.canonicalize_dtype(np.result_type(leaf)))
        return jax.device_put(leaf, where) if self._may_put(leaf, where) else leaf

    def _lies_here(self, leaf: Any) -> bool:
        # Equal meshes are one object.
        return getattr(getattr(leaf, "sharding", None), "mesh", None) is self.mesh

    def _may_put(self, leaf: Any, where: NamedSharding) -> bool:
        """Return whether an array may be moved: the caller has not placed it on purpose."""
        if isinstance(leaf, np.ndarray):
            return True
        if not _is_concrete(leaf) or self._lies_here(leaf):
            return False
        chosen = leaf.committed and self._options.sharded
        return not chosen or where.is_equivalent_to(leaf.sharding, leaf.ndim)

    def _split_batch(self, batch: types.Batch) -> types.Batch:
        """Place a batch that is not on the mesh yet, so that its arrays have the same types."""
        arrays = jax.tree.leaves(batch)
        there = all(getattr(x, "sharding", None) == self._batch_sharding for x in arrays)
        if there or jax.process_count() > 1:
            return batch
        concrete = all(isinstance(x, np.ndarray) or _is_concrete(x) for x in arrays)
        return place_batch(self.mesh, batch) if concrete else batch


def _is_concrete(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def _is_deleted(x: Any) -> bool:
    return _is_concrete(x) and x.is_deleted()


def state_sharding(
    mesh: Mesh, state: TrainState, shard_update: bool, aggregation: Aggregation | LocalSteps | None
) -> TrainState:
    """Return the sharding of each array of a training state, or of its shapes."""
    where = _shards.state_sharding(mesh, state, shard_update)
    if aggregation is None:
        return where
    return where.replace(aggregator_state=aggregation.sharding(state.aggregator_state))


class OnceShapesAreKnown:
    """A jitted step whose shardings depend on the state's shapes, which the first call brings.

    Args:
      make: Function from the shardings of a state to the jitted step.
      sharding: Function from a state to its shardings.
    """

    def __init__(
        self, make: Callable[[TrainState], Any], sharding: Callable[[TrainState], TrainState]
    ):
        self._make = make
        self._sharding = sharding
        self._made: Any = None
        self._checked = False

    def __call__(self, state: TrainState, batch: types.Batch) -> Any:
        if not self._checked:
            _shards.check_placed(state, self._sharding(state))
            self._checked = True
        return self._step_for(state)(state, batch)

    def lower(self, state: TrainState, batch: types.Batch) -> Any:
        """Lower for a state and a batch (arrays or `jax.ShapeDtypeStruct`)."""
        _shards.check_placed(state, self._sharding(state))
        return self._step_for(state).lower(state, batch)

    def _step_for(self, state: TrainState) -> Any:
        if self._made is None:
            self._made = self._make(self._sharding(state))
        return self._made
