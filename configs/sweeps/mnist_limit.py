"""How far does the batch size go on MNIST? Up to all 60,000 training images, in 35 steps.

    lbopt prepare mnist
    lbopt sweep --config=configs/sweeps/mnist_limit.py --workdir=runs/mnist_limit

fastalgo/mnist_tpu (see configs/mnist.py), the small end of "The Limit of the Batch Size" (arXiv
2006.08517v1), reports for batch 60,000 in 35 steps, as the best single runs of sweeps over learning
rate and warmup SELECTED ON THE TEST SET: momentum 93.74 %, LARS 97.65 %, LAMB 98.87 %; at batch
1,024 momentum 99.35 %, Adam 99.41 %, LAMB 99.47 %. Here the first half of the test set is the
validation part, by which all settings are chosen, and the second half is the test set, read once;
all 60,000 training images are used for training. Optimizers, decay and network are those of
configs/mnist.py, but LAMB clips the gradient of the whole batch, and Adam's rate decays as that of
momentum. The rates at 60,000 are the published ones; at other batches the search is around these
rates, scaled by the square root of the batch.

Own choices: batch sizes, 35 epochs at each of them, the search, the seeds, network (see
configs/mnist.py), microsteps of at most 8,000 images. Default row: all of it.
Rows (`:ROW`): (none); `smoke`, tiny, on scikit-learn's digits. Status: not yet run.
"""

import copy

import common
import mnist

from lbopt.config import (
    About,
    Arm,
    DataConfig,
    MeasureConfig,
    ModelConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
)
from lbopt.errors import require_choice

ROWS = ("", "smoke")
PUBLISHED = (
    "test accuracy at 60,000 in 35 steps: momentum 93.74, LARS 97.65, LAMB 98.87 %, selected on "
    "the test set"
)
ARMS = {
    "Momentum + sqrt": "momentum-60000",
    "Adam + sqrt": "adam-50000",
    "LARS + LEGW": "lars-60000",
    "LAMB + LEGW": "lamb-60000",
}
"""Row of configs/mnist.py that gives the learning rate and warmup steps of each arm at 60,000."""


def get_config(arg: str = "") -> SweepConfig:
    """Return the study, or a tiny one (`smoke`)."""
    if arg:
        require_choice("--config row", arg, ROWS[1:])

    config = SweepConfig(
        name="mnist_limit",
        about=About(
            paper="The Limit of the Batch Size 2006.08517v1, fastalgo/mnist_tpu",
            published_result=PUBLISHED,
            note="Own choice: batch sizes, epochs, search, seeds, network, microsteps, halves of "
            "the test set.",
        ),
        train=TrainConfig(
            name="mnist_limit",
            num_epochs=35.0,
            data=common.mnist("train", validation="test[:5000]", test="test[5000:]"),
            model=mnist.get_config().model,
            eval_global_batch_size=5000,
        ),
        arms=tuple(_arm(name, row) for name, row in ARMS.items()),
        global_batch_sizes=(960, 3840, 15000, 30000, 60000),
        search=SearchConfig(
            "halton", learning_rate_range=(0.25, 4.0), warmup_range=(0.5, 2.0), num_candidates=16
        ),
        final_seeds=common.final_seeds(5),
        microstep_size=8000,
        measure=MeasureConfig(num_probes=6, probe_part_size=64),
    )

    if arg == "smoke":
        _make_small(config)
    return config


def _arm(name: str, row: str) -> Arm:
    optimizer_name = row.partition("-")[0]
    optimizer = copy.deepcopy(mnist.OPTIMIZERS[optimizer_name])
    optimizer.clip_stage = "accumulated"  # of LAMB's; the others do not clip

    _, rate, warmup_steps, _ = mnist.TABLE[row]
    decay = mnist.DECAYS["momentum" if optimizer_name == "adam" else optimizer_name]
    schedule = common.legw(
        rate,
        batch=60000,
        warmup_epochs=float(warmup_steps),  # at the full batch one step is one epoch
        first_step=0,
        **decay,
    )
    return Arm(name, optimizer, schedule)


def _make_small(config: SweepConfig) -> None:
    common.make_small(config, batches=(512, 1024))
    config.train.data = DataConfig("digits")
    config.train.num_epochs = 16.0
    config.train.model = ModelConfig("cnn", (4, 8), 16)

    config.arms = config.arms[::3]
    config.search.num_candidates = 2
    config.microstep_size = 300
    config.measure = MeasureConfig(num_probes=1, probe_parts=2)

    for arm in config.arms:
        arm.schedule.base_batch_size = 1024
