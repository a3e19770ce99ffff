"""EfficientNet-B0, narrow and half as deep, on scikit-learn's digits enlarged to 32 x 32.

    lbopt train --config=configs/digits_efficientnet.py:lamb-512 --workdir=runs/digits_efficientnet

Rows (`:ROW`): <optimizer>-<global batch size>, the optimizer is lamb; `smoke` is tiny.
Stochastic depth is off, because it lowers the accuracy of so short a run.
Hardware and time: about two minutes of CPU time per run. Test accuracy of one run each, in %
(2-core CPU, JAX 0.10.2):

    batch      64    512
    lamb     98.2   95.3
"""

import copy

from lbopt.config import (
    About,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    parse_row,
)

LEGW = {
    "base_batch_size": 64,
    "scaling_rule": "sqrt",
    "warmup_rule": "legw",
    "base_warmup_epochs": 0.25,
}
OPTIMIZERS = {
    "lamb": (OptimizerConfig("lamb", weight_decay=0.01), ScheduleConfig(0.01, **LEGW)),
}
MEASURED = ("64", "512")
"""The batch sizes of the table above."""
ROWS = (*(f"{name}-{size}" for name in OPTIMIZERS for size in MEASURED), "smoke")


def get_config(arg: str = "lamb-256") -> TrainConfig:
    """Return the row `<optimizer>-<global batch size>`, or `smoke`."""
    if arg == "smoke":
        config = get_config("lamb-128")
        config.num_epochs = 2.0
        config.log_every_steps = 2
        config.eval_every_steps = 8
        config.model.depth_coefficient = 0.25
        config.checkpoint.every_steps = 4
        return config

    name, size = parse_row(arg or "lamb-256", OPTIMIZERS)
    optimizer, schedule = copy.deepcopy(OPTIMIZERS[name])
    return TrainConfig(
        name=f"digits_efficientnet:{name}-{size}",
        about=About(
            paper="EfficientNet 1905.11946v5, LAMB 1904.00962v5, LEGW 1901.08256v1",
            status="measured here" if str(size) in MEASURED else "not yet run",
        ),
        global_batch_size=size,
        num_epochs=20.0,
        data=DataConfig("digits", image_size=32),
        model=ModelConfig(
            "efficientnet",
            size="b0",
            width_coefficient=0.25,
            depth_coefficient=0.5,
            dropout_rate=0.1,
            stochastic_depth_rate=0.0,
            batch_norm_momentum=0.8,
        ),
        optimizer=optimizer,
        schedule=schedule,
        checkpoint=CheckpointConfig(every_steps=20),
        eval_every_steps=20,
        log_every_steps=5,
    )
