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

import dataclasses

import cifar10
import common

from lbopt.config import (
    About,
    MeasureConfig,
    OptimizerConfig,
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

    recipe = cifar10.get_config()
    momentum, legw = cifar10.OPTIMIZERS["momentum"]
    linear = common.linear(0.1, batch=512, warmup_epochs=2.0)
    lars = (
        OptimizerConfig("lars", weight_decay=5e-4),
        common.legw(5.0, batch=512, warmup_epochs=0.1),
    )

    config = SweepConfig(
        name="cifar10_limit",
        about=About(
            paper="The Limit of the Batch Size 2006.08517v1, ResNet 1512.03385v1",
            note="Own choice throughout, not tuned.",
        ),
        train=TrainConfig(
            name="cifar10_limit",
            num_epochs=recipe.num_epochs,
            data=recipe.data,
            model=dataclasses.replace(recipe.model, batch_norm_scope="examples:25"),
            eval_global_batch_size=recipe.eval_global_batch_size,
        ),
        arms=(
            common.make_arm("Momentum + linear", (momentum, linear)),
            common.make_arm("Momentum + LEGW", (momentum, legw)),
            common.make_arm("LARS + LEGW", lars),
            common.make_arm("LAMB + LEGW", cifar10.OPTIMIZERS["lamb"]),
        ),
        global_batch_sizes=(200, 1000, 5000, 15000, 45000),
        search=SearchConfig(
            "successive_halving",
            learning_rate_range=(0.125, 8.0),
            warmup_range=(0.5, 2.0),
            num_candidates=27,
            min_fidelity=1 / 27,
        ),
        final_seeds=common.final_seeds(5),
        trial_devices="all",
        microstep_size=375,
        measure=MeasureConfig(num_probes=6, probe_part_size=50),
    )

    if arg == "smoke":
        _make_small(config)
    return config


def _make_small(config: SweepConfig) -> None:
    common.make_small(config, batches=(16, 32), num_seeds=1)
    cifar10.use_generated_images(config.train)
    config.train.num_epochs = 1.0
    config.train.model.batch_norm_scope = "examples:4"

    config.arms = config.arms[2:]
    config.search = SearchConfig(learning_rate_factors=(1.0,))
    config.microstep_size = 16
    config.measure = MeasureConfig()

    for arm in config.arms:
        arm.schedule.base_batch_size = 32
