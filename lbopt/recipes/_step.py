"""The training step that a config asks for."""

from __future__ import annotations

import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from lbopt import errors, types
from lbopt.config import TrainConfig, resolve_clip
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

PLACES = {
    "clip.stage": "config.optimizer.clip_stage",
    "clip.max_norm": "config.optimizer.max_grad_norm",
    "measure_noise": "config.optimizer.track_noise_scale",
    "reduction": "config.parallel.reduce_scatter",
    "reduction.dtype": "config.parallel.reduce_dtype",
    "reduction.over": "config.aggregator.over",
    "reduction.replicas_per_device": "config.aggregator.replicas_per_device",
    "aggregator": "config.aggregator.name",
    **{
        name: f"config.parallel.{name}"
        for name in ("backend", "num_microsteps", "shard_update", "mesh")
    },
}
"""Options of a step -> the fields of a config that fill them."""


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
    with errors.under("config", (), **PLACES):
        step = compile_step(loss_fn, tx, mesh, options_of(config, stacked, trains))
    if step.aggregation is not None:
        _aggregators.check_replicas(config.aggregator, step.aggregation.num_replicas)
    return step


def options_of(
    config: TrainConfig, stacked: types.Stacked = None, trains: bool = True
) -> StepOptions:
    """Return the options of a config's training step; errors name the options, not the config's fields."""
    parallel = config.parallel
    return StepOptions(
        backend=parallel.backend,  # type: ignore[arg-type]
        num_microsteps=parallel.num_microsteps,
        clip=_clip_of(config),
        reduction=_reduction_of(config, stacked),
        shard_update=parallel.shard_update,
        measure_noise=config.optimizer.track_noise_scale and trains,
        key_per_replica=False,
    )


def _clip_of(config: TrainConfig) -> GradientClip | None:
    """Return the step's clip; an optimizer clips what is accumulated by itself."""
    optimizer = config.optimizer
    max_norm = resolve_clip(optimizer)
    if max_norm is None or optimizer.clip_stage == "accumulated":
        return None
    with errors.under("clip"):
        return GradientClip(max_norm, optimizer.clip_stage)


def _reduction_of(config: TrainConfig, stacked: types.Stacked) -> Reduction | None:
    parallel = config.parallel
    aggregator = _aggregators.make_aggregator(config.aggregator, config.optimizer, stacked)
    if aggregator is not None:
        over = _aggregators.group_of(config.aggregator)
        return Aggregate(aggregator, config.aggregator.replicas_per_device, over)
    dtype = None if parallel.reduce_dtype is None else jnp.dtype(parallel.reduce_dtype)
    if parallel.reduce_scatter:
        return ReduceScatter(dtype)
    return None if dtype is None else AllReduce(dtype)
