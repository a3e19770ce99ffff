"""The training step that a config asks for."""

from __future__ import annotations

import optax
from jax.sharding import Mesh

from lbopt import types
from lbopt.config import TrainConfig, naming_step, step_options
from lbopt.parallel import Step, compile_step


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
    with naming_step():
        return compile_step(loss_fn, tx, mesh, options)
