"""The options of the training step that a config asks for."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Literal

import jax.numpy as jnp

from lbopt import errors, parallel, types
from lbopt._user_code import is_place
from lbopt.aggregators import Aggregator
from lbopt.config._aggregator import group_of, make_aggregator
from lbopt.config._optimizer import OptimizerConfig, clip_eps, resolve_clip
from lbopt.config._parallel import ParallelConfig
from lbopt.errors import require

if TYPE_CHECKING:
    from lbopt.config._train import TrainConfig

_ELSEWHERE = {
    "clip.stage": "optimizer.clip_stage",
    "clip.max_norm": "optimizer.max_grad_norm",
    "measure_noise": "optimizer.track_noise_scale",
    "reduction": "parallel.reduce_scatter",
    "reduction.dtype": "parallel.reduce_dtype",
    "reduction.over": "aggregator.over",
    "reduction.replicas_per_device": "aggregator.replicas_per_device",
    "aggregator": "aggregator.name",
}
"""Options of a step -> the fields of a config that fill them, where those are not `parallel`'s."""


def step_options(
    config: TrainConfig, stacked: types.Stacked = None, trains: bool = True
) -> parallel.StepOptions:
    """Return the options of a config's training step.

    Args:
      config: The run.
      stacked: The parameters that are stacks of layers.
      trains: False if the step is only asked for the layout of the state.

    Raises:
      UserError: Naming a field of the config, for options that do not go together.
    """
    aggregator = make_aggregator(config.aggregator, config.optimizer, stacked)
    reduction = _reduction_of(config, aggregator)
    # The step's option is a number of devices, and the config's field is text.
    over = errors.about("reduction.over", config.aggregator.over, "reduction.over")
    with naming_step(), over:
        return parallel.StepOptions(
            backend=config.parallel.backend,  # type: ignore[arg-type]
            num_microsteps=config.parallel.num_microsteps,
            clip=_clip_of(config.optimizer),
            reduction=reduction,
            shard_update=config.parallel.shard_update,
            measure_noise=_measures_noise(config.optimizer) if trains else False,
            # Layers of lbopt draw by the number of the example; others by the key alone.
            key_per_replica=is_place(config.model.name),
        )


def _measures_noise(optimizer: OptimizerConfig) -> bool | Literal["layers"]:
    return "layers" if optimizer.noise_scale_per_layer else optimizer.track_noise_scale


def naming_step() -> contextlib.AbstractContextManager[None]:
    """Let errors about the options of a step name fields of the config."""
    own = {field.name for field in dataclasses.fields(ParallelConfig)}
    return errors.under("parallel", own, **_ELSEWHERE)


def _clip_of(optimizer: OptimizerConfig) -> parallel.GradientClip | None:
    """Return the step's clip; None for stage "accumulated", where the optimizer clips."""
    max_norm = resolve_clip(optimizer)
    if max_norm is None or optimizer.clip_stage == "accumulated":
        return None
    with errors.under("clip"):
        return parallel.GradientClip(max_norm, optimizer.clip_stage, clip_eps(optimizer))


def _reduction_of(config: TrainConfig, aggregator: Aggregator | None) -> parallel.Reduction | None:
    chosen = config.parallel
    if aggregator is not None:
        _check_no_other_reduction(config)
        over = group_of(config.aggregator)
        with naming_step():
            return parallel.Aggregate(aggregator, config.aggregator.replicas_per_device, over)
    dtype = None if chosen.reduce_dtype is None else jnp.dtype(chosen.reduce_dtype)
    if chosen.reduce_scatter:
        return parallel.ReduceScatter(dtype)
    return None if dtype is None else parallel.AllReduce(dtype)


def _check_no_other_reduction(config: TrainConfig) -> None:
    name = config.aggregator.name
    fix = f"{{aggregator}} = {name!r} chooses how gradients are summed; leave it at its default"
    for field in ("reduce_dtype", "reduce_scatter"):
        value = getattr(config.parallel, field)
        place = f"parallel.{field}"
        also = {"aggregator": "aggregator.name"}
        require(not value, place, value, fix, code="conflict", also=also)
