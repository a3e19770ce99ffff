"""Small runs without data that a TPU compiler compiles quickly."""

import dataclasses

from lbopt.config import (
    About,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
    TrainConfig,
)


def get_config(arg: str = "") -> TrainConfig:
    """Return `bert` or `cnn`."""
    return {"": bert, "bert": bert, "cnn": cnn}[arg]()


def bert(**parallel) -> TrainConfig:
    """Return two narrow layers in a loop, in bf16."""
    return TrainConfig(
        name="bert",
        about=About(paper="a paper", hardware="2 x 2 chips", time="1 min", topology="v3:2x2"),
        global_batch_size=64,
        num_steps=100,
        data=DataConfig(
            "text_mlm", builder="nowhere", sequence_length=32, max_predictions=4, vocab_size=512
        ),
        model=ModelConfig(
            "bert",
            size="tiny",
            dtype="bfloat16",
            scan_layers=True,
            dropout_rate=0.0,
            attention_dropout_rate=0.0,
        ),
        optimizer=OptimizerConfig("lamb", weight_decay=0.01),
        schedule=ScheduleConfig(1e-3, warmup_rule="none"),
        parallel=ParallelConfig(**parallel),
        eval_global_batch_size=64,
        eval_every_steps=50,
    )


def cnn(batch_norm_scope: str = "global", global_batch_size: int = 64, **parallel) -> TrainConfig:
    """Return one convolution and two dense layers."""
    return dataclasses.replace(
        bert(**parallel),
        name="cnn",
        about=About(),
        global_batch_size=global_batch_size,
        num_steps=None,
        num_epochs=1.0,
        data=DataConfig(
            "images", builder="cifar10", validation_split="test", train_crop="none", flip=False
        ),
        model=ModelConfig(
            "cnn", widths=(16,), hidden=16, batch_norm_scope=batch_norm_scope, dtype="bfloat16"
        ),
        optimizer=OptimizerConfig("momentum"),
        eval_global_batch_size=1024,
    )
