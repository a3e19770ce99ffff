"""The training step that a config asks for."""

from __future__ import annotations

import contextlib
import dataclasses

import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from lbopt import errors, types
from lbopt.aggregators import Aggregator
from lbopt.config import OptimizerConfig, ParallelConfig, TrainConfig, resolve_clip
from lbopt.parallel import (
    Aggregate,
    AllReduce,
    GradientClip,
    ReduceScatter,
    Reduction,
    Step,
    StepOptions,
    compile_step,
)
from lbopt.recipes import _aggregators

_PLACES = {
    "clip.stage": "optimizer.clip_stage",
    "clip.max_norm": "optimizer.max_grad_norm",
    "measure_noise": "optimizer.track_noise_scale",
    "reduction": "parallel.reduce_scatter",
    "reduction.dtype": "parallel.reduce_dtype",
    "reduction.over": "aggregator.over",
    "reduction.replicas_per_device": "aggregator.replicas_per_device",
    "aggregator": "aggregator.name",
}
"""Options of a step -> the fields of a config that fill them; the others are those of `parallel`."""


def make_step(
    config: TrainConfig,
    loss_fn: types.LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    stacked: types.Stacked = None,
    trains: bool = True,
) -> Step:
    """Build the training step that a config asks for; runs, sweeps over whole pods and plans share it.

    Args:
      config: of the run.
      loss_fn: the loss, see `lbopt.types.LossFn`.
      tx: the optimizer.
      mesh: the devices.
      stacked: which parameters are stacks of layers.
      trains: False if the step is only asked for the layout of the state.
    """
    options = options_of(config, stacked, trains)
    with _naming():
        step = compile_step(loss_fn, tx, mesh, options)
    if step.aggregation is not None:
        _aggregators.check_replicas(config.aggregator, step.aggregation.num_replicas)
    return step


def options_of(
    config: TrainConfig, stacked: types.Stacked = None, trains: bool = True
) -> StepOptions:
    """Return the options of a config's training step.

    Raises:
      UserError: naming a field of the config, for options that do not go together.
    """
    parallel = config.parallel
    aggregator = _aggregators.make_aggregator(config.aggregator, config.optimizer, stacked)
    with _naming():
        return StepOptions(
            backend=parallel.backend,  # type: ignore[arg-type]
            num_microsteps=parallel.num_microsteps,
            clip=_clip_of(config.optimizer),
            reduction=_reduction_of(config, aggregator),
            shard_update=parallel.shard_update,
            measure_noise=config.optimizer.track_noise_scale and trains,
            key_per_replica=False,
        )


def _naming() -> contextlib.AbstractContextManager[None]:
    """Let errors about the options of a step name fields of the config."""
    own = {field.name for field in dataclasses.fields(ParallelConfig)}
    return errors.under("parallel", own, **_PLACES)


def _clip_of(optimizer: OptimizerConfig) -> GradientClip | None:
    """Return the step's clip; an optimizer clips what is accumulated by itself."""
    max_norm = resolve_clip(optimizer)
    if max_norm is None or optimizer.clip_stage == "accumulated":
        return None
    with errors.under("clip"):
        return GradientClip(max_norm, optimizer.clip_stage)


def _reduction_of(config: TrainConfig, aggregator: Aggregator | None) -> Reduction | None:
    parallel = config.parallel
    if aggregator is not None:
        over = _aggregators.group_of(config.aggregator)
        return Aggregate(aggregator, config.aggregator.replicas_per_device, over)
    dtype = None if parallel.reduce_dtype is None else jnp.dtype(parallel.reduce_dtype)
    if parallel.reduce_scatter:
        return ReduceScatter(dtype)
    return None if dtype is None else AllReduce(dtype)
