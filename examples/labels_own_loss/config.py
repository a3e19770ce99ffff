"""Several labels an example, with a loss and an optimizer of your own."""

from lbopt.config import (
    Arm,
    LossConfig,
    OptimizerConfig,
    ScheduleConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
)


def get_config(row=""):
    run = TrainConfig(
        name="labels",
        data="digits/",
        model="net.py:Net",
        loss=LossConfig(name="net.py:focal", options={"gamma": 1.0}),
        optimizer=OptimizerConfig("lamb", weight_decay=0.01),
        schedule=ScheduleConfig(0.02, base_batch_size=64, base_warmup_epochs=0.5),
        global_batch_size=256,
        num_epochs=10,
    )
    if row == "":
        return run

    own = OptimizerConfig("net.py:signed", weight_decay=0.01)
    return SweepConfig(
        name="labels",
        train=run,
        arms=(
            Arm("LAMB", run.optimizer, run.schedule),
            Arm("signs", own, ScheduleConfig(0.001, base_batch_size=64)),
        ),
        global_batch_sizes=(64, 256, 1024),
        search=SearchConfig(learning_rate_factors=(0.5, 1.0, 2.0)),
    )
