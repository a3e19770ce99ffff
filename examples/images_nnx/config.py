"""Images in folders of their classes, and a vision transformer of Flax NNX."""

from lbopt import config


def get_config(row=""):
    run = config.TrainConfig(
        name="digits",
        data=config.ImageFolderConfig("digits", train_crop="none", flip=False),
        model="net.py:VisionTransformer",
        optimizer=config.OptimizerConfig("lamb", weight_decay=0.01),
        schedule=config.ScheduleConfig(0.01, base_batch_size=64, base_warmup_epochs=0.5),
        global_batch_size=256,
        num_epochs=20,
    )
    if row == "":
        return run

    muon = config.OptaxConfig("contrib.muon", weight_decay=0.01)
    rate = config.ScheduleConfig(0.005, base_batch_size=64)
    return config.SweepConfig(
        name="digits",
        train=run,
        arms=(config.Arm("LAMB", run.optimizer, run.schedule), config.Arm("Muon", muon, rate)),
        global_batch_sizes=(64, 256, 1024),
        search=config.SearchConfig(learning_rate_factors=(0.5, 1.0, 2.0)),
    )
