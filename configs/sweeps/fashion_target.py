"""How many steps to a validation error of 10 % on Fashion-MNIST, over the batch size?

    lbopt prepare fashion_mnist
    lbopt sweep --config=configs/sweeps/fashion_target.py:mlp --workdir=runs/fashion_target

Protocol. The form is that of Shallue et al., arXiv 1811.03600, Figure 1: the fewest steps to a
target, with a quasi-random search of its own at every batch size, the same for every optimizer. A
candidate is a learning rate and a warmup; there are ten (six in `small`), and up to four more
beyond an edge. Rates are constant after the warmup, so that a run does not have to know its length.
The candidate that reaches the target in the fewest steps runs again with five fresh seeds, whose
median counts. A run ends at its target, or misses it after the epochs of the row. The error is that
on 10,000 training images that nothing trains on; nothing here reads the test set before the end.
The gradient noise scale is measured beside.

The paper's target for its Simple CNN is a validation error of 0.1. The perceptron does not get
there at a constant rate; its target is 0.12.

Power, by `lbopt check`: five seeds tell critical batches apart, with power 0.8, that differ by a
factor of 1.5, if the steps of seeds vary by 15 %. In `mlp` they vary by 14 %.

Rows (`:ROW`):

    (none)  Simple CNN at a quarter of its width; for a GPU, on 2 CPU cores at most 50 hours, as
            `lbopt sweep` tells beforehand
    mlp     a perceptron of 128 hidden units; 46 minutes on 2 CPU cores, beside other work
    small   two optimizers and four batch sizes of it; 8 minutes on 2 CPU cores
    smoke   tiny, on scikit-learn's digits
"""

import copy

import common
import fashion_limit

from lbopt.config import (
    About,
    DataConfig,
    MeasureConfig,
    ModelConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
)
from lbopt.errors import require_choice

ROWS = ("", "mlp", "small", "smoke")
ARMS = ("Momentum + linear", "AdamW + sqrt", "LAMB + LEGW", "Muon + LEGW", "Shampoo + LEGW")
"""Arms of configs/sweeps/fashion_limit.py, here at constant rates."""
SIZES = (64, 256, 1024, 4096, 16384)


def get_config(arg: str = "") -> SweepConfig:
    """Return the study of the row."""
    if arg:
        require_choice("--config row", arg, ROWS[1:])

    config = SweepConfig(
        name=f"fashion_target{':' * bool(arg)}{arg}",
        about=About(
            paper="Shallue et al. 1811.03600, Fashion-MNIST 1708.07747",
            note="Own choice: batch sizes, optimizers, epochs, search, seeds, base rates.",
            status="measured here" if arg in ("mlp", "small") else "not yet run",
        ),
        train=TrainConfig(
            name="fashion_target",
            num_epochs=40.0,
            data=common.fashion_mnist(),
            model=ModelConfig("simple_cnn", width_coefficient=0.25),
            eval_global_batch_size=10_000,
            eval_every_epochs=0.25,
            target_metric="eval/accuracy",
            target_value=0.9,
            stop_at_target=True,
        ),
        arms=tuple(common.make_arm(name, fashion_limit.ARMS[name]) for name in ARMS),
        global_batch_sizes=SIZES,
        search=SearchConfig(
            "halton", num_candidates=10, learning_rate_range=(0.125, 2.0), warmup_range=(0.5, 2.0)
        ),
        final_seeds=common.final_seeds(5),
        measure=MeasureConfig(num_probes=6, probe_part_size=64),
        microstep_size=None if arg else 4_096,
    )
    for arm in config.arms:
        arm.schedule.decay = "constant"

    if arg:
        config.train.model = copy.deepcopy(fashion_limit.PERCEPTRON)
        config.train.target_value = 0.88
    if arg in ("small", "smoke"):
        config.arms = config.arms[1:3]
        config.global_batch_sizes = SIZES[1:]
        config.search.num_candidates = 6
        config.train.num_epochs = 20.0
    if arg == "smoke":
        common.make_small(config, batches=(64, 256, 1024))
        config.train.data = DataConfig("digits")
        config.train.eval_global_batch_size = 256
        config.train.target_value = 0.8
        config.search.num_candidates = 2
        config.measure.probe_part_size = 16
        for arm in config.arms:
            arm.schedule.base_warmup_epochs = 2.0
    return config
