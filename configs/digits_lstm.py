"""An LSTM that reads scikit-learn's digits row by row, like LEGW's MNIST-LSTM.

LEGW is the linear-epoch gradual warmup of arXiv 1901.08256v1. The digits need no download.

    lbopt train --config=configs/digits_lstm.py:lamb-1024 --workdir=runs/digits_lstm

Rows (`:ROW`): <optimizer>-<global batch size>, optimizer one of lamb, adamw, momentum; `smoke` is
tiny.
Hardware and time: seconds on a CPU. Validation accuracy of one run each, in % (2-core CPU, JAX
0.10.2):

    batch      64    1024
    lamb     97.4    84.7
    adamw    96.6    85.2
    momentum 95.6    55.7
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

LEGW = {
    "base_batch_size": 64,
    "scaling_rule": "sqrt",
    "warmup_rule": "legw",
    "base_warmup_epochs": 0.25,
}
OPTIMIZERS = {
    "lamb": (OptimizerConfig("lamb", weight_decay=0.01), ScheduleConfig(0.02, **LEGW)),
    "adamw": (OptimizerConfig("adamw", weight_decay=0.01), ScheduleConfig(0.008, **LEGW)),
    "momentum": (OptimizerConfig("momentum"), ScheduleConfig(0.1, **LEGW)),
}
MEASURED = ("64", "1024")
"""The batch sizes of the table above."""
ROWS = (*(f"{name}-{size}" for name in OPTIMIZERS for size in MEASURED), "smoke")


def get_config(arg: str = "lamb-256") -> TrainConfig:
    """Return the row `<optimizer>-<global batch size>`, or `smoke`."""
    if arg == "smoke":
        config = get_config("lamb-128")
        config.num_epochs = 2.0
        config.log_every_steps = 2
        config.eval_every_steps = 8
        config.model.hidden = 16
        config.checkpoint.every_steps = 4
        return config

    name, size = parse_row(arg or "lamb-256", OPTIMIZERS)
    optimizer, schedule = copy.deepcopy(OPTIMIZERS[name])
    return TrainConfig(
        name=f"digits_lstm:{name}-{size}",
        about=About(
            paper="LEGW 1901.08256v1, LAMB 1904.00962v5",
            status="measured here" if str(size) in MEASURED else "not yet run",
        ),
        global_batch_size=size,
        num_epochs=20.0,
        model=ModelConfig("lstm", hidden=64),
        optimizer=optimizer,
        schedule=schedule,
        checkpoint=CheckpointConfig(every_steps=20),
        eval_every_steps=20,
        log_every_steps=5,
    )
