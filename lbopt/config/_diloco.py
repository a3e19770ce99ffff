"""Local steps: every worker trains alone for a while (DiLoCo)."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses
from typing import TYPE_CHECKING

import optax

from lbopt import errors
from lbopt.config import _checks
from lbopt.config._fields import MORE_THAN_ONE, only
from lbopt.config._parallel import BY_COMPILER
from lbopt.errors import require
from lbopt.parallel import diloco

if TYPE_CHECKING:
    from lbopt.config._train import TrainConfig

_NEEDED = {
    "parallel.backend": BY_COMPILER,
    "parallel.shard_update": (False,),
    "parallel.reduce_dtype": (None,),
    "optimizer.ema_decay": (None,),
    "optimizer.skip_limit": (None,),
    "optimizer.track_noise_scale": (False,),
    "stop_at_nan": (False,),
    "data.carry_state": (False,),
    "batch_schedule": (None,),
    "phase2": (None,),
}
"""Values of fields with which each worker can train alone."""
_WITHOUT_COPIES = {
    "adamh": "adamw",
    "muloco": "muon",
    "muonh": "muon",
    "muown": "normuon",
    "soaph": "soap",
}
"""Optimizers that keep a copy of the parameters or of their norms -> the nearest without one."""


@dataclasses.dataclass
class DilocoConfig:
    """Local steps of each worker, and an outer step between them; see `lbopt.diloco`.

    A worker is what `aggregator` calls a replica. Without an aggregator it is a slice of the pod,
    or a device if there are no slices, and the difference is their plain mean. After the last step
    of the run everything is exchanged. The steps that an aggregator counts, `start_step` for
    instance, are exchanges, and batch norm over the global batch is that of each worker.

    Attributes:
      every: Steps of a worker between two exchanges; with 1 there are no outer steps, and
        the step is the ordinary one.
      outer_learning_rate: Learning rate of the outer SGD.
      outer_momentum: Nesterov momentum of the outer SGD, in [0, 1). Give 0 with an aggregator that
        sends later what it leaves out (ef, econtrol, powersgd), and 1 as the learning rate.
      num_fragments: Number of fragments of the parameters, exchanged at different steps.

    >>> from lbopt.config import TrainConfig
    >>> config = TrainConfig(data="digits", model="cnn", diloco=DilocoConfig(every=8))
    >>> config.validate()
    """

    every: int = 1
    outer_learning_rate: float = only(0.7, every=MORE_THAN_ONE)
    outer_momentum: float = only(0.9, every=MORE_THAN_ONE)
    num_fragments: int = only(1, every=MORE_THAN_ONE)


def with_local_steps(
    config: DilocoConfig, inner: optax.GradientTransformation, num_steps: int | None = None
) -> optax.GradientTransformation:
    """Return the optimizer of a run: `inner`, or local steps with it.

    Args:
      config: The local steps.
      inner: The optimizer of each worker.
      num_steps: Number of steps of the run; None if it is not known.
    """
    if config.every == 1:
        return inner
    momentum = config.outer_momentum or None
    outer = optax.sgd(config.outer_learning_rate, momentum, nesterov=momentum is not None)
    with errors.under("diloco"):
        fix = f"the run has {num_steps} steps; give at most {num_steps}"
        require(num_steps is None or config.every <= num_steps, "every", config.every, fix)
        return diloco(
            inner,
            outer,
            config.every,
            num_fragments=config.num_fragments,
            last_step=num_steps,
        )


def check_diloco(config: "TrainConfig") -> None:
    """Raise `UserError` for local steps that cannot be taken, or that other fields prevent."""
    local = config.diloco
    with errors.under("diloco"):
        require(local.every >= 1, "every", local.every, "give a number >= 1")
        rate = local.outer_learning_rate
        require(rate > 0, "outer_learning_rate", rate, "give a number > 0")
        momentum = local.outer_momentum
        require(0 <= momentum < 1, "outer_momentum", momentum, "give a number in [0, 1)")
    if local.every == 1:
        return
    with_local_steps(local, optax.identity())
    fix = "with {every} > 1 each worker trains alone; leave this at its default"
    _checks.require_among(config, _NEEDED, fix, {"every": "diloco.every"})
    name = config.optimizer.name
    fix = "it keeps parameters, or their norms, that no exchange with {every} > 1 reaches; use "
    fix += f"{_WITHOUT_COPIES.get(name)!r}"
    also = {"every": "diloco.every"}
    known = name not in _WITHOUT_COPIES
    require(known, "optimizer.name", name, fix, code="conflict", also=also)
