"""An LSTM that reads scikit-learn's digits row by row, like LEGW's MNIST-LSTM.

LEGW is the linear-epoch gradual warmup of arXiv 1901.08256v1. The digits need no download.

    lbopt train --config=configs/digits_lstm.py:lamb-1024 --workdir=runs/digits_lstm

Rows (`:ROW`): <optimizer>-<global batch size>, optimizer one of lamb, adamw, momentum; `smoke` is
tiny.
Hardware and time: seconds on a CPU. `scripts/families` runs all rows, and writes their scores to
docs/results/families.json.
"""

import common

from lbopt.config import ModelConfig, OptimizerConfig, TrainConfig

WARMUP_EPOCHS = 0.25
OPTIMIZERS = {
    "lamb": (
        OptimizerConfig("lamb", weight_decay=0.01),
        common.legw(0.02, warmup_epochs=WARMUP_EPOCHS),
    ),
    "adamw": (
        OptimizerConfig("adamw", weight_decay=0.01),
        common.legw(0.008, warmup_epochs=WARMUP_EPOCHS),
    ),
    "momentum": (OptimizerConfig("momentum"), common.legw(0.1, warmup_epochs=WARMUP_EPOCHS)),
}
PAPER = "LEGW 1901.08256v1, LAMB 1904.00962v5"
MEASURED = ("64", "1024")
"""The batch sizes that scripts/families runs."""
ROWS = common.rows_of(OPTIMIZERS, MEASURED)


def get_config(arg: str = "lamb-256") -> TrainConfig:
    """Return the row `<optimizer>-<global batch size>`, or `smoke`."""
    if arg == "smoke":
        config = common.shorten(get_config("lamb-128"), num_epochs=2.0)
        config.model.hidden = 16
        return config

    config = common.measured_row("digits_lstm", arg or "lamb-256", PAPER, OPTIMIZERS, MEASURED)
    config.num_epochs = 20.0
    config.model = ModelConfig("lstm", hidden=64)
    common.set_intervals(config, steps=20, log_steps=5)
    return config
