"""A regression, and a network of Haiku."""

from lbopt.config import (
    Arm,
    OptaxConfig,
    OptimizerConfig,
    ScheduleConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
)


def get_config(row=""):
    run = TrainConfig(
        name="diabetes",
        data="diabetes.parquet",
        model="net.py:make",
        optimizer=OptimizerConfig("adamw", weight_decay=0.1),
        schedule=ScheduleConfig(0.01, base_batch_size=16, base_warmup_epochs=1.0),
        global_batch_size=64,
        num_epochs=20,
    )
    if row == "":
        return run

    free = ScheduleConfig(1.0, scaling_rule="none")
    return SweepConfig(
        name="diabetes",
        train=run,
        arms=(
            Arm("AdamW", run.optimizer, run.schedule),
            Arm("Prodigy", OptaxConfig("contrib.prodigy"), free),
        ),
        global_batch_sizes=(16, 64, 256),
        search=SearchConfig(learning_rate_factors=(0.5, 1.0, 2.0)),
    )
