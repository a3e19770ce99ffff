"""How far does the batch size go on Fashion-MNIST? From 64 to all 50,000 training images.

    lbopt prepare fashion_mnist
    lbopt sweep --config=configs/sweeps/fashion_limit.py:mlp --workdir=runs/fashion_limit

Protocol. The form is that of "The Limit of the Batch Size" (arXiv 2006.08517v1): a fixed number of
epochs at every batch size, up to the whole training set. Every arm has the same epochs, the same
search around its own rule at every batch size, and the same budget to search beyond the edges. All
choices are made on 10,000 images of the training set that nothing trains on. The test set is read
once, by five fresh seeds of the chosen setting. Base rates were tuned at batch 256 on the same
validation images.

The paper's table of MNIST at the full batch, another data set, was selected on the test set:
momentum 93.74, LARS 97.65, LAMB 98.87 % in 35 steps. See configs/mnist.py.

Rows (`:ROW`):

    (none)     eight optimizers, Simple CNN at a quarter of its width, 35 epochs; for a GPU
    mlp        the same on a perceptron with 128 hidden units, 20 epochs; hours on 2 CPU cores
    waterfall  momentum at the full batch, and what each part of a large-batch recipe adds
    small      four optimizers, the perceptron, 5 epochs; within 20 minutes on 2 CPU cores
    smoke      tiny, on scikit-learn's digits
"""

import copy

import common
import fashion_mnist

from lbopt.config import (
    About,
    Arm,
    DataConfig,
    LossConfig,
    MeasureConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
)
from lbopt.errors import require_choice

ROWS = ("", "mlp", "waterfall", "small", "smoke")
BATCH = 256
"""Batch size at which the base rates were tuned."""
SIZES = (64, 256, 1024, 4096, 16384, 50_000)
WARMUP_EPOCHS = 0.1
"""LEGW's warmup at `BATCH`: 20 steps at every batch size."""
ARMS = {
    "Momentum + linear": (
        OptimizerConfig("momentum"),
        common.linear(0.12, batch=BATCH, warmup_epochs=1.0),
    ),
    "AdamW + sqrt": (
        OptimizerConfig("adamw", weight_decay=0.01),
        ScheduleConfig(
            0.008, base_batch_size=BATCH, warmup_rule="epochs", base_warmup_epochs=1.0
        ),
    ),
    "LARS + LEGW": (
        OptimizerConfig("lars", weight_decay=1e-4),
        common.legw(8.0, batch=BATCH, warmup_epochs=WARMUP_EPOCHS),
    ),
    "LAMB + LEGW": (
        OptimizerConfig("lamb", weight_decay=0.01),
        common.legw(0.012, batch=BATCH, warmup_epochs=WARMUP_EPOCHS),
    ),
    "AdamH + LEGW": (
        OptimizerConfig("adamh"),
        common.legw(0.02, batch=BATCH, warmup_epochs=WARMUP_EPOCHS),
    ),
    "Muon + LEGW": (
        OptimizerConfig("muon"),
        common.legw(0.06, batch=BATCH, warmup_epochs=WARMUP_EPOCHS),
    ),
    "MuonH + LEGW": (
        OptimizerConfig("muonh"),
        common.legw(0.03, batch=BATCH, warmup_epochs=WARMUP_EPOCHS),
    ),
    "SOAP + LEGW": (
        OptimizerConfig("soap"),
        common.legw(0.004, batch=BATCH, warmup_epochs=WARMUP_EPOCHS),
    ),
    "Schedule-Free + sqrt": (
        OptimizerConfig("optax.contrib.schedule_free_adamw"),
        common.legw(0.008, batch=BATCH, warmup_epochs=WARMUP_EPOCHS, decay="constant"),
    ),
}
