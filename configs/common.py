"""What several recipes of this folder share; no recipe itself."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from lbopt.config import (
    About,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
    TrainConfig,
    parse_row,
)

IMAGENET_EXAMPLES = 1_281_167

# ---- small recipes, whose rows are <optimizer>-<global batch size>

Optimizers = Mapping[str, tuple[OptimizerConfig, ScheduleConfig]]


def legw(warmup_epochs: float) -> dict[str, Any]:
    """Return the fields of a schedule by LEGW, with the square root of the batch, from batch 64."""
    return {
        "base_batch_size": 64,
        "scaling_rule": "sqrt",
        "warmup_rule": "legw",
        "base_warmup_epochs": warmup_epochs,
    }


def rows_of(optimizers: Optimizers, measured: Sequence[str]) -> tuple[str, ...]:
    """Return the rows of every optimizer at the measured batch sizes, and `smoke`."""
    return (*(f"{name}-{size}" for name in optimizers for size in measured), "smoke")


def measured_row(
    recipe: str, row: str, paper: str, optimizers: Optimizers, measured: Sequence[str]
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


# ---- ImageNet


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
        data=DataConfig(
            "images",
            builder="imagenet2012",
            test_split="validation",
            image_size=224,
            crop_sampling=crop_sampling,
            space_to_depth=True,
            max_damaged_records=10,
        ),
        model=ModelConfig(
            "resnet",
            size="50",
            stem="space_to_depth",
            fold_columns=True,
            dtype="bfloat16",
            batch_norm_momentum=0.9,
            batch_norm_scope=batch_norm_scope,
        ),
        parallel=ParallelConfig(reduce_dtype="float32"),
        checkpoint=CheckpointConfig(every_steps=epochs * IMAGENET_EXAMPLES // global_batch_size),
        eval_global_batch_size=min(global_batch_size, 8192),
        eval_every_epochs=float(epochs),
        log_every_steps=20,
    )


def on_generated_images(
    config: TrainConfig, recipe: str, keeps_target: bool = False
) -> TrainConfig:
    """Return a row as `smoke`, with batches of 16 images that `lbopt prepare` generates."""
    config.name = f"{recipe}:smoke"
    config.about = About(paper=config.about.paper, note="Tiny: our own choice throughout.")
    config.global_batch_size = 16
    config.schedule.base_batch_size = 16
    config.data.builder = "generated_images"
    config.data.image_size = 32
    config.model.dtype = "float32"
    config.model.batch_norm_scope = "examples:8"

    config.checkpoint = CheckpointConfig(every_steps=2)
    config.eval_global_batch_size = 16
    config.eval_every_epochs = 1.0
    config.log_every_steps = 1
    if not keeps_target:
        config.target_metric = ""
        config.target_value = 0.0
    return config


def tiny_resnet(config: TrainConfig) -> TrainConfig:
    """Return a row with a narrow ResNet-18 instead of its network."""
    config.model.size = "18"
    config.model.width_coefficient = 0.125
    config.model.fold_columns = False
    return config
