"""A language model of your own text, with your own tokenizer."""

from lbopt.config import (
    Arm,
    DataConfig,
    OptaxConfig,
    OptimizerConfig,
    ScheduleConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
)


def get_config(row=""):
    run = TrainConfig(
        name="topics",
        data=DataConfig("data.py:load", outputs=512),
        model="net.py:Transformer",
        optimizer=OptimizerConfig("lamb", weight_decay=0.01),
        schedule=ScheduleConfig(0.01, base_batch_size=64, base_warmup_epochs=0.2),
        global_batch_size=256,
        num_epochs=3,
    )
    if row == "":
        return run

    free = OptaxConfig("contrib.schedule_free_adamw")
    return SweepConfig(
        name="topics",
        train=run,
        arms=(
            Arm("LAMB", run.optimizer, run.schedule),
            Arm("schedule-free", free, ScheduleConfig(0.003, base_batch_size=64, decay="constant")),
        ),
        global_batch_sizes=(64, 256, 1024),
        search=SearchConfig(learning_rate_factors=(0.5, 1.0, 2.0)),
    )
