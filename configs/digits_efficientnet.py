"""EfficientNet-B0, narrow and half as deep, on scikit-learn's digits enlarged to 32 x 32.

    lbopt train --config=configs/digits_efficientnet.py:lamb-512 --workdir=runs/digits_efficientnet

Rows (`:ROW`): <optimizer>-<global batch size>, the optimizer is lamb; `smoke` is tiny.
Stochastic depth is off, because it lowers the accuracy of so short a run.
Hardware and time: about two minutes of CPU time per run. `scripts/families` runs all rows, and
writes their scores to docs/results/families.json.
"""

import common

from lbopt.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig

WARMUP_EPOCHS = 0.25
OPTIMIZERS = {
    "lamb": (
        OptimizerConfig("lamb", weight_decay=0.01),
        common.legw(0.01, warmup_epochs=WARMUP_EPOCHS),
    ),
}
PAPER = "EfficientNet 1905.11946v5, LAMB 1904.00962v5, LEGW 1901.08256v1"
MEASURED = ("64", "512")
"""The batch sizes that scripts/families runs."""
ROWS = common.rows_of(OPTIMIZERS, MEASURED)


def get_config(arg: str = "lamb-256") -> TrainConfig:
    """Return the row `<optimizer>-<global batch size>`, or `smoke`."""
    if arg == "smoke":
        config = common.shorten(get_config("lamb-128"), num_epochs=2.0)
        config.model.depth_coefficient = 0.25
        return config

    config = common.measured_row(
        "digits_efficientnet", arg or "lamb-256", PAPER, OPTIMIZERS, MEASURED
    )
    config.num_epochs = 20.0
    config.data = DataConfig("digits", image_size=32)
    config.model = ModelConfig(
        "efficientnet",
        size="b0",
        width_coefficient=0.25,
        depth_coefficient=0.5,
        dropout_rate=0.1,
        stochastic_depth_rate=0.0,
        batch_norm_momentum=0.8,
    )
    common.set_intervals(config, steps=20, log_steps=5)
    return config
