"""How far does the batch size go on ImageNet? ResNet-50 on a pod, 4,096 to 819,200 images a step.

    lbopt plan  --config=configs/sweeps/imagenet_limit.py --topology=v3:16x32
    lbopt sweep --config=configs/sweeps/imagenet_limit.py --workdir=gs://BUCKET/imagenet_limit

The second command runs on every host; see tpu/README.md.

"The Limit of the Batch Size" (arXiv 2006.08517v1) scales "at least a magnitude larger than all
previous work", which ended at 64K (abstract and introduction); its largest batch is 819,200
[recalled 75%: not read there]. The network and its data are those of configs/resnet50_lamb.py. The
trials run one after another, each data-parallel over all devices and processes; batches that do not
fit are accumulated. `lbopt plan` estimates the cost of a step of every cell, and of the study,
without a pod.

Own choices: arms, batch sizes, 90 epochs at each of them (819,200: 139 steps), rates at 4,096 after
configs/resnet50_lamb.py and configs/resnet50_lars.py, 62 warmup steps (theirs are 782 and 391, more
than the largest batches have steps), halving over learning rate and warmup, three seeds, microsteps
of at most 32 images a device, batch statistics over 32 images at every batch size. Default row: all
of it.
Rows (`:ROW`): (none); `smoke`, a narrow network on generated images.
Status: not yet run.
"""

import common

from lbopt.config import (
    About,
    Arm,
    LossConfig,
    MeasureConfig,
    OptimizerConfig,
    ParallelConfig,
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

    base = {"batch": 4096, "warmup_epochs": 0.2}
    config = SweepConfig(
        name="imagenet_limit",
        about=About(
            paper="The Limit of the Batch Size 2006.08517v1",
            topology="v3:16x32",
            note="Own choice: arms, batch sizes, epochs, rates, warmup, search, seeds, microsteps. "
            "Largest batch [recalled 75%].",
        ),
        train=TrainConfig(
            name="imagenet_limit",
            num_epochs=90.0,
            data=common.imagenet(train_split="train[:1261167]", validation_split="train[1261167:]"),
            model=common.resnet50(batch_norm_scope="examples:32"),
            loss=LossConfig(label_smoothing=0.1),
            parallel=ParallelConfig(reduce_dtype="float32"),
            eval_global_batch_size=8192,
        ),
        arms=(
            Arm(
                "Momentum + linear",
                OptimizerConfig("momentum", weight_decay=1e-4),
                common.linear(1.6, warmup_rule="legw", **base),
            ),
            Arm(
                "LARS + LEGW",
                OptimizerConfig("lars", "nus", weight_decay=1e-4),
                common.legw(11.3, power=2.0, **base),
            ),
            Arm(
                "LAMB + LEGW",
                OptimizerConfig("lamb", "nus", weight_decay=1.5),
                common.legw(0.01414, **base),
            ),
        ),
        global_batch_sizes=(4096, 16384, 65536, 262144, 819200),
        search=SearchConfig(
            "successive_halving",
            learning_rate_range=(0.125, 8.0),
            warmup_range=(0.25, 2.0),
            num_candidates=9,
            min_fidelity=1 / 9,
        ),
        final_seeds=common.final_seeds(3),
        trial_devices="all",
        microstep_size=32,
        measure=MeasureConfig(num_probes=4),
    )

    if arg == "smoke":
        _make_small(config)
    return config


def _make_small(config: SweepConfig) -> None:
    common.make_small(config, batches=(16, 32), num_seeds=1)
    config.train.num_epochs = 2.0
    config.train.eval_global_batch_size = 16

    data = config.train.data
    model = config.train.model
    data.builder = "generated_images"
    data.image_size = 32
    data.train_split = "train"
    data.validation_split = "validation"
    common.make_narrow(model)
    model.dtype = "float32"
    model.batch_norm_scope = "examples:4"

    config.arms = config.arms[2:]
    config.search = SearchConfig(learning_rate_factors=(1.0,))
    config.microstep_size = 4
    config.measure.num_probes = 0

    for arm in config.arms:
        arm.schedule.base_batch_size = 32
        arm.schedule.base_warmup_epochs = 0.5
