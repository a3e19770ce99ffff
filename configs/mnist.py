"""Full-batch MNIST in 30 or 35 steps: the small end of "The Limit of the Batch Size".

Paper: You et al., arXiv 2006.08517v1. Code:
fastalgo/mnist_tpu@9d6ba7de9fdcacb2a911b5a648993c3d05677157; tests/configs/published.json names the
file of each number.

    lbopt train --config=configs/mnist.py:lamb-60000 --workdir=runs/mnist

Data: `lbopt prepare mnist`. The results are the best single runs of sweeps over learning rate and
warmup, SELECTED ON THE TEST SET. To compare with them, validation is the test set here too.
Hardware and time are published for no row.

    row               steps    test accuracy, %    learning rate    warmup steps
    momentum-60000    35       93.74               .13              9
    lars-60000        35       97.65               25               8
    lamb-60000        35       98.87               .11              7
    adam-50000        30       98.12               .04              10
    lamb-50000        30       98.54               .12              8
    smoke             the row lamb-60000 on scikit-learn's digits, seconds on a CPU

The decay is polynomial with power .5, counted from step 0, and ends at 0 for LAMB and at 1e-4 for
momentum and LARS. The run of adam-50000 has power 0: the rate stays at its peak after the warmup.
The first update has rate 0. LAMB clips each replica's own gradient.

Own choices: a LeNet-like network of 3 x 3 convolutions (32, 64) and 1024 hidden units with batch
norm (theirs has 5 x 5 convolutions, dropout .4 and no batch norm), 50000 as the first 50000
training images, intervals. Default row: lamb-60000.
Status: not yet run.
"""

import copy
from typing import Any

import common

from lbopt.config import (
    About,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from lbopt.errors import require_choice

OPTIMIZERS = {
    "momentum": OptimizerConfig("momentum", momentum=0.9),
    "lars": OptimizerConfig("lars", "contrib_2018", weight_decay=1e-4, momentum=0.9),
    "adam": OptimizerConfig("adam", eps=1e-8),
    "lamb": OptimizerConfig("lamb", "you_mnist", weight_decay=0.01, clip_stage="replica"),
}
_ROOT = {"power": 0.5, "decay_from": "start"}
DECAYS: dict[str, dict[str, Any]] = {
    "momentum": _ROOT | {"end_learning_rate": 1e-4},
    "lars": _ROOT | {"end_learning_rate": 1e-4},
    "adam": {"decay": "constant"},
    "lamb": _ROOT | {"end_learning_rate": 0.0},
}
TABLE = {
    "momentum-60000": (35, 0.13, 9, 93.74),
    "lars-60000": (35, 25.0, 8, 97.65),
    "lamb-60000": (35, 0.11, 7, 98.87),
    "adam-50000": (30, 0.04, 10, 98.12),
    "lamb-50000": (30, 0.12, 8, 98.54),
}
"""Steps, learning rate, warmup steps and test accuracy in percent of each row."""
ROWS = (*TABLE, "smoke")


def get_config(arg: str = "lamb-60000") -> TrainConfig:
    """Return the row `<optimizer>-<global batch size>`, or `smoke`."""
    row = arg or "lamb-60000"
    require_choice("--config row", row, ROWS)
    if row == "smoke":
        return _smoke()

    name, batch = row.split("-")
    steps, rate, warmup, percent = TABLE[row]
    return TrainConfig(
        name=f"mnist:{row}",
        about=About(
            paper="The Limit of the Batch Size 2006.08517v1, fastalgo/mnist_tpu@9d6ba7d",
            published_result=f"test accuracy {percent:.2f} %, selected on the test set",
            note="Own choice: network, intervals.",
        ),
        global_batch_size=int(batch),
        num_steps=steps,
        data=common.mnist("train" if batch == "60000" else "train[:50000]", validation="test"),
        model=ModelConfig("cnn", (32, 64), 1024),
        optimizer=copy.deepcopy(OPTIMIZERS[name]),
        schedule=common.unscaled(rate, batch=int(batch), warmup_steps=warmup, **DECAYS[name]),
        checkpoint=CheckpointConfig(every_steps=10),
        eval_global_batch_size=10000,
        eval_every_steps=5,
        log_every_steps=1,
        target_metric="eval/accuracy",
        target_value=percent / 100,
    )


def _smoke() -> TrainConfig:
    """Return the row lamb-60000 with a small network, on scikit-learn's digits."""
    config = get_config("lamb-60000")
    common.make_tiny(config, batch=256)
    config.num_steps = 8
    config.data = DataConfig("digits")
    config.model = ModelConfig("cnn", (8, 16), 32)
    config.schedule.warmup_steps = 2
    config.eval_every_steps = 4
    return config
