"""Training and evaluation steps over a mesh, run by `jit` or by `pmap`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from lbopt import replicas, types
from lbopt.aggregators import Aggregator, AggregatorState
from lbopt.errors import require, require_choice
from lbopt.parallel import _loss_form, _reduction, _shards
from lbopt.parallel._aggregation import Aggregation
from lbopt.parallel._clip import GradientClip
from lbopt.parallel._compiled import OnceShapesAreKnown, Step, state_sharding
from lbopt.parallel._diloco import Diloco
from lbopt.parallel._gradients import GradientFn, Gradients
from lbopt.parallel._mesh import (
    DATA_AXIS,
    batch_sharding,
    check_mesh,
    replicated_sharding,
    torus_grid,
)
from lbopt.parallel._options import BACKENDS, Backend, StepOptions
from lbopt.parallel._reduction import ReduceScatter, Reduction, Strategy
from lbopt.parallel._rounds import LocalSteps
from lbopt.parallel._state import TrainState
from lbopt.parallel._step import StepFn, make_gradients, make_step_fn
from lbopt.transforms import require_transformation


def make_train_step(
    loss_fn: types.LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    backend: Backend = StepOptions.backend,
    *,
    num_microsteps: int = StepOptions.num_microsteps,
    compute_dtype: Any = StepOptions.compute_dtype,
    clip: GradientClip | None = StepOptions.clip,
    reduction: Reduction | Aggregator | None = StepOptions.reduction,
    shard_update: bool = StepOptions.shard_update,
    measure_noise: bool | Literal["layers"] = StepOptions.measure_noise,
    key_per_replica: bool = StepOptions.key_per_replica,
    donate: bool = StepOptions.donate,
) -> Step:
    """Build `step(state, global_batch) -> (state, metrics)`, data-parallel over the mesh.

    Args:
      loss_fn: (params, model_state, batch, rng) -> (loss, (new model_state, metrics)). The loss is
        a mean over examples or a pair (sum, weight); see `lbopt.types.LossFn`. Under "jit" it sees
        the global batch; if replicas are mapped, one replica's slice.
      tx: Any Optax transformation. Gradients of complex parameters are the conjugates of
        `jax.grad`'s, against which the loss falls.
      mesh: Devices, from `make_mesh` or your own mesh with an axis `data`. Under plain "jit" it may
        have other axes, for sharding within the loss; with mapped replicas or a sharded update it
        may not.
      backend: "jit" ("pjit" is the same) lets the compiler place the gradient reduction; "pmap"
        maps replicas and reduces explicitly.
      num_microsteps: Number of slices of the batch over which the gradient is accumulated.
      compute_dtype: Dtype to which floating parameters and inputs are cast for the loss, such as
        `jnp.bfloat16`; None for models that choose for themselves. Gradients come back in the
        parameters' dtype. Under "pmap" they are reduced in it; under "jit" the compiler places the
        reduction and may reduce before that cast. Parameters, accumulators and optimizer state keep
        their own dtype.
      clip: `GradientClip`, the clip of the global gradient norm and its stage; None for no clip by
        the step (the optimizer may have its own, which sees the step's output). The norm before the
        clip is the metric `gradient_norm/<stage>`, averaged over the clipped gradients. With stage
        "replica" the "jit" backend maps replicas as "pmap" does.
      reduction: Reduction of the replicas' gradients to one: `AllReduce` in a chosen dtype,
        `ReduceScatter`, `Aggregate` or an aggregator alone. With any of them the "jit" backend maps
        replicas. None leaves the mean to the backend.
      shard_update: Whether each device keeps and updates its shard of the optimizer's state and the
        parameters ("jit" only). Place the first state with `step.place`; all states of one step
        have the same shapes.
      measure_noise: Whether to pass the squared gradient norms of the batch's slices (microsteps,
        and replicas if they are mapped) to the optimizer, for `lbopt.track_noise_scale`; "layers"
        passes those of each leaf too, for its `per_layer`. Without
        microsteps the "jit" backend maps replicas for it.
      key_per_replica: Whether each mapped replica has its own random key, so that a loss which
        samples for the examples it sees does not sample the same on all replicas. False for losses
        that sample per example from one key for all replicas, as lbopt's models do: their samples
        then depend on neither the backend nor the number of devices.
      donate: Whether to reuse the old state's buffers; the state passed in must not be used again.

    Returns:
      A `Step`. Its batch may be host arrays or arrays on the mesh, [global batch, ...]. Its state
      is replicated under both backends (except the optimizer's, with `shard_update`); its metrics
      are sums over the global batch. A state that is not on the mesh yet is placed there. Floating
      leaves of the model's state are averaged over replicas and microsteps; leaves without a mean
      (integers, bools, random keys) come from the first replica after its last microstep. All keep
      their dtypes. The backends agree up to rounding, except that with `key_per_replica` random
      samples of the loss are per global batch under "jit" and per replica under "pmap".

    Raises:
      UserError: For an option of another type or conflicting options; when called, for a batch that
        does not split evenly, a `loss_fn` that returns something else, or, with a sharded update, a
        state with another sharding.

    >>> import jax.numpy as jnp, lbopt, optax
    >>> from lbopt.metrics import summed
    >>> def loss_fn(params, model_state, batch, rng):
    ...     losses = (batch["x"] @ params["w"] - batch["y"]) ** 2
    ...     return losses.mean(), (model_state, {"loss": summed(losses)})
    >>> tx = optax.sgd(0.5)
    >>> step = make_train_step(loss_fn, tx, lbopt.make_mesh(1))
    >>> state = lbopt.TrainState.create({"w": jnp.zeros(2)}, model_state={}, tx=tx)
    >>> batch = {"x": jnp.eye(2), "y": jnp.array([1.0, 2.0])}
    >>> state, metrics = step(step.place(state), batch)
    >>> print(state.params["w"], *metrics["loss"])  # the loss is summed over 2 examples
    [0.5 1. ] 5.0 2.0
    """
    options = StepOptions(
        backend=backend,
        num_microsteps=num_microsteps,
        compute_dtype=compute_dtype,
        clip=clip,
        reduction=reduction,  # type: ignore[arg-type]
        shard_update=shard_update,
        measure_noise=measure_noise,
        key_per_replica=key_per_replica,
        donate=donate,
    )
    return compile_step(loss_fn, tx, mesh, options)


def compile_step(
    loss_fn: types.LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    options: StepOptions,
) -> Step:
    """Build a training step from its options; see `make_train_step`."""
    fix = "give a function (params, model_state, batch, rng)"
    require(callable(loss_fn), "loss_fn", loss_fn, fix, code="type")
    require_transformation("tx", tx)
    if isinstance(tx, Diloco):
        workers = LocalSteps(tx, mesh, options)
        step = workers.make_step_fn(loss_fn, options)
        return Step(_jitted(step, mesh, options, workers), mesh, options, workers)
    options.check_mesh(mesh)

    strategy = _reduction.choose(options.reduction, mesh, options.mapped, options.pmapped)
    axis_name = DATA_AXIS if options.mapped else None
    gradients = make_gradients(loss_fn, options, strategy, axis_name)
    if options.pmapped:
        step = make_step_fn(gradients, strategy, options.clip, tx)
        compiled = _pmapped(step, mesh, strategy.aggregation, options.donate)
        return Step(compiled, mesh, options, strategy.aggregation, _by_replica(mesh))

    # Only the gradients are mapped: the update may be split by sharding constraints, outside a map.
    if options.mapped:
        gradients = _over_replicas(gradients, mesh, strategy)
    along_axes = isinstance(options.reduction, ReduceScatter)
    shards = _shards.UpdateShards(mesh, along_axes) if options.sharded else _shards.WHOLE
    step = make_step_fn(gradients, strategy, options.clip, tx, shards)
    compiled = _jitted(_stating(step, mesh, None), mesh, options, strategy.aggregation)
    return Step(compiled, mesh, options, strategy.aggregation)


def _over_replicas(gradients: GradientFn, mesh: Mesh, strategy: Strategy) -> GradientFn:
    """Map gradients over replicas under "jit".

    The rows that an aggregator or a scatter reduces stay on their devices. `check_vma` is off, as
    in pmap, because batch norm over groups of replicas needs `axis_index_groups`.
    """
    whole = PartitionSpec()
    batch = PartitionSpec(DATA_AXIS)
    grads = batch if strategy.stays else whole
    mapped = _stating(gradients, mesh, DATA_AXIS, own_keys=strategy.aggregation is not None)
    return jax.shard_map(
        mapped,
        mesh=mesh,
        in_specs=(whole, whole, batch, whole),
        out_specs=Gradients(grads, whole, whole, whole, whole),  # type: ignore[arg-type]
        check_vma=False,
    )


def _jitted(
    step: StepFn, mesh: Mesh, options: StepOptions, aggregation: Aggregation | LocalSteps | None
) -> Any:
    """Compile a step for states with the shardings that its shards and aggregator need."""

    def compiled(where: Any) -> Any:
        return jax.jit(
            step,
            in_shardings=(where, batch_sharding(mesh)),
            out_shardings=(where, replicated_sharding(mesh)),
            donate_argnums=(0,) if options.donate else (),
        )

    if not options.sharded and aggregation is None:
        return compiled(replicated_sharding(mesh))
    return OnceShapesAreKnown(
        compiled, lambda state: state_sharding(mesh, state, options.sharded, aggregation)
    )


_BY_REPLICA: Any = TrainState(None, None, None, None, None, AggregatorState(0, None, None))
"""The arrays of a state that have an axis of replicas under "pmap"."""


def _pmapped(step: StepFn, mesh: Mesh, aggregation: Aggregation | None, donate: bool) -> Any:
    """Map a step over replicas; each device holds the aggregator's state of its own replica."""
    axes = None if aggregation is None else _BY_REPLICA
    return jax.pmap(
        _stating(step, mesh, DATA_AXIS, own_keys=aggregation is not None),
        DATA_AXIS,
        in_axes=(axes, 0),
        out_axes=None if axes is None else (axes, None),
        devices=list(mesh.devices.flat),
        donate_argnums=(0,) if donate else (),
    )


def make_eval_step(metric_fn: types.MetricFn, mesh: Mesh, backend: Backend = "jit") -> Step:
    """Build `step(params, model_state, global_batch) -> metrics`, summed over all devices.

    Args:
      metric_fn: (params, model_state, batch) -> metrics, without the examples whose `batch["mask"]`
        is False.
      mesh: A mesh from `make_mesh`.
      backend: "jit" or "pmap", as in `make_train_step`.

    Returns:
      A `Step` whose metrics are sums over the unmasked examples of the global batch.

    Raises:
      UserError: For an unknown backend, a `metric_fn` that is no function, or a mesh that does not
        go with the backend.

    >>> import jax.numpy as jnp, lbopt
    >>> from lbopt.metrics import summed
    >>> def metric_fn(params, model_state, batch):
    ...     errors = jnp.abs(params * batch["x"] - batch["y"])
    ...     return {"error": summed(errors, batch["mask"])}
    >>> step = make_eval_step(metric_fn, lbopt.make_mesh(1))
    >>> x = jnp.arange(4.0)
    >>> batch = {"x": x, "y": 3 * x, "mask": jnp.array([True, True, True, False])}
    >>> print(*step(2.0, {}, batch)["error"])
    3.0 3.0
    """
    require_choice("backend", backend, BACKENDS)
    fix = "give a function (params, model_state, batch)"
    require(callable(metric_fn), "metric_fn", metric_fn, fix, code="type")
    check_mesh(mesh, backend == "pmap", backend != "pmap")

    if backend != "pmap":
        inputs = replicated_sharding(mesh), replicated_sharding(mesh), batch_sharding(mesh)
        step = _stating(metric_fn, mesh, None)
        return Step(
            jax.jit(step, in_shardings=inputs, out_shardings=replicated_sharding(mesh)), mesh
        )

    def summed(params, model_state, given):
        metrics = _loss_form.checked_metrics(
            metric_fn(params, model_state, given["batch"]), "metric_fn"
        )
        return jax.lax.psum(metrics, DATA_AXIS)

    # If the arguments have three leaves, jax 0.10.2 takes an in_axes of three entries for one per
    # leaf. The batch is one level down, which cannot be mistaken.
    split = _by_replica(mesh)
    mapped = jax.pmap(
        _stating(summed, mesh, DATA_AXIS),
        DATA_AXIS,
        in_axes=(None, None, {"batch": 0}),
        out_axes=None,
        devices=list(mesh.devices.flat),
    )
    return Step(mapped, mesh, arrange=lambda batch: {"batch": split(batch)})


def _stating(
    fn: Callable[..., Any], mesh: Mesh, axis_name: str | None, own_keys: bool = False
) -> Callable[..., Any]:
    """Tell the traced function how many replicas there are (see `lbopt.replicas`)."""

    def traced(*arguments):
        with replicas.tracing_for(mesh.shape[DATA_AXIS], axis_name, torus_grid(mesh), own_keys):
            return fn(*arguments)

    return traced


def _by_replica(mesh: Mesh) -> Callable[[types.Batch], types.Batch]:
    """Return the reshaping of a global batch, [batch, ...] to [devices, batch / devices, ...]."""

    def split(x: Any) -> Any:
        shape = (mesh.size, x.shape[0] // mesh.size, *x.shape[1:])
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, x.dtype)
        return (np.asarray(x) if isinstance(x, np.ndarray) else x).reshape(shape)

    return lambda batch: jax.tree.map(split, batch)
