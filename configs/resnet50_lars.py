"""LARS on ResNet-50 / ImageNet at batches of 512 to 65536, with the warmups of LEGW.

Papers: You et al., arXiv 1708.03888v3 (LARS) and 1901.08256v1 (LEGW). Code: NUS-HPC-AI-Lab's
LARS-ImageNet-PyTorch at a8222c6, tensorflow/tpu at 95647b5, borisgin/nvcaffe-0.16 at 8896d33;
tests/configs/published.json names the file of each number. `[recalled NN%]`: believed with that
confidence, not read in a public source.

    lbopt train --config=configs/resnet50_lars.py:32768 --workdir=runs/resnet50_lars

Data: `lbopt prepare imagenet2012` prints how to get the files by hand. Hardware and time are
published for one row.

    row               top-1, %    source
    512               77.02       README of NUS-HPC-AI-Lab/LARS-ImageNet-PyTorch
    1024              76.96       the same
    4096              77.38       the same
    8192              77.14       the same
    16384             76.96       the same
    32768             76.75       the same; 14 epochs of warmup (LEGW's table: 10 [recalled 90%])
    official-8192     -           defaults of tensorflow/tpu, models/official/resnet/lars_util.py
    official-16384    -           the same
    official-32768    76.3        the same; 76.3 in 2.2 min on 1024 v3 chips: 1811.06992v2, abstract
    official-65536    -           the same
    nvcaffe-1024      -           the first code: nvcaffe-0.16, models/resnet50/solver_lars.prototxt
    smoke             -           a tiny ResNet on 96 generated images, half a minute on a CPU

One rule makes the NUS rows up to 16384: 2^2 at batch 512 and the square root of the batch, 10/2^6
epochs of warmup and LEGW, so 391 steps of warmup everywhere. nvcaffe-1024 ramps quadratically and
decays from step 0. Default row: 32768.

Own choices: number of examples that share batch statistics (64), evaluation batch, intervals; in
the official rows, whose file sets only the learning rate: 90 epochs, momentum .9, decay 1e-4, label
smoothing, the variant `tpu`; in nvcaffe-1024: no label smoothing, crops. Steps of the NUS rows are
rounded up over the run (in the code, over every epoch). The settings of Ying et al. (1811.06992v2)
are not known.
Status: official-32768 is planned (configs/plans/); no row has been run here.
"""

import common

from lbopt.config import About, LossConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from lbopt.errors import require_choice
from lbopt.schedules import Units

NUM_EPOCHS = 90.0
PUBLISHED = {
    "512": (77.02, 0.7702),
    "1024": (76.96, 0.7696),
    "4096": (77.38, 0.7738),
    "8192": (77.14, 0.7714),
    "16384": (76.96, 0.7696),
    "32768": (76.75, 0.7675),
}
OFFICIAL = {
    "official-8192": (8192, 10.0, 5.0),
    "official-16384": (16384, 25.0, 5.0),
    "official-32768": (32768, 32.0, 14.0),
    "official-65536": (65536, 35.6, 40.0),
}
"""Batch size, learning rate and warmup epochs of each row."""
FIRST = "nvcaffe-1024"
ROWS = (*PUBLISHED, *OFFICIAL, FIRST, "smoke")
_SETTING = "batch-norm span, evaluation batch, log/evaluation/checkpoint intervals"


def get_config(arg: str = "32768") -> TrainConfig:
    """Return a row: a global batch size, `official-BATCH`, `nvcaffe-1024`, or `smoke`."""
    row = arg or "32768"
    require_choice("--config row", row, ROWS)

    special = {"smoke": _smoke, FIRST: _first}
    if row in special:
        return special[row]()

    return _official(row) if row in OFFICIAL else _nus(row)


def _nus(row: str) -> TrainConfig:
    batch = int(row)
    percent, target = PUBLISHED[row]
    config = _imagenet(row, batch, "by_area")
    config.about = About(
        paper="LARS 1708.03888v3, LEGW 1901.08256v1, NUS-HPC-AI-Lab/LARS-ImageNet-PyTorch@a8222c6",
        published_result=f"top-1 {percent:.2f} % (NUS README)",
        note=f"Own choice: {_SETTING}, steps rounded up over the run (NUS rounds up every epoch).",
    )

    config.loss = LossConfig(label_smoothing=0.1, label_smoothing_rule="other_classes")
    config.optimizer = OptimizerConfig("lars", "nus", weight_decay=1e-4, momentum=0.9)
    if batch == 32768:
        config.optimizer.trust_ratio_eps = 0.0  # 1e-5 in the others
    config.schedule = ScheduleConfig(
        2.0**2,
        base_batch_size=512,
        scaling_rule="sqrt",
        warmup_rule="legw",
        base_warmup_epochs=10 / 2**6,
        power=2.0,
        first_step=0,
    )
    if batch == 32768:
        config.schedule.warmup_rule = "epochs"
        config.schedule.base_warmup_epochs = 14.0
    config.target_metric = "eval/accuracy"
    config.target_value = target
    return config


def _official(row: str) -> TrainConfig:
    batch, rate, warmup_epochs = OFFICIAL[row]
    units = Units(common.IMAGENET_EXAMPLES, batch)
    config = _imagenet(row, batch, "by_height")
    timed = row == "official-32768"
    config.about = About(
        paper="LARS 1708.03888v3, tensorflow/tpu@95647b5:models/official/resnet/lars_util.py"
        + (", Ying et al. 1811.06992v2" if timed else ""),
        published_result="top-1 76.3 % (abstract of 1811.06992v2)" if timed else "-",
        hardware="1024 TPU v3 chips" if timed else "-",
        time="2.2 min" if timed else "-",
        topology="v3:32x32" if timed else "",
        status="planned by the TPU compiler" if timed else "not yet run",
        note=(
            "Result and time are those of 1811.06992v2 at this batch; that it ran with these "
            "settings is not known. "
            if timed
            else ""
        )
        + f"Own choice: 90 epochs, momentum, weight decay, label smoothing, variant, {_SETTING}.",
    )

    config.loss = LossConfig(label_smoothing=0.1, label_smoothing_rule="all_classes")
    config.optimizer = OptimizerConfig("lars", "tpu", weight_decay=1e-4, momentum=0.9)
    config.schedule = ScheduleConfig(
        rate,
        base_batch_size=batch,
        scaling_rule="none",
        warmup_rule="epochs",
        base_warmup_epochs=warmup_epochs,
        power=2.0,
        end_learning_rate=1e-4,  # the default of TensorFlow's polynomial_decay
        decay_steps=units.steps(NUM_EPOCHS) - units.warmup_steps(warmup_epochs) + 1,
        first_step=0,
    )
    return config


def _first() -> TrainConfig:
    """Return the settings of the first code: a quadratic ramp from 1 to 9, all tensors adapted."""
    config = _imagenet(FIRST, 1024, "by_area")
    config.about = About(
        paper="LARS 1708.03888v3, "
        "borisgin/nvcaffe-0.16@8896d33:models/resnet50/solver_lars.prototxt",
        note=f"Own choice: no label smoothing, crops, {_SETTING}.",
    )

    config.num_steps = 125_000
    config.optimizer = OptimizerConfig(
        "lars",
        "nvcaffe",
        weight_decay=1e-4,
        momentum=0.9,
        trust_coefficient=0.001,
        trust_ratio_clip_mode="scale",
    )
    config.schedule = ScheduleConfig(
        9.0,
        base_batch_size=1024,
        scaling_rule="none",
        warmup_rule="none",
        warmup_steps=10_000,
        warmup_power=2.0,
        warmup_from=1.0,
        power=2.0,
        decay_from="start",
        first_step=0,
    )
    return config


def _imagenet(row: str, batch: int, crop_sampling: str) -> TrainConfig:
    """Return the settings that all rows share."""
    name = f"resnet50_lars:{row}"
    config = common.resnet50_on_imagenet(name, batch, crop_sampling, "examples:64")
    config.num_epochs = NUM_EPOCHS
    return config


def _smoke() -> TrainConfig:
    """Return the row 32768 with a tiny network, on `lbopt prepare generated_images`."""
    config = get_config("32768")
    common.make_tiny_resnet(config)
    config.num_epochs = 2.0
    config.schedule.base_warmup_epochs = 0.5
    return config
