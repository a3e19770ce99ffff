"""A small CNN with batch norm on scikit-learn's digits: the whole path on data that ships with a package.

    lbopt train --config=configs/digits_cnn.py:lamb-1024 --workdir=runs/digits_cnn

Rows (`:ROW`): <optimizer>-<global batch size>, optimizer one of lamb, lars, adamw, adam, momentum; `smoke` is tiny.
Base learning rates were chosen on the validation split at batch 64 (see configs/sweeps/digits_limit.py).
Hardware and time: seconds on a CPU.
"""

import copy

from lbopt.config import About, CheckpointConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from lbopt.errors import UserError, require_choice

OPTIMIZERS = {
    "lamb": (
        OptimizerConfig("lamb", weight_decay=0.01),
        ScheduleConfig(base_learning_rate=0.02, scaling_rule="sqrt", warmup_rule="legw"),
    ),
    "lars": (
        OptimizerConfig("lars", weight_decay=1e-4),
        ScheduleConfig(base_learning_rate=8.0, scaling_rule="sqrt", warmup_rule="legw"),
    ),
    "adamw": (
        OptimizerConfig("adamw", weight_decay=0.01),
        ScheduleConfig(base_learning_rate=0.004, scaling_rule="sqrt", warmup_rule="legw"),
    ),
    "adam": (
        OptimizerConfig("adam"),
        ScheduleConfig(base_learning_rate=0.004, scaling_rule="sqrt", warmup_rule="legw"),
    ),
    "momentum": (
        OptimizerConfig("momentum", weight_decay=1e-4),
        ScheduleConfig(base_learning_rate=0.05, scaling_rule="linear", warmup_rule="epochs"),
    ),
}


def get_config(arg: str = "lamb-256") -> TrainConfig:
    """Return the row `<optimizer>-<global batch size>`, or `smoke`."""
    if arg == "smoke":
        config = get_config("lamb-128")
        config.num_epochs, config.log_every_steps, config.eval_every_steps = 2.0, 2, 8
        config.checkpoint = CheckpointConfig(every_steps=4)
        return config
    name, _, size = (arg or "lamb-256").partition("-")
    require_choice("--config row", name, OPTIMIZERS)
    if not size.isdecimal():
        raise UserError(f"--config row = {arg!r}: use OPTIMIZER-BATCH, for instance lamb-1024, or smoke")
    optimizer, schedule = copy.deepcopy(OPTIMIZERS[name])
    return TrainConfig(
        name=f"digits_cnn:{name}-{size}",
        about=About(paper="LAMB 1904.00962, LARS 1708.03888, LEGW 1901.08256", status="measured here"),
        global_batch_size=int(size),
        num_epochs=20.0,
        optimizer=optimizer,
        schedule=schedule,
        checkpoint=CheckpointConfig(every_steps=20),
        eval_every_steps=20,
        log_every_steps=5,
    )
