"""The training step that a config asks for."""

from __future__ import annotations

import functools

import optax
from jax.sharding import Mesh

from lbopt import types
from lbopt.config import MATRIX_OPTIMIZERS, TrainConfig, naming_step, step_options
from lbopt.parallel import Diloco, Step, compile_step, shard_matrices, split_sharding


def make_step(
    config: TrainConfig,
    loss_fn: types.LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    stacked: types.Stacked = None,
    trains: bool = True,
) -> Step:
    """Build the training step that a config asks for.

    Runs, sweeps over whole pods and plans share it.

    Args:
      config: The run.
      loss_fn: The loss; see `lbopt.types.LossFn`.
      tx: The optimizer.
      mesh: The devices.
      stacked: The parameters that are stacks of layers.
      trains: False if the step is only asked for the layout of the state.
    """
    options = step_options(config, stacked, trains)
    dealt = config.optimizer.name in MATRIX_OPTIMIZERS and not isinstance(tx, Diloco)
    if dealt and mesh.size > 1 and options.backend != "pmap":
        # The same numbers and states, with each matrix treated by one device.
        split = functools.partial(split_sharding, mesh) if options.shard_update else None
        tx = shard_matrices(tx, mesh, param_shardings=split)
    with naming_step():
        return compile_step(loss_fn, tx, mesh, options)
