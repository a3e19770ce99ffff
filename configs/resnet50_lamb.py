"""LAMB on ResNet-50 / ImageNet at batches of 512 to 32768, by two codes of the authors' group.

Paper: You et al., arXiv 1904.00962v5. Code: NUS-HPC-AI-Lab/pytorch-lamb at 638a309 and
fastalgo/imagenet_resnet50_lamb at b778c4c; tests/configs/published.json names the file of each
number. `[recalled NN%]`: believed with that confidence, not read in a public source.

    lbopt train --config=configs/resnet50_lamb.py:32768 --workdir=runs/resnet50_lamb

Data: `lbopt prepare imagenet2012` prints how to get the files by hand. Hardware and time are
published for no row but the last one's 256 TPU cores.

    row          top-1 / top-5, %    source
    512          -                   NUS: default config; the paper about 76.4-77 [recalled 80%]
    1024         -                   NUS: rule; the paper the same [recalled 80%]
    2048         76.6 [recalled 80%] NUS: rule; the paper's table
    4096         77.14 / 93.50       NUS: README
    8192         77.31 / 93.64       the same
    16384        76.91 / 93.30       the same
    32768        76.71 / 93.00       the same
    you-32768    76.34 / 93.02       fastalgo: log.out, 3519 steps on 256 cores
    adamh-32768  -                   AdamH in place of LAMB, our own choice
    muonh-32768  -                   MuonH in place of LAMB, our own choice
    smoke        -                   a tiny ResNet on 96 generated images, half a minute on a CPU

One rule makes the seven NUS rows: the square root of the batch scales the learning rate, and warmup
epochs grow with the batch (LEGW), so that warmup has 782 steps in every row. You's code clips each
replica's own gradient. Default row: 32768.
`adamh-32768` and `muonh-32768`: NUS's row 32768 with weights that keep their norm. The rate of all
three is a share of the norm of a weight, so it is the same; there is no decay, and biases and norms
follow Adam at a tenth of the rate, 4e-3.

Own choices: number of examples that share batch statistics (64, which one of NUS's GPUs had at its
default batch; 128 for You's run, 32768 over 256 cores), evaluation batch, intervals of logs,
evaluations and checkpoints. The first update of the NUS rows has rate 0 (in the code, the first
step of the ramp), and steps are rounded up over the run (in the code, over every epoch).
Status: you-32768, adamh-32768 and muonh-32768 are planned, for a v3 slice (configs/plans/); no row
has been run here.
"""

import common

from lbopt.config import About, LossConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from lbopt.errors import require_choice

PUBLISHED = {
    "512": ("top-1 about 76.4-77 % [recalled 80%]", None),
    "1024": ("top-1 about 76.4-77 % [recalled 80%]", None),
    "2048": ("top-1 76.6 % [recalled 80%]", None),
    "4096": ("top-1 77.14 %, top-5 93.50 % (NUS README)", 0.7714),
    "8192": ("top-1 77.31 %, top-5 93.64 % (NUS README)", 0.7731),
    "16384": ("top-1 76.91 %, top-5 93.30 % (NUS README)", 0.7691),
    "32768": ("top-1 76.71 %, top-5 93.00 % (NUS README)", 0.7671),
}
"""Result of each batch size, and the accuracy to reach, None if there is no target."""
ON_SPHERES = ("adamh-32768", "muonh-32768")
"""Rows with weights that keep their norm."""
ROWS = (*PUBLISHED, "you-32768", *ON_SPHERES, "smoke")
_SETTING = "batch-norm span, evaluation batch, log/evaluation/checkpoint intervals"


def get_config(arg: str = "32768") -> TrainConfig:
    """Return a row: a global batch size, `you-32768`, one on spheres, or `smoke`."""
    row = arg or "32768"
    require_choice("--config row", row, ROWS)
    if row == "smoke":
        return _smoke()

    if row in ON_SPHERES:
        return _on_spheres(row)
    return _you() if row == "you-32768" else _nus(row)


def _nus(row: str) -> TrainConfig:
    batch = int(row)
    result, target = PUBLISHED[row]
    config = _imagenet(row, batch, "by_area", "examples:64")
    config.about = About(
        paper="LAMB 1904.00962v5, NUS-HPC-AI-Lab/pytorch-lamb@638a309",
        published_result=result,
        note=f"Own choice: {_SETTING}, first update at rate 0, steps rounded up over the run "
        "(NUS rounds up every epoch).",
    )

    config.loss = LossConfig(label_smoothing=0.1, label_smoothing_rule="other_classes")
    config.optimizer = OptimizerConfig("lamb", "nus", weight_decay=1.5)
    config.schedule = ScheduleConfig(
        0.005,  # 4 / (2^k x 100), k = 3 here and 0 at 32768
        base_batch_size=512,
        scaling_rule="sqrt",
        warmup_rule="legw",
        base_warmup_epochs=0.3125,
        first_step=0,
    )

    if target is not None:
        config.target_metric = "eval/accuracy"
        config.target_value = target
    return config


def _you() -> TrainConfig:
    config = _imagenet("you-32768", 32768, "by_height", "examples:128")
    config.about = About(
        paper="LAMB 1904.00962v5, fastalgo/imagenet_resnet50_lamb@b778c4c",
        published_result="top-1 76.33667 %, top-5 93.01758 % (log.out)",
        hardware="256 cores",
        topology="v3:8x16",  # the log does not name the generation
        status="planned by the TPU compiler",
        note=f"Own choice: {_SETTING}.",
    )

    config.num_steps = 3519
    config.loss = LossConfig(label_smoothing=0.1, label_smoothing_rule="all_classes")
    config.optimizer = OptimizerConfig("lamb", "you_rn50", weight_decay=1.5, clip_stage="replica")
    config.schedule = ScheduleConfig(
        0.04,
        base_batch_size=32768,
        scaling_rule="none",
        warmup_rule="none",
        warmup_steps=782,
        first_step=0,
    )
    config.target_metric = "eval/accuracy"
    config.target_value = 0.7633667
    return config


def _on_spheres(row: str) -> TrainConfig:
    name, batch = row.split("-")
    config = _nus(batch)
    config.name = f"resnet50_lamb:{row}"
    config.optimizer = OptimizerConfig(name, options={"rest_learning_rate_ratio": 0.1})
    config.target_metric = ""
    config.target_value = 0.0
    config.about = About(
        topology="v3:8x16",
        status="planned by the TPU compiler",
        note=f"{name} in place of LAMB: our own choice, as are its rate, the row's, and the rate "
        "of the rest. The other settings are those of the row 32768.",
    )
    return config


def _imagenet(row: str, batch: int, crop_sampling: str, span: str) -> TrainConfig:
    """Return the settings that all rows share."""
    config = common.resnet50_on_imagenet(f"resnet50_lamb:{row}", batch, crop_sampling, span)
    config.num_epochs = 90.0
    return config


def _smoke() -> TrainConfig:
    """Return the row 32768 with a tiny network, on `lbopt prepare generated_images`."""
    config = get_config("32768")
    common.make_tiny_resnet(config)
    config.num_epochs = 2.0
    config.schedule.base_warmup_epochs = 0.25
    return config
