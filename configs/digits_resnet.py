"""A narrow ResNet-18 on scikit-learn's digits, which need no download.

    lbopt train --config=configs/digits_resnet.py:lamb-1024 --workdir=runs/digits_resnet

Rows (`:ROW`): <optimizer>-<global batch size>, optimizer one of lamb, lars, momentum; `smoke` is
tiny.
Hardware and time: about 45 s of CPU time per run. Test accuracy of one run each, in % (2-core CPU,
JAX 0.10.2):

    batch      64    1024
    lamb     97.2    96.4
    lars     98.4    96.4
    momentum 98.2    93.5
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
    "lars": (OptimizerConfig("lars", weight_decay=1e-4), ScheduleConfig(4.0, **LEGW)),
    "momentum": (OptimizerConfig("momentum", weight_decay=1e-4), ScheduleConfig(0.1, **LEGW)),
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
        config.checkpoint.every_steps = 4
        return config

    name, size = parse_row(arg or "lamb-256", OPTIMIZERS)
    optimizer, schedule = copy.deepcopy(OPTIMIZERS[name])
    return TrainConfig(
        name=f"digits_resnet:{name}-{size}",
        about=About(
            paper="ResNet 1512.03385v1, LAMB 1904.00962v5, LEGW 1901.08256v1",
            status="measured here" if str(size) in MEASURED else "not yet run",
        ),
        global_batch_size=size,
        num_epochs=20.0,
        model=ModelConfig(
            "resnet", size="18", stem="conv3", width_coefficient=0.25, batch_norm_momentum=0.8
        ),
        optimizer=optimizer,
        schedule=schedule,
        checkpoint=CheckpointConfig(every_steps=20),
        eval_every_steps=20,
        log_every_steps=5,
    )
