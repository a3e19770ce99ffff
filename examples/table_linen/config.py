"""A table and a network of Flax Linen; the classes are words in a column."""

from lbopt.config import (
    Arm,
    ArraysConfig,
    OptimizerConfig,
    ScheduleConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
)


def get_config(row=""):
    run = TrainConfig(
        name="wine",
        data=ArraysConfig("wine.csv", target="grower", validation_fraction=0.2, test_fraction=0.2),
        model="net.py:Net",
        optimizer=OptimizerConfig("lamb", weight_decay=0.01),
        schedule=ScheduleConfig(0.02, base_batch_size=8, base_warmup_epochs=1.0),
        global_batch_size=32,
        num_epochs=20,
    )
    if row == "":
        return run

    return SweepConfig(
        name="wine",
        train=run,
        arms=(
            Arm("LAMB", run.optimizer, run.schedule),
            Arm("momentum", OptimizerConfig("momentum"), ScheduleConfig(0.05, base_batch_size=8)),
        ),
        global_batch_sizes=(8, 32, 104),
        search=SearchConfig(learning_rate_factors=(0.5, 1.0, 2.0)),
    )
