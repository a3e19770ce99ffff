"""Arrays in a file and a network of Equinox."""

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
        name="digits",
        data="digits.npz",
        model="net.py:Net",
        optimizer=OptimizerConfig("lamb", weight_decay=0.01),
        schedule=ScheduleConfig(0.01, base_batch_size=64, base_warmup_epochs=0.5),
        global_batch_size=256,
        num_epochs=10,
    )
    if row == "":
        return run

    return SweepConfig(
        name="digits",
        train=run,
        arms=(
            Arm("LAMB", run.optimizer, run.schedule),
            Arm("Lion", OptaxConfig("lion"), ScheduleConfig(0.001, base_batch_size=64)),
        ),
        global_batch_sizes=(64, 256, 1024),
        search=SearchConfig(learning_rate_factors=(0.5, 1.0, 2.0)),
    )
