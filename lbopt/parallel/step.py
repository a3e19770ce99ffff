"""The training step and the evaluation step: one function each, run by `jit` or by `pmap`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lbopt import replicas, scalars, types
from lbopt.aggregators import protocol
from lbopt.aggregators.protocol import Aggregated, Aggregator, AggregatorState
from lbopt.errors import UserError, require, require_choice
from lbopt.parallel import accumulate, clip as clips, loss_form, reduction, shards
from lbopt.parallel.aggregation import Aggregation, make_aggregation
from lbopt.parallel.clip import GradientClip
from lbopt.parallel.mesh import (
    DATA_AXIS,
    check_batch,
    check_divisible,
    check_mesh,
    replicated,
    sharded,
    torus_grid,
)
from lbopt.parallel.state import TrainState, apart, require_tx

Backend = Literal["jit", "pjit", "pmap"]
BACKENDS = ("jit", "pjit", "pmap")
StepFn = Callable[[TrainState, types.Batch], tuple[TrainState, types.Metrics]]
Aggregate = Callable[[types.PyTree, TrainState], Aggregated]
"""(gradients [replicas, ...], state) -> what stands for their mean."""


def step_fn(
    loss_fn: types.LossFn,
    tx: optax.GradientTransformation,
    num_microsteps: int = 1,
    compute_dtype: Any = None,
    axis_name: str | None = None,
    clip: GradientClip | None = None,
    measure_noise: bool = False,
    key_per_replica: bool = True,
    aggregation: Aggregation | None = None,
) -> StepFn:
    """Return the training step as a pure function: gradients, mean over replicas, update.

    The sweep lowers this one; `make_train_step` puts the same two halves together, mapped over replicas or sharded where asked.

    Args:
      loss_fn: see `lbopt.types.LossFn`.
      tx: any Optax transformation.
      num_microsteps: see `make_gradient_fn`.
      compute_dtype: see `make_gradient_fn`.
      axis_name: the mapped axis over which each call sees one part of the batch; None if it sees all of it.
      clip: see `make_train_step`.
      measure_noise: see `make_train_step`.
      key_per_replica: see `make_train_step`.
      aggregation: of replicas that are parts of the batch, visited one after another; only without an axis.
    """
    options = num_microsteps, compute_dtype, axis_name, clip, measure_noise, key_per_replica
    gradients = _gradients(loss_fn, *options, rows=0 if aggregation is None else aggregation.rows)
    return _whole(gradients, _update(tx, clip), aggregation)


def _whole(
    gradients: Callable[..., Any], update: Callable[..., Any], aggregate: Aggregate | None = None
) -> StepFn:
    """Join the parts of a step; the first does not see the optimizer's state."""

    def step(state: TrainState, batch: types.Batch) -> tuple[TrainState, types.Metrics]:
        found = gradients(state.replace(opt_state=(), aggregator_state=()), batch)
        if aggregate is None:
            return update(state, *found)
        with jax.named_scope(replicas.GRADIENTS):
            one = aggregate(found[0], state)
        new, metrics = update(state, one.updates, *found[1:], one.aux)
        kept = protocol.remembered(
            one.state, state.aggregator_state, new.opt_state, state.opt_state
        )
        return new.replace(aggregator_state=kept), metrics

    return step


def _gradients(
    loss_fn: types.LossFn,
    num_microsteps: int,
    compute_dtype: Any,
    axis_name: str | None,
    clip: GradientClip | None,
    measure_noise: bool,
    key_per_replica: bool,
    reduce_dtype: Any = None,
    scatter: bool = False,
    rows: int = 0,
) -> Callable[[TrainState, types.Batch], tuple[types.Params, types.ModelState, types.Metrics]]:
    """Return (state, batch) -> (mean gradients, new model state, metrics), the same on all replicas.

    With `scatter` each mapped replica leaves its gradients in a row of its own, for `shards.scatter_mean`; with `rows` in so many, each of an
    equal part of its examples, for an aggregator.
    """
    alone = (axis_name is None and rows <= 1) or (clip is not None and clip.stage == "mean")
    if measure_noise and alone and num_microsteps == 1:
        raise UserError("measure_noise = True: the batch is one part; use num_microsteps >= 2")
    hook = clips.make_microstep_hook(clip, measure_noise, axis_name, reduce_dtype)
    already = (
        clip is not None and clip.stage == "mean"
    )  # then the hook took the mean of each microstep
    gradient_fn = accumulate.make_gradient_fn(loss_fn, num_microsteps, compute_dtype, hook)
    if rows:
        gradient_fn = accumulate.by_rows(gradient_fn, rows, axis_name)

    def gradients(state: TrainState, batch: types.Batch):
        key = state.step_key()
        if axis_name is not None and key_per_replica and not rows:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
        grads, model_state, metrics = gradient_fn(state.params, state.model_state, batch, key)
        if axis_name is not None:
            with jax.named_scope(replicas.GRADIENTS):
                if rows:
                    pass  # the aggregator sees every one of them
                elif scatter:
                    grads = reduction.stacked(grads)
                elif not already:
                    grads = reduction.mean(axis_name, reduce_dtype, grads)
            with jax.named_scope(replicas.STATE):
                model_state = reduction.state(axis_name, model_state)
            with jax.named_scope(replicas.METRICS):
                metrics = jax.lax.psum(metrics, axis_name)
        return grads, model_state, metrics

    return gradients


def _scattering(gradients: Callable[..., Any], mesh: Mesh, dtype: Any) -> Callable[..., Any]:
    """Give each device the mean of the part that it updates, of gradients [devices, ...] that lie with their devices."""

    def scattered(state: TrainState, batch: types.Batch):
        grads, model_state, metrics = gradients(state, batch)
        with jax.named_scope(replicas.GRADIENTS):
            return shards.scatter_mean(mesh, grads, dtype), model_state, metrics

    return scattered


def _update(
    tx: optax.GradientTransformation,
    clip: GradientClip | None,
    sharded_over: Mesh | None = None,
    along_axes: bool = False,
):
    """Return (state, gradients, new model state, metrics) -> (new state, metrics); see `lbopt.parallel.shards` for a mesh."""
    transform = optax.with_extra_args_support(tx)

    def split(tree: types.PyTree) -> types.PyTree:
        return tree if sharded_over is None else shards.split(sharded_over, tree)

    def gather(tree: types.PyTree) -> types.PyTree:
        return tree if sharded_over is None else shards.gather(sharded_over, tree, along_axes)

    def update(
        state: TrainState,
        grads: types.Params,
        model_state: types.ModelState,
        metrics: types.Metrics,
        aux: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[TrainState, types.Metrics]:
        grads, params = split((grads, state.params))
        metrics, extra = clips.taken_noise(metrics)
        if clip is not None and clip.stage == "accumulated":
            grads, of_gradient = clips.clipped(grads, clip)
            metrics = {**metrics, **of_gradient}
        with jax.named_scope(replicas.UPDATE):
            updates, opt_state = transform.update(grads, state.opt_state, params, **extra, **aux)
            params = split(optax.apply_updates(params, updates))
        with jax.named_scope(replicas.PARAMETERS):
            params = gather(params)
        return state.replace(
            step=state.step + 1, params=params, model_state=model_state, opt_state=opt_state
        ), metrics

    return update


class Step:
    """A compiled step: call it, or `lower` it for a look at the program.

    Attributes:
      mesh: the devices it runs on.
      aggregation: what stands for the mean of the replicas' gradients; None for the mean itself.
    """

    def __init__(
        self,
        compiled: Any,
        mesh: Mesh,
        num_microsteps: int,
        arrange: Callable[[types.Batch], types.Batch],
        shard_update: bool = False,
        aggregation: Aggregation | None = None,
    ):
        self._compiled, self.mesh, self._shard_update = compiled, mesh, shard_update
        self._num_microsteps, self._arrange = num_microsteps, arrange
        self.aggregation = aggregation
        self._parts = sharded(mesh)
        self._last_seen: Any = None
        self._checked = self._looked = False

    def __call__(self, *arguments: Any) -> Any:
        """Run on (..., batch); the batch is the global one."""
        *rest, batch = self._prepare(arguments)
        return self._compiled(*self._on_mesh(rest), batch)

    def lower(self, *arguments: Any) -> Any:
        """Lower for these arguments (arrays or `jax.ShapeDtypeStruct`)."""
        return self._compiled.lower(*self._prepare(arguments))

    def state_sharding(self, state: TrainState) -> TrainState:
        """Return where each array of a training state (or of its shapes) must lie: give it to `jax.device_put`."""
        return _state_sharding(self.mesh, state, self._shard_update, self.aggregation)

    def with_aggregator_state(self, state: TrainState) -> TrainState:
        """Return the state with the aggregator's first one in it, if the step has an aggregator; a pure function.

        Raises:
          UserError: if the aggregator does not go with the parameters, the optimizer or the number of replicas.
        """
        if self.aggregation is None:
            return state
        state = state.replace(aggregator_state=self.aggregation.init(state.params))
        self.aggregation.check(state)
        self.aggregation.warn(state.params)
        return state

    def place(self, state: TrainState) -> TrainState:
        """Return a fresh state as this step takes it: with the aggregator's state, laid out over the devices.

        Args:
          state: from `TrainState.create`.

        Raises:
          UserError: see `with_aggregator_state`.
        """
        state = apart(self.with_aggregator_state(state))
        return jax.device_put(state, self.state_sharding(state))

    def _on_mesh(self, arguments: list[Any]) -> list[Any]:
        """Lay out what does not lie on the mesh, like a state that nobody placed, and copy what is in a state twice.

        An array's type names its mesh: the next call, with what this one returns, would compile the step a second time.
        """
        leaves = jax.tree.leaves(arguments)
        if (
            self._looked
            and all(map(self._lies_here, leaves))
            and len(set(map(id, leaves))) == len(leaves)
        ):
            return arguments
        arguments = [apart(a) if isinstance(a, TrainState) else a for a in arguments]

        def put(leaf: Any, where: Any) -> Any:
            if isinstance(leaf, bool | int | float | complex | np.generic):
                leaf = np.asarray(leaf, jax.dtypes.canonicalize_dtype(np.result_type(leaf)))
            return jax.device_put(leaf, where) if self._may_put(leaf, where) else leaf

        states = [
            self.state_sharding(a) if isinstance(a, TrainState) else replicated(self.mesh)
            for a in arguments
        ]
        arguments = jax.tree.map(put, arguments, jax.tree.broadcast(states, arguments))
        if not self._looked:
            for argument, where in zip(arguments, states, strict=True):
                shards.check_placed(argument, jax.tree.broadcast(where, argument))
            self._looked = True
        return arguments

    def _lies_here(self, leaf: Any) -> bool:
        return (
            getattr(getattr(leaf, "sharding", None), "mesh", None) is self.mesh
        )  # meshes are interned

    def _may_put(self, leaf: Any, where: NamedSharding) -> bool:
        """Return whether nobody chose another place for an array."""
        if isinstance(leaf, np.ndarray):
            return True
        if (
            not isinstance(leaf, jax.Array)
            or isinstance(leaf, jax.core.Tracer)
            or self._lies_here(leaf)
        ):
            return False
        return (
            not leaf.committed
            or not self._shard_update
            or where.is_equivalent_to(leaf.sharding, leaf.ndim)
        )

    def _prepare(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        *rest, batch = arguments
        if len(rest) == 1 and not isinstance(
            rest[0], TrainState
        ):  # evaluation has two: params and model_state
            fix = "give a lbopt.TrainState; restore a checkpoint with one, or its jax.eval_shape, as the target"
            raise UserError(f"state = a {type(rest[0]).__name__}: {fix}")
        for state in rest:
            if isinstance(state, TrainState) and _is_deleted(state.step):
                raise UserError(
                    "state: an earlier step took its arrays; give the state that step returned, or use make_train_step(donate=False)"
                )
        if self.aggregation is not None and not self._checked:
            self.aggregation.check(rest[0])
            self._checked = True
        seen = [
            (getattr(leaf, "shape", None), getattr(leaf, "dtype", None))
            for leaf in jax.tree.leaves(batch)
        ]
        if seen != self._last_seen:  # checked once per kind of batch: this runs before every step
            size = check_batch(batch)
            rows = 1 if self.aggregation is None else self.aggregation.rows
            check_divisible(size, self.mesh, self._num_microsteps, rows)
            self._last_seen = seen
        return (*rest, self._in_parts(self._arrange(batch)))

    def _in_parts(self, batch: types.Batch) -> types.Batch:
        """Lay out a batch of which an array does not lie so on the mesh: its type would be another one, as of a state's arrays."""
        leaves = jax.tree.leaves(batch)
        if (
            all(getattr(leaf, "sharding", None) == self._parts for leaf in leaves)
            or jax.process_count() > 1
        ):
            return batch
        arrays = all(
            isinstance(leaf, np.ndarray | jax.Array) and not isinstance(leaf, jax.core.Tracer)
            for leaf in leaves
        )
        return jax.device_put(batch, self._parts) if arrays else batch


def _is_deleted(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()


def make_train_step(
    loss_fn: types.LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    backend: Backend = "jit",
    num_microsteps: int = 1,
    compute_dtype: Any = None,
    donate: bool = True,
    max_grad_norm: float | None = None,
    clip_stage: str = "accumulated",
    measure_noise: bool = False,
    key_per_replica: bool = True,
    shard_update: bool = False,
    reduce_dtype: Any = None,
    reduce_scatter: bool = False,
    aggregator: Aggregator | None = None,
    replicas_per_device: int = 1,
    aggregate_over: str | int = "replicas",
) -> Step:
    """Build `step(state, global_batch) -> (state, metrics)`, data-parallel over the mesh.

    Args:
      loss_fn: (params, model_state, batch, rng) -> (mean loss, (new model_state, metrics)). Under "jit" it sees the
        global batch, under "pmap" one replica's part.
      tx: any Optax transformation. Of complex parameters it gets the conjugate of `jax.grad`'s gradient, against which the loss falls.
      mesh: from `make_mesh`, or your own with an axis `data`. Under plain "jit" it may have other axes, for sharding within the
        loss; where replicas are mapped or the update is sharded it has no other.
      backend: "jit" ("pjit" is the same) lets the compiler place the gradient reduction; "pmap" maps replicas and
        reduces explicitly.
      num_microsteps: accumulate the gradient over so many parts of the batch, which count alike: the loss is a mean over
        examples, not over tokens counted in the batch; see `make_gradient_fn`.
      compute_dtype: cast floating parameters and inputs to this (say `jnp.bfloat16`) for the loss; None for models
        that choose for themselves. Gradients come back in the parameters' dtype; under "pmap" they are reduced in it,
        under "jit" the compiler places the reduction and may do it before that cast. Parameters, accumulators and optimizer state keep their own dtype.
      donate: reuse the old state's buffers; the state passed in must not be used again.
      max_grad_norm: clip the global norm of gradients to this; None for no clipping by the step (the optimizer may have a
        clip of its own, which sees what comes out of here). The norm before the clip is the metric
        `gradient_norm/<stage>`, averaged over what is clipped.
      clip_stage: "replica" (each replica's gradient of each microstep, before the mean over replicas), "mean" (each
        microstep's gradient, after it) or "accumulated" (the step's gradient, after accumulation). With "replica" the
        "jit" backend maps replicas as "pmap" does.
      measure_noise: hand the squared norms of the parts' gradients (microsteps, and replicas where they are mapped) to the
        optimizer, for `lbopt.track_noise_scale`. Without microsteps the "jit" backend maps replicas for it.
      key_per_replica: give each mapped replica a key of its own, so that a loss that draws for the examples it sees does
        not draw the same on all of them. False for losses that draw per example from one key for all replicas, as
        lbopt's models do: then the draws depend on neither backend nor number of devices.
      shard_update: split the optimizer's state and work over the devices, each of which updates its part of the parameters
        ("jit" only; see `lbopt.parallel.shards`). Place the first state with
        `jax.device_put(state, step.state_sharding(state))`; all states of one step have the same shapes.
      reduce_dtype: sum gradients over devices in this (`jnp.float32` or `jnp.bfloat16`): each device's gradient, over all
        its microsteps, is cast to it once, the sum is cast back and divided. The "jit" backend then maps replicas, so that
        there is one reduction a step (one a microstep with `clip_stage` "mean"), of what the program says. None to leave it
        to the backend (see `compute_dtype`).
      reduce_scatter: with `shard_update`: send each device only the sums that it updates, and gather parameters, along one
        axis of the torus at a time (see `lbopt.parallel.shards`).
      aggregator: what makes one update of the gradients of replicas: `lbopt.agvm`, `aps`, `ef`, `ef21`, `econtrol`, `powersgd`; None for
        their mean. It gets the gradient of each replica, over all its microsteps and after a clip of stage "replica". Begin with
        `state = step.place(state)`, which adds what it remembers. The "jit" backend then maps replicas as "pmap" does.
      replicas_per_device: with an aggregator: let each device be so many replicas, one after another, so that studies of many
        replicas run on few devices. Replica i has the i-th equal part of the global batch and a key of its own, by its number, whatever
        `key_per_replica` says: what its loss draws is the same on any number of devices.
      aggregate_over: with an aggregator: "replicas"; "slices" (sums inside each slice first, then the aggregator between slices, a
        part of the gradient per device); or a number: so many neighbouring devices are summed first.

    Returns:
      A `Step`. Its batch may be host arrays or arrays on the mesh, [global batch, ...]; its state is replicated under
      both backends (but for the optimizer's, with `shard_update`), its metrics are sums over the global batch. A state that
      does not lie on the mesh yet is laid out there. Floating
      leaves of the model's state are averaged over replicas and microsteps; leaves without a mean (integers, bools, random
      keys) are those of the first replica after its last microstep. All keep their dtypes. The
      backends agree up to rounding, except that with `key_per_replica` random draws of the loss are per global batch
      under "jit" and per replica under "pmap".

    Raises:
      UserError: for an unknown backend, an argument of another type, or `shard_update` under "pmap"; or when called with
        a batch that does not split evenly, with a `loss_fn` that returns something else (see `lbopt.types.LossFn`), or,
        with `shard_update`, with a state that lies elsewhere.
    """
    require_choice("backend", backend, BACKENDS)
    num_microsteps, replicas_per_device = map(scalars.known, (num_microsteps, replicas_per_device))
    counts = isinstance(num_microsteps, int) and not isinstance(num_microsteps, bool)
    require(counts and num_microsteps >= 1, "num_microsteps", num_microsteps, "give a number >= 1")
    require(
        callable(loss_fn), "loss_fn", loss_fn, "give a function (params, model_state, batch, rng)"
    )
    require_tx(tx)
    known = aggregator is None or isinstance(aggregator, Aggregator)
    require(
        known,
        "aggregator",
        aggregator,
        "give one of lbopt.aggregators, lbopt.aps() for instance, or None",
    )
    _require_float("compute_dtype", compute_dtype)
    _require_float("reduce_dtype", reduce_dtype)
    flags = {
        "measure_noise": measure_noise,
        "shard_update": shard_update,
        "reduce_scatter": reduce_scatter,
    }
    for field, value in {**flags, "donate": donate, "key_per_replica": key_per_replica}.items():
        is_flag = isinstance(value, bool | np.bool_ | int) and value in (0, 1)
        require(is_flag, field, value, "give True or False")
    clip = None if max_grad_norm is None else GradientClip(max_grad_norm, clip_stage)
    fix = "nothing is clipped; give max_grad_norm too, or leave it out"
    require(
        clip is not None or clip_stage in ("accumulated", "none"), "clip_stage", clip_stage, fix
    )
    if measure_noise and num_microsteps * replicas_per_device * mesh.size == 1:
        raise UserError(
            "measure_noise = True: one replica and one microstep make one gradient; use num_microsteps >= 2"
        )
    require(
        not shard_update or backend != "pmap",
        "shard_update",
        shard_update,
        "under pmap every replica holds the whole state; use backend='jit'",
    )
    fix = "sums are scattered to those who update a part; set shard_update=True"
    require(shard_update or not reduce_scatter, "reduce_scatter", reduce_scatter, fix)
    fix = "a clip of the mean needs all of it; use clip_stage='accumulated' or 'replica'"
    require(
        not reduce_scatter or clip is None or clip.stage != "mean",
        "reduce_scatter",
        reduce_scatter,
        fix,
    )
    asked = aggregator is not None or reduce_dtype is not None or reduce_scatter
    by_replica = (
        (clip is not None and clip.stage == "replica")
        or (measure_noise and num_microsteps == 1)
        or asked
    )
    check_mesh(mesh, by_replica or shard_update or backend == "pmap", backend != "pmap")
    aggregation = make_aggregation(
        aggregator,
        mesh,
        replicas_per_device,
        aggregate_over,
        backend,
        clip,
        reduce_dtype,
        reduce_scatter,
        shard_update,
    )
    gradients = _gradients(
        loss_fn,
        num_microsteps,
        compute_dtype,
        DATA_AXIS if backend == "pmap" or by_replica else None,
        clip,
        measure_noise,
        key_per_replica,
        reduce_dtype,
        reduce_scatter,
        0 if aggregation is None else replicas_per_device,
    )
    donated = (0,) if donate else ()
    if backend == "pmap":
        whole = _whole(gradients, _update(tx, clip), aggregation and aggregation.mapped)
        return Step(
            _pmapped(whole, mesh, aggregation, donated),
            mesh,
            num_microsteps,
            _by_replica(mesh),
            False,
            aggregation,
        )
    if by_replica:
        gradients = _mapped(gradients, mesh, reduce_scatter, aggregation is not None)
    if reduce_scatter:
        gradients = _scattering(gradients, mesh, reduce_dtype)
    update = _update(tx, clip, mesh if shard_update else None, reduce_scatter)
    step = _stating(_whole(gradients, update, aggregation), mesh, None)

    def compiled(state_sharding):
        return jax.jit(
            step,
            in_shardings=(state_sharding, sharded(mesh)),
            out_shardings=(state_sharding, replicated(mesh)),
            donate_argnums=donated,
        )

    if not shard_update and aggregation is None:
        return Step(compiled(replicated(mesh)), mesh, num_microsteps, _as_it_is)
    by_shapes = _OnceShapesAreKnown(
        compiled, lambda state: _state_sharding(mesh, state, shard_update, aggregation)
    )
    return Step(by_shapes, mesh, num_microsteps, _as_it_is, shard_update, aggregation)


def _require_float(field: str, dtype: Any) -> None:
    """Raise `UserError` unless it is None or a floating-point dtype."""
    try:
        good = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except (TypeError, ValueError):
        good = False
    require(good, field, dtype, "give a floating-point dtype, jnp.bfloat16 for instance, or None")


def _pmapped(
    step: StepFn, mesh: Mesh, aggregation: Aggregation | None, donated: tuple[int, ...]
) -> Any:
    """Map a step over replicas; what the aggregator remembers of each lies with it."""
    axes = None if aggregation is None else _BY_REPLICA
    return jax.pmap(
        _stating(step, mesh, DATA_AXIS, own_keys=aggregation is not None),
        DATA_AXIS,
        in_axes=(axes, 0),
        out_axes=None if axes is None else (axes, None),
        devices=list(mesh.devices.flat),
        donate_argnums=donated,
    )


def _mapped(
    gradients: Callable[..., Any], mesh: Mesh, scattered: bool, aggregated: bool
) -> Callable[..., Any]:
    """Take gradients replica by replica under "jit"; those that are scattered or aggregated stay with their devices.

    Unchecked, as in pmap: batch norm over groups of replicas needs axis_index_groups.
    """
    whole, parts = PartitionSpec(), PartitionSpec(DATA_AXIS)
    out = (parts if scattered or aggregated else whole, whole, whole)
    gradients = _stating(gradients, mesh, DATA_AXIS, own_keys=aggregated)
    return jax.shard_map(
        gradients, mesh=mesh, in_specs=(whole, parts), out_specs=out, check_vma=False
    )


_BY_REPLICA: Any = TrainState(None, None, None, None, None, AggregatorState(0, None, None))
"""Which arrays of a state have an axis of replicas, under "pmap"."""


def _state_sharding(
    mesh: Mesh, state: TrainState, shard_update: bool, aggregation: Aggregation | None
) -> TrainState:
    where = shards.state_sharding(mesh, state, shard_update)
    if aggregation is None:
        return where
    return where.replace(aggregator_state=aggregation.sharding(state.aggregator_state))


class _OnceShapesAreKnown:
    """A jitted step whose shardings depend on the shapes of the state, which the first call shows."""

    def __init__(
        self, make: Callable[[TrainState], Any], sharding: Callable[[TrainState], TrainState]
    ):
        self._make, self._sharding, self._made, self._checked = make, sharding, None, False

    def __call__(self, state: TrainState, batch: types.Batch) -> Any:
        if not self._checked:
            shards.check_placed(state, self._sharding(state))
            self._checked = True
        return self._of(state)(state, batch)

    def lower(self, state: TrainState, batch: types.Batch) -> Any:
        shards.check_placed(state, self._sharding(state))
        return self._of(state).lower(state, batch)

    def _of(self, state: TrainState) -> Any:
        if self._made is None:
            self._made = self._make(self._sharding(state))
        return self._made


def make_eval_step(metric_fn: types.MetricFn, mesh: Mesh, backend: Backend = "jit") -> Step:
    """Build `step(params, model_state, global_batch) -> metrics`, summed over all devices.

    Args:
      metric_fn: (params, model_state, batch) -> metrics, leaving out examples whose `batch["mask"]` is False.
      mesh: from `make_mesh`.
      backend: as in `make_train_step`.

    Returns:
      A `Step` whose metrics are sums over the unmasked examples of the global batch.

    Raises:
      UserError: as `make_train_step`.
    """
    require_choice("backend", backend, BACKENDS)
    require(
        callable(metric_fn), "metric_fn", metric_fn, "give a function (params, model_state, batch)"
    )
    check_mesh(mesh, backend == "pmap", backend != "pmap")
    if backend == "pmap":

        def summed(params, model_state, given):
            metrics = loss_form.checked_metrics(
                metric_fn(params, model_state, given["batch"]), "metric_fn"
            )
            return jax.lax.psum(metrics, DATA_AXIS)

        step = _stating(summed, mesh, DATA_AXIS)
        # Of three numbers and Nones jax 0.10.2 takes one for each leaf where there are three leaves.
        axes, split = (None, None, {"batch": 0}), _by_replica(mesh)
        mapped = jax.pmap(
            step, DATA_AXIS, in_axes=axes, out_axes=None, devices=list(mesh.devices.flat)
        )
        return Step(mapped, mesh, 1, lambda batch: {"batch": split(batch)})
    inputs = (replicated(mesh), replicated(mesh), sharded(mesh))
    compiled = jax.jit(
        _stating(metric_fn, mesh, None), in_shardings=inputs, out_shardings=replicated(mesh)
    )
    return Step(compiled, mesh, 1, _as_it_is)


def _stating(
    fn: Callable[..., Any], mesh: Mesh, axis_name: str | None, own_keys: bool = False
) -> Callable[..., Any]:
    """Tell the traced function how many replicas there are (see `lbopt.replicas`)."""

    def traced(*arguments):
        with replicas.tracing_for(mesh.shape[DATA_AXIS], axis_name, torus_grid(mesh), own_keys):
            return fn(*arguments)

    return traced


def _as_it_is(batch: types.Batch) -> types.Batch:
    return batch


def _by_replica(mesh: Mesh) -> Callable[[types.Batch], types.Batch]:
    def split(x: Any) -> Any:
        shape = (mesh.size, x.shape[0] // mesh.size, *x.shape[1:])
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, x.dtype)
        return (np.asarray(x) if isinstance(x, np.ndarray) else x).reshape(shape)

    return lambda batch: jax.tree.map(split, batch)
