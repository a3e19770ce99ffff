"""The Simple CNN on Fashion-MNIST, and one a quarter as wide: plain runs at batch 256.

    lbopt prepare fashion_mnist
    lbopt train    --config=configs/fashion_mnist.py:adam --workdir=runs/fashion_mnist
    lbopt evaluate --workdir=runs/fashion_mnist

Data: arXiv 1708.07747; zalandoresearch/fashion-mnist@55506a9, whose README lists test accuracies of
.876 to .934 for two convolutions with pooling, .916 of them for this network with gradient descent
(benchmark/convnet.py). `lbopt prepare fashion_mnist --from=FOLDER` takes the four files from a
folder, those of Debian's package dataset-fashion-mnist for instance.
Pixels are divided by 255; there is no augmentation and no other normalization. The first 50000
training images train, the other 10000 validate; the test set is read once, at the end.

Network: 5 x 5 convolutions of 32 and 64 channels with 2 x 2 max pooling, 1024 hidden units, dropout
.4, no batch norm; `quarter-` has 8, 16 and 256. `lbopt.models.SimpleCNN` names its sources, and
what is recalled of the Simple CNN of Shallue et al., arXiv 1811.03600.

    row                               test accuracy here
    momentum, adam, lamb              not yet run
    quarter-momentum, quarter-lamb    not yet run
    quarter-adam                      .888, seed 0 (validation .899)
    smoke                             8 steps on scikit-learn's digits, seconds on a CPU

`scripts/families` runs quarter-adam. The published results train on all 60000 images.
Hardware and time: not measured.

Own choices throughout, none of them tuned: 10 epochs, learning rates, an epoch of warmup, a linear
decay to 0, weight decay, intervals. Default row: adam.
"""

import copy

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

BATCH = 256
OPTIMIZERS = {
    "momentum": (
        OptimizerConfig("momentum", momentum=0.9),
        common.legw(0.05, batch=BATCH, warmup_epochs=1.0),
    ),
    "adam": (OptimizerConfig("adam"), common.legw(0.001, batch=BATCH, warmup_epochs=1.0)),
    "lamb": (
        OptimizerConfig("lamb", weight_decay=0.01),
        common.legw(0.01, batch=BATCH, warmup_epochs=1.0),
    ),
}
_QUARTER = "quarter-"
MEASURED = ("quarter-adam",)
ROWS = (*OPTIMIZERS, *(f"{_QUARTER}{name}" for name in OPTIMIZERS), "smoke")


def get_config(arg: str = "adam") -> TrainConfig:
    """Return the row `<optimizer>`, `quarter-<optimizer>`, or `smoke`."""
    row = arg or "adam"
    require_choice("--config row", row, ROWS)
    if row == "smoke":
        return _smoke()

    optimizer, schedule = copy.deepcopy(OPTIMIZERS[row.removeprefix(_QUARTER)])
    width = 0.25 if row.startswith(_QUARTER) else None
    return TrainConfig(
        name=f"fashion_mnist:{row}",
        about=About(
            paper="Fashion-MNIST 1708.07747; zalandoresearch/fashion-mnist@55506a9",
            published_result="test accuracy .876 to .934, of networks with two convolutions",
            note="Own choice: optimizer, rates, epochs, validation split; not tuned.",
            status="measured here" if row in MEASURED else "not yet run",
        ),
        global_batch_size=BATCH,
        num_epochs=10.0,
        data=common.fashion_mnist(),
        model=ModelConfig("simple_cnn", width_coefficient=width),
        optimizer=optimizer,
        schedule=schedule,
        checkpoint=CheckpointConfig(every_steps=500),
        eval_global_batch_size=1000,
        eval_every_epochs=1.0,
        log_every_steps=50,
    )


def _smoke() -> TrainConfig:
    """Return the row quarter-adam on scikit-learn's digits."""
    config = get_config("quarter-adam")
    common.make_tiny(config, batch=64)
    config.num_steps = 8
    config.data = DataConfig("digits")
    config.schedule.base_warmup_epochs = 0.1
    config.eval_every_epochs = None
    config.eval_every_steps = 4
    return config
