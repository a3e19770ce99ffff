"""A language model of your own text, with your own tokenizer."""

from lbopt import config


def get_config(row=""):
    run = config.TrainConfig(
        name="topics",
        data=config.DataConfig("data.py:load", outputs=512, options={"text": "topics.txt"}),
        model="net.py:Transformer",
        optimizer=config.OptimizerConfig("lamb", weight_decay=0.01),
        schedule=config.ScheduleConfig(0.01, base_batch_size=64, base_warmup_epochs=0.2),
        global_batch_size=256,
        num_epochs=3,
    )
    if row == "":
        return run

    free = config.OptaxConfig("contrib.schedule_free_adamw")
    rate = config.ScheduleConfig(0.003, base_batch_size=64, decay="constant")
    return config.SweepConfig(
        name="topics",
        train=run,
        arms=(config.Arm("LAMB", run.optimizer, run.schedule), config.Arm("free", free, rate)),
        global_batch_sizes=(64, 256, 1024),
        search=config.SearchConfig(learning_rate_factors=(0.5, 1.0, 2.0)),
    )
