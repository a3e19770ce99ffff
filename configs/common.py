"""What several recipes of this folder and studies of `sweeps/` share; no recipe itself.

A config file imports it as `common`: its own folder is on the path while it is loaded. A study
imports it and the recipes too: if its own folder has no `common.py`, the folder above is on the
path as well.
"""

import copy
from collections.abc import Collection, Iterable, Mapping

from lbopt.config import (
    About,
    Arm,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
    SweepConfig,
    TrainConfig,
    parse_row,
)

IMAGENET_EXAMPLES = 1_281_167
MLPERF_TOPOLOGIES = {
    "TPU v3-8192": "v3:128x32",
    "TPU v3-2048": "v3:32x32",
    "TPU v3-32": "v3:4x4",
    "TPU v4-16": "v4:2x2x2",
    "TPU v4-128": "v4:4x4x4",
    "TPU v4-4096": "v4:8x16x16",
    "TPU v4-6912": "v4:12x12x24",
}
"""Slice of each system, whose name has its number of cores, two per chip; shapes are our choice."""


# ---- schedules


def legw(rate: float, *, warmup_epochs: float, batch: int = 64, **others) -> ScheduleConfig:
    """Return LEGW's schedule (arXiv 1901.08256v1) from its values at the base batch size `batch`.

    The learning rate grows with the square root of the batch size, and warmup epochs linearly.
    """
    return ScheduleConfig(
        rate,
        base_batch_size=batch,
        scaling_rule="sqrt",
        warmup_rule="legw",
        base_warmup_epochs=warmup_epochs,
        **others,
    )


def linear(
    rate: float, *, warmup_epochs: float, batch: int = 64, warmup_rule: str = "epochs"
) -> ScheduleConfig:
    """Return linear scaling of the learning rate from its value at the base batch size `batch`.

    By default every batch size has the same warmup epochs.
    """
    return ScheduleConfig(
        rate,
        base_batch_size=batch,
        scaling_rule="linear",
        warmup_rule=warmup_rule,
        base_warmup_epochs=warmup_epochs,
    )


def unscaled(rate: float, *, batch: int, warmup_rule: str = "none", **others) -> ScheduleConfig:
    """Return a schedule whose learning rate is given for the row's own batch size, `batch`.

    Its first update is at step 0.
    """
    return ScheduleConfig(
        rate,
        base_batch_size=batch,
        scaling_rule="none",
        warmup_rule=warmup_rule,
        first_step=0,
        **others,
    )


# ---- tiny rows of the published recipes


def make_tiny(config: TrainConfig, batch: int = 16, keep_target: bool = False) -> None:
    """Make a published row `smoke`: its name, note, batch size, intervals and target."""
    config.name = f"{config.name.partition(':')[0]}:smoke"
    config.about = About(paper=config.about.paper, note="Tiny: our own choice throughout.")

    config.global_batch_size = batch
    config.schedule.base_batch_size = batch
    config.eval_global_batch_size = batch
    config.checkpoint.every_steps = 2
    config.log_every_steps = 1

    if not keep_target:
        config.target_metric = ""
        config.target_value = 0.0


# ---- small recipes, whose rows are <optimizer>-<global batch size>

Optimizer = tuple[OptimizerConfig, ScheduleConfig]
Optimizers = Mapping[str, Optimizer]


def rows_of(optimizers: Iterable[str], sizes: Collection[str]) -> tuple[str, ...]:
    """Return the rows `<optimizer>-<global batch size>` of a table, and `smoke`."""
    return (*(f"{name}-{size}" for name in optimizers for size in sizes), "smoke")


def measured_row(
    recipe: str, row: str, paper: str, optimizers: Optimizers, measured: Collection[str]
) -> TrainConfig:
    """Return a row without its data, model and length."""
    name, size = parse_row(row, optimizers)
    optimizer, schedule = copy.deepcopy(optimizers[name])
    status = "measured here" if str(size) in measured else "not yet run"
    return TrainConfig(
        name=f"{recipe}:{name}-{size}",
        about=About(paper=paper, status=status),
        global_batch_size=size,
        optimizer=optimizer,
        schedule=schedule,
    )


def set_intervals(config: TrainConfig, steps: int, log_steps: int) -> None:
    """Evaluate and save every `steps` steps, and log every `log_steps`."""
    config.checkpoint.every_steps = steps
    config.eval_every_steps = steps
    config.log_every_steps = log_steps


def shorten(config: TrainConfig, num_epochs: float) -> TrainConfig:
    """Return a row as `smoke`: few epochs, and short intervals."""
    config.num_epochs = num_epochs
    config.log_every_steps = 2
    config.eval_every_steps = 8
    config.checkpoint.every_steps = 4
    return config


# ---- studies


def make_arm(name: str, optimizer: Optimizer, **others) -> Arm:
    """Return an arm that shares no object with another one, nor with a recipe's table."""
    return Arm(name, *copy.deepcopy(optimizer), **copy.deepcopy(others))


def final_seeds(number: int) -> tuple[int, ...]:
    """Return the seeds of a cell's final runs, apart from those of a search, which begin at 0."""
    return tuple(range(100, 100 + number))


def make_small(config: SweepConfig, batches: tuple[int, ...], num_seeds: int = 2) -> None:
    """Make a study `smoke`: its name, status, batch sizes and final seeds."""
    config.name = f"{config.name.partition(':')[0]}:smoke"
    config.about.status = "not yet run"
    config.global_batch_sizes = batches
    config.final_seeds = final_seeds(num_seeds)


# ---- MNIST and Fashion-MNIST


def mnist(train: str, validation: str, test: str = "test") -> DataConfig:
    """Return whole images of MNIST, of values between 0 and 1, from three splits."""
    return whole_images("mnist", train, validation, test)


def fashion_mnist() -> DataConfig:
    """Return whole images of Fashion-MNIST; the last 10,000 of its training images validate."""
    return whole_images("fashion_mnist", "train[:50000]", validation="train[50000:]")


def whole_images(builder: str, train: str, validation: str, test: str = "test") -> DataConfig:
    """Return whole images of a data set, of values between 0 and 1, without augmentation."""
    return DataConfig(
        "images",
        builder=builder,
        train_split=train,
        validation_split=validation,
        test_split=test,
        train_crop="none",
        flip=False,
        pixel_mean=(0.0,),
        pixel_std=(1.0,),
    )


# ---- ImageNet


def imagenet(**others) -> DataConfig:
    """Return ImageNet for ResNet-50, in crops of 224 x 224."""
    return DataConfig(
        "images",
        builder="imagenet2012",
        test_split="validation",
        image_size=224,
        max_damaged_records=10,
        **others,
    )


def resnet50(batch_norm_scope: str) -> ModelConfig:
    """Return ResNet-50, in bfloat16."""
    return ModelConfig(
        "resnet",
        size="50",
        dtype="bfloat16",
        batch_norm_momentum=0.9,
        batch_norm_scope=batch_norm_scope,
    )


def resnet50_on_imagenet(
    name: str, global_batch_size: int, crop_sampling: str, batch_norm_scope: str, epochs: int = 2
) -> TrainConfig:
    """Return what the recipes of ResNet-50 share; they differ in loss, optimizer and schedule.

    Args:
      name: Name of the recipe and its row.
      global_batch_size: Examples per step.
      crop_sampling: Rule of the random crops, as in `DataConfig`.
      batch_norm_scope: Examples that share batch statistics, as in `ModelConfig`.
      epochs: Number of epochs between two evaluations, and about between two checkpoints.
    """
    return TrainConfig(
        name=name,
        global_batch_size=global_batch_size,
        data=imagenet(crop_sampling=crop_sampling),
        model=resnet50(batch_norm_scope),
        parallel=ParallelConfig(reduce_dtype="float32"),
        checkpoint=CheckpointConfig(every_steps=epochs * IMAGENET_EXAMPLES // global_batch_size),
        eval_global_batch_size=min(global_batch_size, 8192),
        eval_every_epochs=float(epochs),
        log_every_steps=20,
    )


def use_generated_images(config: TrainConfig) -> None:
    """Train a tiny row in fp32 on images that `lbopt prepare generated_images` makes."""
    config.data.builder = "generated_images"
    config.data.image_size = 32
    config.model.dtype = "float32"
    config.model.batch_norm_scope = "examples:8"
    config.eval_every_epochs = 1.0


def make_tiny_resnet(config: TrainConfig, keep_target: bool = False) -> None:
    """Make a row of ResNet-50 `smoke`, with a narrow ResNet-18 on generated images."""
    make_tiny(config, keep_target=keep_target)
    use_generated_images(config)
    make_narrow(config.model)


def make_narrow(model: ModelConfig) -> None:
    """Make ResNet-50 a narrow ResNet-18."""
    model.size = "18"
    model.width_coefficient = 0.125
