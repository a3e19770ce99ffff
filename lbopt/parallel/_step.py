"""The training step: gradients, reduction, clip, update."""

from __future__ import annotations

from collections.abc import Callable

import jax
import optax

from lbopt import replicas, types
from lbopt.aggregators import remembered_state
from lbopt.parallel import _leaves, _shards
from lbopt.parallel._clip import GradientClip, clip_at, noise_arguments, treat_microbatch
from lbopt.parallel._gradients import (
    GradientFn,
    Gradients,
    for_replicas_in_turn,
    make_gradient_fn,
    weighed,
)
from lbopt.parallel._options import StepOptions
from lbopt.parallel._reduction import Strategy
from lbopt.parallel._state import TrainState

StepFn = Callable[[TrainState, types.Batch], tuple[TrainState, types.Metrics]]


def make_step_fn(
    gradients: GradientFn,
    strategy: Strategy,
    clip: GradientClip | None,
    tx: optax.GradientTransformation,
    shards: _shards.UpdateShards = _shards.WHOLE,
) -> StepFn:
    """Build one training step as a pure function.

    Args:
      gradients: Function (params, model_state, batch, key) -> `Gradients` of the batch or of every
        replica.
      strategy: Reduction of the replicas' gradients to one.
      clip: Clip of the step, applied here if its stage is "accumulated"; None for no clip.
      tx: The optimizer.
      shards: The shard of the parameters that each device updates.
    """
    optimizer = optax.with_extra_args_support(tx)

    def train_step(state: TrainState, batch: types.Batch) -> tuple[TrainState, types.Metrics]:
        # The gradient of the loss over the batch, or over each replica's shard of it.
        found = gradients(state.params, state.model_state, batch, state.step_key())

        # One gradient for all: the mean over replicas, or an aggregator's.
        with jax.named_scope(replicas.GRADIENTS):
            reduced = strategy.combine(found.grads, state)

        # From here each device works on its shard of the parameters, or on all of them.
        grads, params = shards.split((reduced.grads, state.params))
        grads, norm = clip_at("accumulated", clip, grads)

        # Some optimizers also need the loss, measured norms, or an aggregator's scales.
        extra = {**_loss_value(found.metrics), **noise_arguments(found.squares), **reduced.extra}
        with jax.named_scope(replicas.UPDATE):
            updates, opt_state = optimizer.update(grads, state.opt_state, params, **extra)
            params = shards.split(optax.apply_updates(params, updates))
        with jax.named_scope(replicas.PARAMETERS):
            params = shards.gather(params)

        # An aggregator forgets a step whose update the optimizer skipped.
        memory = reduced.aggregator_state
        if strategy.aggregation is not None:
            memory = remembered_state(memory, state.aggregator_state, opt_state, state.opt_state)
        new = state.replace(
            step=state.step + 1,
            params=params,
            model_state=found.model_state,
            opt_state=opt_state,
            aggregator_state=memory,
        )
        return new, {**found.metrics, **norm}

    return train_step


def _loss_value(metrics: types.Metrics) -> dict[str, jax.Array]:
    """Return the mean loss of the batch as `value`, its name in Optax; {} if it is no metric."""
    if "loss" not in metrics:
        return {}
    total, count = metrics["loss"]
    return {"value": total / count}


def step_on_one_device(
    loss_fn: types.LossFn,
    tx: optax.GradientTransformation,
    options: StepOptions,
    strategy: Strategy,
) -> StepFn:
    """Build the training step of one device that sees the whole batch; a sweep maps it over trials.

    Args:
      loss_fn: The loss, a `lbopt.types.LossFn`.
      tx: The optimizer.
      options: Options of the step; the backend and the sharding of the update have no effect.
      strategy: Reduction, from `_reduction.on_one_device`.
    """
    options.check_parts(options.replicas_per_device)
    gradients = make_gradients(loss_fn, options, strategy, axis_name=None)
    return make_step_fn(gradients, strategy, options.clip, tx)


def make_gradients(
    loss_fn: types.LossFn, options: StepOptions, strategy: Strategy, axis_name: str | None
) -> GradientFn:
    """Build the function whose gradients a step takes, with what must happen on each replica.

    Args:
      loss_fn: The loss, a `lbopt.types.LossFn`.
      options: Options of the step.
      strategy: Reduction of the replicas' gradients.
      axis_name: Axis over which replicas are mapped; None if the function sees the whole batch.
    """

    def handed_out(gradients: Gradients) -> types.PyTree:
        with jax.named_scope(replicas.GRADIENTS):
            return strategy.on_replica(weighed(gradients.grads, gradients.weight, axis_name))

    clip = options.clip
    each_microbatch = treat_microbatch(clip, options.measure_noise, handed_out, axis_name)
    gradient_fn = make_gradient_fn(
        loss_fn, options.num_microsteps, options.compute_dtype, each_microbatch
    )

    in_turn = 0 if strategy.aggregation is None else strategy.aggregation.replicas_per_device
    if in_turn:
        gradient_fn = for_replicas_in_turn(gradient_fn, in_turn, axis_name)

    def of_replica(params, model_state, batch, key) -> Gradients:
        # Replicas that run in turn have keys of their own already.
        if axis_name is not None and options.key_per_replica and not in_turn:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
        found = gradient_fn(params, model_state, batch, key)

        # With clip stage "mean" each microstep's gradient is a mean over replicas already.
        if clip is None or clip.stage != "mean":
            found = found._replace(grads=handed_out(found))
        found = found._replace(weight=None)
        return found if axis_name is None else _shared(found, axis_name)

    return of_replica


def _shared(found: Gradients, axis_name: str) -> Gradients:
    """In a mapped function, average the model state over replicas and sum their metrics."""
    with jax.named_scope(replicas.STATE):
        model_state = _leaves.over_replicas(axis_name, found.model_state)
    with jax.named_scope(replicas.METRICS):
        metrics, squares = jax.lax.psum((found.metrics, found.squares), axis_name)
    return found._replace(model_state=model_state, metrics=metrics, squares=squares)
