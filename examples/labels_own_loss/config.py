"""Several labels an example, with a loss and an optimizer of your own."""

from lbopt import config


def get_config(row=""):
    run = config.TrainConfig(
        name="labels",
        data="digits/",
        model="net.py:Net",
        loss=config.LossConfig(name="net.py:focal", options={"gamma": 1.0}),
        optimizer=config.OptimizerConfig("lamb", weight_decay=0.01),
        schedule=config.ScheduleConfig(0.02, base_batch_size=64, base_warmup_epochs=0.5),
        global_batch_size=256,
        num_epochs=10,
    )
    if row == "":
        return run

    own = config.OptimizerConfig("net.py:signed", weight_decay=0.01)
    rate = config.ScheduleConfig(0.001, base_batch_size=64)
    return config.SweepConfig(
        name="labels",
        train=run,
        arms=(config.Arm("LAMB", run.optimizer, run.schedule), config.Arm("signs", own, rate)),
        global_batch_sizes=(64, 256, 1024),
        search=config.SearchConfig(learning_rate_factors=(0.5, 1.0, 2.0)),
    )
