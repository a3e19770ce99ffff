"""A narrow ResNet-18 on scikit-learn's digits, which need no download.

    lbopt train --config=configs/digits_resnet.py:lamb-1024 --workdir=runs/digits_resnet

Rows (`:ROW`): <optimizer>-<global batch size>, optimizer one of lamb, lars, momentum; `smoke` is
tiny.
Hardware and time: about 45 s of CPU time per run. `scripts/families` runs all rows, and writes
their scores to docs/results/families.json.
"""

import common

from lbopt.config import ModelConfig, OptimizerConfig, TrainConfig

WARMUP_EPOCHS = 0.25
OPTIMIZERS = {
    "lamb": (
        OptimizerConfig("lamb", weight_decay=0.01),
        common.legw(0.02, warmup_epochs=WARMUP_EPOCHS),
    ),
    "lars": (
        OptimizerConfig("lars", weight_decay=1e-4),
        common.legw(4.0, warmup_epochs=WARMUP_EPOCHS),
    ),
    "momentum": (
        OptimizerConfig("momentum", weight_decay=1e-4),
        common.legw(0.1, warmup_epochs=WARMUP_EPOCHS),
    ),
}
PAPER = "ResNet 1512.03385v1, LAMB 1904.00962v5, LEGW 1901.08256v1"
MEASURED = ("64", "1024")
"""The batch sizes that scripts/families runs."""
ROWS = common.rows_of(OPTIMIZERS, MEASURED)


def get_config(arg: str = "lamb-256") -> TrainConfig:
    """Return the row `<optimizer>-<global batch size>`, or `smoke`."""
    if arg == "smoke":
        config = common.shorten(get_config("lamb-128"), num_epochs=2.0)
        return config

    config = common.measured_row("digits_resnet", arg or "lamb-256", PAPER, OPTIMIZERS, MEASURED)
    config.num_epochs = 20.0
    config.model = ModelConfig(
        "resnet", size="18", stem="conv3", width_coefficient=0.25, batch_norm_momentum=0.8
    )
    common.set_intervals(config, steps=20, log_steps=5)
    return config
