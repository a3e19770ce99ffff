"""How far does the batch size go on CIFAR-10? ResNet-18, up to the whole training part of 45,000.

    lbopt prepare cifar10
    lbopt sweep --config=configs/sweeps/cifar10_limit.py --workdir=runs/cifar10_limit

Our own study: network, data and rules are those of configs/cifar10.py, which are not published.
"The Limit of the Batch Size" (arXiv 2006.08517v1) goes to the full batch of CIFAR-10 too [recalled
75%: not read there]. Crops and mirroring are sampled anew in every epoch, by each trial's seed. A
trial is data-parallel over all devices.

Own choices throughout, none of them tuned: 40 epochs, rates and warmup at batch 512, halving over
learning rate and warmup, batch statistics over 25 images at every batch size, on 1, 2, 4 or 8
devices, in microsteps of at most 375 a device, seeds. Default row: all of it.
Rows (`:ROW`): (none); `smoke`, a narrow network on generated images (`lbopt prepare
generated_images`). Status: not yet run.
"""

from lbopt.config import (
    About,
    Arm,
    DataConfig,
    MeasureConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
)
from lbopt.errors import require_choice

ROWS = ("", "smoke")


def get_config(arg: str = "") -> SweepConfig:
    """Return the study, or a tiny one (`smoke`)."""
    if arg:
        require_choice("--config row", arg, ROWS[1:])

    legw = {
        "base_batch_size": 512,
        "scaling_rule": "sqrt",
        "warmup_rule": "legw",
        "base_warmup_epochs": 0.1,
    }
    linear = {
        "base_batch_size": 512,
        "scaling_rule": "linear",
        "warmup_rule": "epochs",
        "base_warmup_epochs": 2.0,
    }

    config = SweepConfig(
        name="cifar10_limit",
        about=About(
            paper="The Limit of the Batch Size 2006.08517v1, ResNet 1512.03385v1",
            note="Own choice throughout, not tuned.",
        ),
        train=TrainConfig(
            name="cifar10_limit",
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
            model=ModelConfig("resnet", size="18", stem="conv3", batch_norm_scope="examples:25"),
            eval_global_batch_size=1000,
        ),
        arms=(
            Arm(
                "Momentum + linear",
                OptimizerConfig("momentum", weight_decay=5e-4),
                ScheduleConfig(0.1, **linear),
            ),
            Arm(
                "Momentum + LEGW",
                OptimizerConfig("momentum", weight_decay=5e-4),
                ScheduleConfig(0.1, **legw),
            ),
            Arm(
                "LARS + LEGW",
                OptimizerConfig("lars", weight_decay=5e-4),
                ScheduleConfig(5.0, **legw),
            ),
            Arm(
                "LAMB + LEGW",
                OptimizerConfig("lamb", weight_decay=0.01),
                ScheduleConfig(0.01, **legw),
            ),
        ),
        global_batch_sizes=(200, 1000, 5000, 15000, 45000),
        search=SearchConfig(
            "successive_halving",
            learning_rate_range=(0.125, 8.0),
            warmup_range=(0.5, 2.0),
            num_candidates=27,
            min_fidelity=1 / 27,
        ),
        final_seeds=(100, 101, 102, 103, 104),
        trial_devices="all",
        microstep_size=375,
        measure=MeasureConfig(num_probes=6, probe_part_size=50),
    )

    if arg == "smoke":
        _make_small(config)
    return config


def _make_small(config: SweepConfig) -> None:
    config.name = "cifar10_limit:smoke"
    config.train.num_epochs = 1.0

    data = config.train.data
    model = config.train.model
    data.builder = "generated_images"
    data.train_crop = "resized"
    data.image_size = 16
    data.train_split = "train"
    data.validation_split = "validation"
    data.test_split = "validation"
    model.width_coefficient = 0.125
    model.batch_norm_scope = "examples:4"

    config.arms = config.arms[2:]
    config.global_batch_sizes = (16, 32)
    config.final_seeds = (100,)
    config.search = SearchConfig(learning_rate_factors=(1.0,))
    config.microstep_size = 16
    config.measure = MeasureConfig()

    for arm in config.arms:
        arm.schedule.base_batch_size = 32
