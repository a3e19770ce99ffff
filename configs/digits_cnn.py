"""A small CNN with batch norm on scikit-learn's digits, which need no download.

    lbopt train --config=configs/digits_cnn.py:lamb-1024 --workdir=runs/digits_cnn

Rows (`:ROW`): <optimizer>-<global batch size>, optimizer one of lamb, lars, adamw, adam, momentum;
`smoke` is tiny.
The settings are the centre of the grid of configs/sweeps/digits_limit.py, which measures them at
seven batch sizes.
Hardware and time: seconds on a CPU.
"""

import copy

from lbopt.config import (
    About,
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    parse_row,
)

EPOCHS = {"base_batch_size": 64, "warmup_rule": "epochs", "base_warmup_epochs": 1.0}
LEGW = {
    "base_batch_size": 64,
    "warmup_rule": "legw",
    "base_warmup_epochs": 0.25,
    "scaling_rule": "sqrt",
}
OPTIMIZERS = {
    "momentum": (
        OptimizerConfig("momentum", weight_decay=1e-4),
        ScheduleConfig(0.05, scaling_rule="linear", **EPOCHS),
    ),
    "adam": (OptimizerConfig("adam"), ScheduleConfig(0.008, scaling_rule="sqrt", **EPOCHS)),
    "adamw": (
        OptimizerConfig("adamw", weight_decay=0.01),
        ScheduleConfig(0.008, scaling_rule="sqrt", **EPOCHS),
    ),
    "lars": (OptimizerConfig("lars", weight_decay=1e-4), ScheduleConfig(4.0, **LEGW)),
    "lamb": (OptimizerConfig("lamb", weight_decay=0.01), ScheduleConfig(0.02, **LEGW)),
}
MEASURED = ("16", "32", "64", "128", "256", "512", "1024")
"""Batch sizes that `digits_limit` runs with these settings (its learning-rate factor 1)."""
ROWS = (*(f"{name}-{size}" for name in OPTIMIZERS for size in MEASURED), "smoke")


def get_config(arg: str = "lamb-256") -> TrainConfig:
    """Return the row `<optimizer>-<global batch size>`, or `smoke`."""
    if arg == "smoke":
        config = get_config("lamb-128")
        config.num_epochs = 2.0
        config.log_every_steps = 2
        config.eval_every_steps = 8
        config.about.status = "not yet run"
        config.checkpoint = CheckpointConfig(every_steps=4)
        return config

    name, size = parse_row(arg or "lamb-256", OPTIMIZERS)
    optimizer, schedule = copy.deepcopy(OPTIMIZERS[name])
    status = "measured here" if str(size) in MEASURED else "not yet run"
    return TrainConfig(
        name=f"digits_cnn:{name}-{size}",
        about=About(paper="LAMB 1904.00962v5, LARS 1708.03888v3, LEGW 1901.08256v1", status=status),
        global_batch_size=size,
        num_epochs=20.0,
        model=ModelConfig("cnn", (16, 32), 64, batch_norm_momentum=0.8),
        optimizer=optimizer,
        schedule=schedule,
        checkpoint=CheckpointConfig(every_steps=20),
        eval_every_steps=20,
        log_every_steps=5,
    )
