"""ResNet-18 on CIFAR-10 at batches of 512, 4096 and the whole training part: our own rows.

    lbopt train --config=configs/cifar10.py:lamb-45000 --workdir=runs/cifar10

They are comparable with the CIFAR-10 results of the LAMB paper (arXiv 1904.00962v5), whose network,
DavidNet, is not offered. One run of its code's sweep: LAMB, accuracy .9254 at step 2328, batch 512,
fastalgo/davidnet-cifar@57a2b11b3734e895c162a1301b5b98a6d3ea48a7:lamb_correct/log/nohup.out. The
paper's table: momentum .9372, Adagrad .9074, Adam .9225, AdamW .9271, LAMB .9408 [recalled 85%: not
read in a public source]. Neither is a target here.

Data: `lbopt prepare cifar10`. The last 5000 training images are the validation part; the test set
is read once, at the end.

    row               steps    learning rate    warmup steps    microsteps
    lamb-512          3516     .01              9               1
    lamb-4096         440      .028             9               8
    lamb-45000        40       .094             9               75
    momentum-512      3516     .1               9               1
    momentum-4096     440      .28              9               8
    momentum-45000    40       .94              9               75
    smoke             4        a tiny ResNet on 96 generated images, seconds on a CPU

Own choices throughout, none of them tuned: network, 40 epochs, learning rates and weight decays at
batch 512, learning rates that grow with the square root of the batch and LEGW's warmup, crops and
mirroring, batch statistics over a microstep (512 or 600 examples), the validation part, intervals.
Default row: lamb-4096.
Hardware and time: not known. Status: not yet run.
"""

import copy

import common

from lbopt.config import (
    About,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from lbopt.errors import require_choice

NUM_EXAMPLES = 45_000
OPTIMIZERS = {
    "lamb": (
        OptimizerConfig("lamb", weight_decay=0.01),
        common.legw(0.01, batch=512, warmup_epochs=0.1),
    ),
    "momentum": (
        OptimizerConfig("momentum", weight_decay=5e-4),
        common.legw(0.1, batch=512, warmup_epochs=0.1),
    ),
}
MICROSTEPS = {"512": 1, "4096": 8, "45000": 75}
"""Number of microsteps of each batch size; 1, 2, 4 or 8 devices can share a microstep."""
ROWS = common.rows_of(OPTIMIZERS, MICROSTEPS)
_PAPER = "LAMB 1904.00962v5, LEGW 1901.08256v1, ResNet 1512.03385v1"


def get_config(arg: str = "lamb-4096") -> TrainConfig:
    """Return the row `<optimizer>-<global batch size>`, or `smoke`."""
    row = arg or "lamb-4096"
    require_choice("--config row", row, ROWS)
    if row == "smoke":
        return _smoke()

    name, size = row.split("-")
    optimizer, schedule = copy.deepcopy(OPTIMIZERS[name])
    batch = int(size)
    return TrainConfig(
        name=f"cifar10:{row}",
        about=About(
            paper=_PAPER,
            note="Own choice throughout, not tuned. Published beside it, of another network "
            "(DavidNet): LAMB .9254 at step 2328, batch 512.",
        ),
        global_batch_size=batch,
        num_epochs=40.0,
        data=DataConfig(
            "images",
            builder="cifar10",
            train_split="train[:45000]",
            validation_split="train[45000:]",
            test_split="test",
            train_crop="padded",
            crop_padding=4,
            pixel_mean=(0.4914, 0.4822, 0.4465),
            pixel_std=(0.2470, 0.2435, 0.2616),
        ),
        model=ModelConfig("resnet", size="18", stem="conv3"),
        optimizer=optimizer,
        schedule=schedule,
        parallel=ParallelConfig(num_microsteps=MICROSTEPS[size]),
        checkpoint=CheckpointConfig(every_steps=5 * NUM_EXAMPLES // batch),
        eval_global_batch_size=1000,
        eval_every_epochs=2.0,
        log_every_steps=10 if batch < 4096 else 1,
    )


def _smoke() -> TrainConfig:
    """Return the row lamb-4096 with a tiny network."""
    config = get_config("lamb-4096")
    common.make_tiny(config)
    use_generated_images(config)
    config.num_steps = 4
    config.schedule.warmup_steps = 1
    config.parallel.num_microsteps = 1
    config.eval_every_epochs = None
    config.eval_every_steps = 4
    return config


def use_generated_images(config: TrainConfig) -> None:
    """Train a narrow network on images that `lbopt prepare generated_images` makes."""
    data = config.data
    data.builder = "generated_images"
    data.train_crop = "resized"
    data.image_size = 16
    data.train_split = "train"
    data.validation_split = "validation"
    data.test_split = "validation"
    config.model.width_coefficient = 0.125
