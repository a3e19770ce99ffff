"""A small CNN with batch norm on scikit-learn's digits, which need no download.

    lbopt train --config=configs/digits_cnn.py:lamb-1024 --workdir=runs/digits_cnn

Rows (`:ROW`): <optimizer>-<global batch size>, optimizer one of lamb, lars, adamw, adam, momentum;
`smoke` is tiny.
The settings are the centre of the grid of configs/sweeps/digits_limit.py, which takes them from
here and measures them at seven batch sizes.
Hardware and time: seconds on a CPU.
"""

import common

from lbopt.config import ModelConfig, OptimizerConfig, ScheduleConfig, TrainConfig

EPOCHS = {"base_batch_size": 64, "warmup_rule": "epochs", "base_warmup_epochs": 1.0}
WARMUP_EPOCHS = 0.25
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
    "lars": (
        OptimizerConfig("lars", weight_decay=1e-4),
        common.legw(4.0, warmup_epochs=WARMUP_EPOCHS),
    ),
    "lamb": (
        OptimizerConfig("lamb", weight_decay=0.01),
        common.legw(0.02, warmup_epochs=WARMUP_EPOCHS),
    ),
}
PAPER = "LAMB 1904.00962v5, LARS 1708.03888v3, LEGW 1901.08256v1"
MEASURED = ("16", "32", "64", "128", "256", "512", "1024")
"""Batch sizes that `digits_limit` runs with these settings (its learning-rate factor 1)."""
ROWS = common.rows_of(OPTIMIZERS, MEASURED)


def get_config(arg: str = "lamb-256") -> TrainConfig:
    """Return the row `<optimizer>-<global batch size>`, or `smoke`."""
    if arg == "smoke":
        config = common.shorten(get_config("lamb-128"), num_epochs=2.0)
        config.about.status = "not yet run"
        return config

    config = common.measured_row("digits_cnn", arg or "lamb-256", PAPER, OPTIMIZERS, MEASURED)
    config.num_epochs = 20.0
    config.model = ModelConfig("cnn", (16, 32), 64, batch_norm_momentum=0.8)
    common.set_intervals(config, steps=20, log_steps=5)
    return config
